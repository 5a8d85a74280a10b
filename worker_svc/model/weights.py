"""Reads a checkpoint's tensors from safetensors, in one file or in shards."""

from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from worker_svc.errors import UnsupportedModel
from worker_svc.model.config import read_object
from worker_svc.model.formats.dense import DenseFormat, require_numbers
from worker_svc.model.linear_description import Norm
from worker_svc.model.tensor_file import TensorFile
from worker_svc.model.tensor_names import StoredTensor, renamed_format
from worker_svc.model.weight_format import WeightFormat, format_of, names_read
from worker_svc.page_release import trim_heap

# In old checkpoints; computed again here.
_DERIVED = "rotary_emb.inv_freq"
# Of a tensor that is compared, that are read at once.
_ROWS = 1024


def weight_files(directory: Path) -> list[Path]:
    """The safetensors files of a model, sorted by name.

    Raises UnsupportedModel if one is missing, or their index cannot be read.
    """
    index = directory / "model.safetensors.index.json"
    if (directory / "model.safetensors").is_file():
        return [directory / "model.safetensors"]
    weight_map = read_object(index).get("weight_map")
    if not isinstance(weight_map, dict):
        raise UnsupportedModel(f"{index} has no weight_map, which names the file of each tensor")
    names = sorted(set(map(str, weight_map.values())))
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

    def __init__(
        self,
        directory: Path,
        weight_format: WeightFormat,
        dtype: torch.dtype,
        device: torch.device,
        files: Collection[Path] | None = None,
    ) -> None:
        """`files` have the tensors; None: those of the directory. Raises UnsupportedModel if one is not whole."""
        self.weight_format, self.dtype, self.device = weight_format, dtype, device
        self._directory = directory
        self._files: dict[str, tuple[TensorFile, StoredTensor]] = {}
        """By name: the file, and the place in it."""
        for path in weight_files(directory) if files is None else files:
            with open_weights(path):  # safetensors checks the header and the size of the file
                file = TensorFile(path)
            read = names_read(weight_format, file.names)
            self._files |= {name: (file, StoredTensor(stored)) for name, stored in read.items()}
        self._num_read = self._num_begun = 0

    @property
    def share_read(self) -> float:
        """Bytes read, as a share of all bytes to read, from 0 to 1. Another thread may call it."""
        left = sum(file.num_bytes(stored.name, _rows_of(file, stored)) for file, stored in list(self._files.values()))
        return self._num_read / max(1, self._num_begun + left)

    def take(self, name: str, *shape: int) -> Tensor:
        """The tensor of this name, in the model's dtype and on its device. Raises as `numbers` does."""
        return self.numbers(name, *shape).to(self.device, self.dtype)

    def take_norm(self, norm: Norm) -> tuple[Tensor, Tensor | None]:
        """A norm's weight, without its offset, and its bias, as `take` gives them."""
        return self.take(norm.tensor, norm.size), None if norm.bias is None else self.take(norm.bias, norm.size)

    def numbers(self, name: str, *shape: int) -> Tensor:
        """The tensor of this name, as stored. Raises UnsupportedModel as `read` does, and if it has codes."""
        tensor = self.read(name, *shape)
        require_numbers(name, tensor)
        return tensor

    def read(self, name: str, *shape: int) -> Tensor:
        """The tensor of this name, as stored, in memory of its own.

        Raises UnsupportedModel if it is missing, has another shape or numbers of an unknown kind, or cannot be read.
        """
        if name not in self._files:
            raise UnsupportedModel(f"the model in {self._directory} has no tensor {name}")
        file, stored = self._files.pop(name)
        found = file.shape(stored.name)
        if not stored.is_stored_as(found, shape):
            raise UnsupportedModel(
                f"the tensor {stored.name} of the model in {self._directory} is {list(found)}, not "
                f"{list(stored.whole(shape))}"
            )
        rows = stored.rows(found)
        self._num_begun += file.num_bytes(stored.name, rows)
        tensor = self._read(file, stored.name, rows)
        self._num_read += tensor.nbytes
        return stored.part_of(tensor, found).view(shape)

    def _read(self, file: TensorFile, name: str, rows: range | None) -> Tensor:
        try:
            return file.read(name, rows)
        except (OSError, ValueError) as error:
            raise UnsupportedModel(f"the model in {self._directory} cannot be read: {error}") from error

    def has_numbers(self, name: str, numbers: Tensor) -> bool:
        """Whether the tensor of this name, in the model's dtype, is this one on the model's device.

        It is read in parts, to the first one that differs, and can be taken afterwards. Raises UnsupportedModel if it
        cannot be read.
        """
        file, stored = self._files[name]
        if file.shape(stored.name) != tuple(numbers.shape):
            return False
        parts = _parts(numbers.shape)
        return all(torch.equal(self._some(name, rows), numbers[rows.start : rows.stop]) for rows in parts)

    def are_equal(self, first: str, second: str) -> bool:
        """Whether two tensors have the same numbers in the model's dtype; otherwise as `has_numbers`."""
        shape, other = (file.shape(stored.name) for file, stored in (self._files[first], self._files[second]))
        return shape == other and all(
            torch.equal(self._some(first, rows), self._some(second, rows)) for rows in _parts(shape)
        )

    def _some(self, name: str, rows: range) -> Tensor:
        """Rows of a tensor, in the model's dtype and on its device."""
        file, stored = self._files[name]
        return self._read(file, stored.name, rows).to(self.device, self.dtype)

    @property
    def names(self) -> Collection[str]:
        """The names of the tensors that are left."""
        return self._files.keys()

    def rename(self, places: Mapping[str, StoredTensor]) -> None:
        """Gives tensors other names: `places` has the present ones by the new names. Others are left unused."""
        renamed = {}
        for name, place in places.items():
            file, stored = self._files[place.name]
            renamed[name] = file, StoredTensor(stored.name, place.part or stored.part)
        self._files = renamed
        if not isinstance(self.weight_format, DenseFormat):
            self.weight_format = renamed_format(self.weight_format, places)

    def drop(self, name: str) -> None:
        """Leaves a tensor unused, if it exists."""
        self._files.pop(name, None)

    def drop_zeros(self, name: str) -> None:
        """Leaves a tensor unused, if it exists and all its numbers are 0. Raises UnsupportedModel if it cannot be
        read.
        """
        if name in self._files:
            file, stored = self._files[name]
            if not self._read(file, stored.name, _rows_of(file, stored)).float().any():
                self.drop(name)

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


def _rows_of(file: TensorFile, stored: StoredTensor) -> range | None:
    return stored.rows(file.shape(stored.name))


def _parts(shape: Sequence[int]) -> Iterator[range]:
    """The rows of a tensor, of which so many are read at once."""
    return (range(start, min(start + _ROWS, shape[0])) for start in range(0, shape[0], _ROWS))


class ReadMeter:
    """Shows how much of a checkpoint has been read, once it is open."""

    def __init__(self) -> None:
        self.checkpoint: Checkpoint | None = None

    def share(self) -> float | None:
        """From 0 to 1; None until the checkpoint is open, and once it is closed. Any thread may call it."""
        checkpoint = self.checkpoint
        return None if checkpoint is None else checkpoint.share_read


@contextmanager
def open_checkpoint(
    directory: Path, dtype: torch.dtype, device: torch.device, meter: ReadMeter | None = None
) -> Iterator[Checkpoint]:
    """The checkpoint of a directory, to build a model from; `meter` shows what has been read of it.

    Raises UnsupportedModel at the end if tensors are left that nothing has taken.
    """
    with torch.inference_mode():
        checkpoint = Checkpoint(directory, format_of(directory), dtype, device)
        meter = meter or ReadMeter()
        meter.checkpoint = checkpoint
        try:
            yield checkpoint
        finally:
            meter.checkpoint = None  # it holds files
        checkpoint.check_all_taken()
    trim_heap()  # of what was read, the C library keeps much
