"""Reads a checkpoint's tensors from safetensors, in one file or in shards."""

import json
from collections.abc import Collection, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from worker_svc.model.config import UnsupportedModel
from worker_svc.model.tensor_bytes import TensorBytes
from worker_svc.model.tensor_names import StoredTensor
from worker_svc.model.weight_format import WeightFormat, format_of, names_read

# In old checkpoints; computed again here.
_DERIVED = "rotary_emb.inv_freq"


def weight_files(directory: Path) -> list[Path]:
    """The safetensors files of a model, sorted by name.

    Raises UnsupportedModel if one is missing, or their index cannot be read.
    """
    index = directory / "model.safetensors.index.json"
    if (directory / "model.safetensors").is_file():
        return [directory / "model.safetensors"]
    try:
        names = sorted(set(json.loads(index.read_text())["weight_map"].values()))
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise UnsupportedModel(f"{index} cannot be read: {error!r}") from error
    for name in names:
        # A shard is in the directory of its index; a path would leave it.
        if Path(name).name != name or not (directory / name).is_file():
            raise UnsupportedModel(f"the model in {directory} has no weights file {name}")
    return [directory / name for name in names]


def open_weights(path: Path) -> Any:
    """Opens one of these files, as a context of safetensors. Raises UnsupportedModel if it is damaged."""
    try:
        return safe_open(path, framework="pt")
    except (OSError, SafetensorError) as error:
        raise UnsupportedModel(f"{path} is damaged or not complete: {error}") from error


class Checkpoint:
    """The tensors of a model directory, each taken once; `dtype` and `device` are those of the model."""

    def __init__(self, directory: Path, weight_format: WeightFormat, dtype: torch.dtype, device: torch.device) -> None:
        self.weight_format, self.dtype, self.device = weight_format, dtype, device
        self._directory = directory
        self._files: dict[str, tuple[Any, StoredTensor]] = {}
        """By name: the file, and the place in it."""
        self._bytes: dict[str, TensorBytes] = {}
        """The files by the names of their tensors."""
        self._stack = ExitStack()

    def __enter__(self) -> Self:
        for path in weight_files(self._directory):
            file = self._stack.enter_context(open_weights(path))
            read = names_read(self.weight_format, file.keys())
            self._bytes |= dict.fromkeys(file.keys(), TensorBytes(path))
            self._files |= {name: (file, StoredTensor(stored)) for name, stored in read.items()}
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stack.close()

    def take(self, name: str, *shape: int) -> Tensor:
        """The tensor of this name, in the model's dtype and on its device. Raises UnsupportedModel as `read` does."""
        return self.read(name, *shape).to(self.device, self.dtype)

    def read(self, name: str, *shape: int) -> Tensor:
        """The tensor of this name, as stored. Raises UnsupportedModel if it is missing or has another shape."""
        if name not in self._files:
            raise UnsupportedModel(f"the model in {self._directory} has no tensor {name}")
        file, stored = self._files.pop(name)
        content = file.get_slice(stored.name)
        found = content.get_shape()
        if not stored.is_stored_as(found, shape):
            expected = list(stored.whole(shape))
            raise UnsupportedModel(
                f"the tensor {stored.name} of the model in {self._directory} is {found}, not {expected}"
            )
        rows = stored.rows
        tensor: Tensor = file.get_tensor(stored.name) if rows is None else content[rows.expert, rows.first : rows.end]
        return tensor.view(shape)

    def read_bytes(self, name: str, *shape: int) -> Tensor:
        """As `read`, of a tensor in uint8, into memory of its own."""
        place = self._files.get(name)
        found = self.read(name, *shape)  # which raises where there is none
        if place is None or place[1].rows is not None or found.dtype != torch.uint8:
            return found
        stored = place[1].name
        return self._bytes[stored].read(stored).view(shape)

    @property
    def names(self) -> Collection[str]:
        """The names of the tensors that are left."""
        return self._files.keys()

    def rename(self, places: Mapping[str, StoredTensor]) -> None:
        """Gives tensors other names: `places` has the present ones by the new names. Others are left unused."""
        renamed = {}
        for name, place in places.items():
            file, stored = self._files[place.name]
            renamed[name] = file, StoredTensor(stored.name, place.rows)
        self._files = renamed

    def drop(self, name: str) -> None:
        """Leaves a tensor unused, if it exists."""
        self._files.pop(name, None)

    def drop_prefixes(self, prefixes: tuple[str, ...]) -> None:
        """Leaves all tensors unused whose names begin with one of these."""
        self._files = {name: file for name, file in self._files.items() if not name.startswith(prefixes)}

    def check_all_taken(self) -> None:
        """Raises UnsupportedModel if tensors are left: the model has parts that its config does not mention."""
        left = sorted(name for name in self._files if not name.endswith(_DERIVED))
        if left:
            raise UnsupportedModel(
                f"the model in {self._directory} has tensors that its architecture does not: {', '.join(left[:3])}"
                f"{' and others' if len(left) > 3 else ''}"
            )


@contextmanager
def open_checkpoint(directory: Path, dtype: torch.dtype, device: torch.device) -> Iterator[Checkpoint]:
    """The checkpoint of a directory, to build a model from. Raises UnsupportedModel at the end if tensors are left that
    nothing has taken.
    """
    with torch.inference_mode(), Checkpoint(directory, format_of(directory), dtype, device) as checkpoint:
        yield checkpoint
        checkpoint.check_all_taken()
