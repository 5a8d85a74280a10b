"""Writes a model with its linear layers in fewer bits: `python -m worker_svc.quantize MODEL OUT --format FORMAT`.

The result is a checkpoint of compressed-tensors. One file of the model is in memory at a time.
"""

import argparse
import fcntl
import json
import os
import shutil
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, TypeAlias

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from svc_common.models import TEMPLATE_FOLDER, ModelNotFound, SourceKind, find_source
from svc_common.preparation import PreparationFailed
from worker_svc.compressed_writer import CompressedScheme, compress, quantization_config, scheme_named
from worker_svc.errors import UnsupportedModel
from worker_svc.model.architecture import describe_any
from worker_svc.model.config import raw_config, read_config
from worker_svc.model.description import LinearRole, ModelDescription
from worker_svc.model.encoder_description import EncoderDescription
from worker_svc.model.sentence_files import module_folders
from worker_svc.model.tensor_names import described_names
from worker_svc.model.weight_format import quantization_of
from worker_svc.model.weights import open_weights, weight_files
from worker_svc.prepare import convert_gguf, prepare
from worker_svc.progress import progress

Compress: TypeAlias = Callable[[str, Tensor], Mapping[str, Tensor]]
"""Makes the tensors of a linear layer, of its name and weight."""

FORMATS = ("w8a8", "w8a16", "w4a16")
GROUPS = (32, 64, 128)
_INDEX = "model.safetensors.index.json"
_WEIGHT = ".weight"
_UNFINISHED = ".quantizing"  # a folder of the target, in which files are until all are written
# Weights in other containers: they would be the model once more, as it was.
_OTHER_WEIGHTS = {".safetensors", ".bin", ".pt", ".pth", ".gguf", ".h5", ".msgpack", ".onnx"}
_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


class CannotWrite(Exception):  # noqa: N818
    """The directory for the result cannot be used. The text is for the operator."""


@dataclass(frozen=True, slots=True)
class QuantizedModel:
    """What was written: the linear layers that are in fewer bits, and the bytes of all tensors."""

    num_layers: int
    num_bytes: int


@dataclass(frozen=True, slots=True)
class _Layers:
    """Names of linear layers in the checkpoint."""

    quantized: Mapping[str, int]
    """With their inputs."""
    left: list[str]
    """Those that are named in `ignore`."""


def quantize_model(
    source: Path, target: Path, scheme: CompressedScheme, report: Callable[[str], None]
) -> QuantizedModel:
    """Writes the model of a directory into a new one.

    Heads, routers, layers whose inputs are no multiple of the group, and those that are not stored as a tensor
    [outputs, inputs] of their own stay as they are.

    Raises UnsupportedModel for a model that cannot be quantized, and CannotWrite if the target is not empty or another
    process writes to it. The target has a config.json once it is complete.
    """
    if quantization_of(source) is not None:
        raise UnsupportedModel(f"the model in {source} is quantized already")
    description = describe_any(read_config(source))
    if isinstance(description, EncoderDescription):
        raise UnsupportedModel(
            f"the model in {source} is an encoder: only QUIRE_QUANTIZATION, which takes effect on load, is for these"
        )
    if description is None:
        raise UnsupportedModel(f"the model in {source} is of an architecture that is not computed natively")
    files = weight_files(source)
    layers = _layers_of(description, files, scheme)
    if not layers.quantized:
        raise UnsupportedModel(f"the model in {source} has no linear layer that could be quantized")
    folders = module_folders(source)  # of an embedding model: how it pools, and the layers behind that
    if (source / TEMPLATE_FOLDER).is_dir():
        folders.append(Path(TEMPLATE_FOLDER))
    with _unfinished(target) as folder:
        num_bytes = _write(source, folder, files, layers, partial(compress, scheme=scheme), report)
        for name in folders:
            _copy_folder(source / name, folder / name)
        config = raw_config(source) | {"quantization_config": quantization_config(scheme, layers.left)}
        _write_json(folder / "config.json", config)
        for path in sorted(folder.iterdir(), key=lambda path: path.name == "config.json"):
            path.rename(target / path.name)
    return QuantizedModel(len(layers.quantized), num_bytes)


@contextmanager
def _unfinished(target: Path) -> Iterator[Path]:
    """A new folder within the target, on the same disk; it is removed at the end. One process has it at a time."""
    if target.exists() and (not target.is_dir() or any(path.name != _UNFINISHED for path in target.iterdir())):
        raise CannotWrite(f"{target} exists already")
    is_new = not target.exists()
    folder = target / _UNFINISHED
    folder.mkdir(parents=True, exist_ok=True)
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise CannotWrite(f"another process writes to {target}") from None
        try:
            for path in folder.iterdir():  # of a process that was killed
                shutil.rmtree(path) if path.is_dir() else path.unlink()
            yield folder
        finally:
            shutil.rmtree(folder, ignore_errors=True)
            if is_new and not any(target.iterdir()):
                target.rmdir()
    finally:
        os.close(descriptor)


def _layers_of(description: ModelDescription, files: list[Path], scheme: CompressedScheme) -> _Layers:
    stored: set[str] = set()
    for path in files:
        with open_weights(path) as file:
            stored.update(file.keys())
    places = described_names(description, stored)
    quantized, left = dict[str, int](), list[str]()
    # Of heads that no layer is; a reader that has them must not look for their codes.
    unused = tuple(description.unused_prefixes)
    left += sorted(name.removesuffix(_WEIGHT) for name in stored if name.startswith(unused) and name.endswith(_WEIGHT))
    for layer in description.linear_layers:
        if layer is description.head and description.score_head is not None:
            continue  # it has none for logits
        is_kept = layer.role in (LinearRole.HEAD, LinearRole.ROUTER) or not scheme.takes(layer.inputs)
        for linear in layer.stored:
            place = places.get(f"{linear.name}{_WEIGHT}")
            name = linear.name if place is None else place.name.removesuffix(_WEIGHT)
            is_own = place is not None and place.part is None and place.name.endswith(_WEIGHT)
            if is_kept or not is_own or linear.transposed:
                left.append(name)
            else:
                quantized[name] = layer.inputs
    return _Layers(quantized, list(dict.fromkeys(left)))  # a tensor of all experts is named once


def _write(
    source: Path,
    target: Path,
    files: list[Path],
    layers: _Layers,
    make: Compress,
    report: Callable[[str], None],
) -> int:
    """Returns the bytes of the tensors."""
    weight_map: dict[str, str] = {}
    num_bytes = 0
    for number, path in enumerate(files, start=1):
        with progress(f"quantizing file {number} of {len(files)}", report):
            tensors = dict(_quantized(path, layers, make))
            save_file(tensors, target / path.name, metadata={"format": "pt"})
        (target / path.name).chmod(0o644)  # safetensors makes it readable for its owner only
        weight_map |= dict.fromkeys(tensors, path.name)
        num_bytes += sum(tensor.nbytes for tensor in tensors.values())
    if len(files) > 1:
        _write_json(target / _INDEX, {"metadata": {"total_size": num_bytes}, "weight_map": weight_map})
    for path in source.iterdir():
        is_written = (target / path.name).exists() or path.name in (_INDEX, "config.json")
        if path.is_file() and not is_written and path.suffix not in _OTHER_WEIGHTS:
            shutil.copyfile(path, target / path.name)
    return num_bytes


def _copy_folder(source: Path, target: Path) -> None:
    """Copies the files of a folder, whatever they are."""
    target.mkdir(parents=True, exist_ok=True)
    for path in source.iterdir():
        if path.is_file():
            shutil.copyfile(path, target / path.name)


def _quantized(path: Path, layers: _Layers, make: Compress) -> Iterator[tuple[str, Tensor]]:
    """The tensors of a file, and in the place of weights those of their scheme."""
    with open_weights(path) as file:
        for name in file.keys():  # noqa: SIM118
            tensor: Tensor = file.get_tensor(name)
            layer = name.removesuffix(_WEIGHT)
            if layer == name or layer not in layers.quantized:
                yield name, tensor
                continue
            if tensor.dtype not in _DTYPES or tensor.ndim != 2 or tensor.shape[1] != layers.quantized[layer]:
                raise UnsupportedModel(
                    f"the tensor {name} must be a matrix of {layers.quantized[layer]} inputs in float32, bfloat16 or "
                    f"float16, not {list(tensor.shape)} in {str(tensor.dtype).removeprefix('torch.')}"
                )
            yield from make(layer, tensor).items()


def _write_json(path: Path, content: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2) + "\n")


@contextmanager
def _dense_model(model: str | None, revision: str | None, report: Callable[[str], None]) -> Iterator[Path]:
    """The directory of a model; of a GGUF file, of weights of 32 bits. Raises ModelNotFound or PreparationFailed."""
    source = find_source(model, revision)
    if source.kind is not SourceKind.GGUF:
        yield prepare(model, report, revision).path
        return
    with TemporaryDirectory(prefix="quire-") as scratch:
        convert_gguf(Path(source.origin), Path(scratch), report, keeps_blocks=False)
        yield Path(scratch)


def main() -> None:
    """Quantizes the model of the arguments, and prints the directory of the result, or as JSON what was written."""
    parser = argparse.ArgumentParser(
        prog="quire quantize",
        description="Write a model with the weights of its linear layers in fewer bits, as compressed-tensors does.",
    )
    parser.add_argument("model", help="model directory, GGUF file or hub id; '' is the default model")
    parser.add_argument("out", type=Path, help="directory to write; it must not exist, or be empty")
    parser.add_argument("--format", choices=FORMATS, required=True, help="bits of weights and of activations")
    parser.add_argument("--revision", help="branch, tag or commit of the model's hub id")
    parser.add_argument(
        "--group-size", type=int, choices=GROUPS, default=GROUPS[0],
        help="w4a16: inputs with one scale (default: %(default)s)",
    )  # fmt: skip
    parser.add_argument("--json", action="store_true", help="print what was written as JSON")
    asked = parser.parse_args()

    def report(line: str) -> None:
        print(f"quire: {line}", file=sys.stderr, flush=True)

    try:
        scheme = scheme_named(asked.format, asked.group_size)
        with _dense_model(asked.model or None, asked.revision, report) as source:
            written = quantize_model(source, asked.out.resolve(), scheme, report)
    except (CannotWrite, ModelNotFound, PreparationFailed, UnsupportedModel, OSError, SafetensorError) as error:
        raise SystemExit(f"quire: {error}") from None
    report(f"{written.num_layers} linear layers are in {asked.format}")
    if not asked.json:
        print(asked.out)
        return
    result = {
        "path": str(asked.out.resolve()),
        "format": asked.format,
        "group_size": scheme.group,
        "layers": written.num_layers,
        "bytes": written.num_bytes,
    }
    print(json.dumps(result, indent=2))


if __name__ == "__main__":
    main()
