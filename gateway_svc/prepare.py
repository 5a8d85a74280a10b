"""Prepares configuration and tokenizer of each model: `python -m gateway_svc.prepare`, with the settings of a gateway.

Nothing is downloaded for a model directory, nor for the default model, whose files are part of Quire. Of a hub id the
files of `svc_common.models.CONFIG_FILES` are downloaded. Only `python -m worker_svc.prepare` converts GGUF files.
"""

import sys
from dataclasses import replace
from functools import partial

from pydantic_settings import SettingsConfigDict

from gateway_svc.settings import GatewaySettings
from svc_common.model_settings import InvalidModelsFile, ModelSettings
from svc_common.models import (
    ModelNotFound,
    ServedModel,
    check_model_files,
    check_tokenizer_files,
    find_source,
    find_tokenizer,
)
from svc_common.preparation import PreparationFailed, Report, prepare_files
from svc_common.settings import read_settings


class PrepareSettings(GatewaySettings):
    """The gateway's settings. Only those that name models are used."""

    model_config = SettingsConfigDict(cli_prog_name="python -m gateway_svc.prepare")


def prepare(model: ModelSettings, report: Report) -> ServedModel:
    """Downloads the files that a gateway reads, if they are missing. Raises ModelNotFound and PreparationFailed."""
    try:
        source = replace(find_source(model.model, model.revision), with_weights=False)
        other = find_tokenizer(model.model, model.revision, model.tokenizer, model.tokenizer_revision)
        check = partial(check_model_files, with_tokenizer=other is None, with_weights=False)
        prepare_files(source, check, report)
        if other is not None:
            prepare_files(other, check_tokenizer_files, report)
    except (ModelNotFound, PreparationFailed) as error:
        raise type(error)(model.locate(error)) from error
    return model.resolve()


def main() -> None:
    """Prepares all models of the settings and prints their directories."""
    settings = read_settings(PrepareSettings)
    try:
        for model in settings.model_settings():
            served = prepare(model, lambda line: print(f"quire: {line}", file=sys.stderr, flush=True))
            print(served.path)
    except (InvalidModelsFile, ModelNotFound, PreparationFailed) as error:
        raise SystemExit(f"quire: {error}") from None


if __name__ == "__main__":
    main()
