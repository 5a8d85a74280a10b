"""A model's config.json, as stored and as completed by transformers."""

import json
from pathlib import Path
from typing import Any

from worker_svc.errors import StartupFailed


class UnsupportedModel(StartupFailed):
    """A model that cannot be served. The text is for the operator and says what can."""


def raw_config(directory: Path) -> dict[str, Any]:
    raw: dict[str, Any] = json.loads((directory / "config.json").read_text())
    return raw


def read_config(directory: Path) -> Any:
    """The config of the model in a directory, with transformers' values for what config.json leaves out.

    Raises UnsupportedModel if transformers does not know the architecture.
    """
    raw = raw_config(directory)
    from transformers import AutoConfig

    try:
        return AutoConfig.from_pretrained(directory, local_files_only=True, trust_remote_code=False)
    except (KeyError, ValueError) as error:
        named = ", ".join(raw.get("architectures") or [raw.get("model_type") or "unknown"])
        raise UnsupportedModel(
            f"the model in {directory} is of the architecture {named}, which the installed transformers does not know"
        ) from error
