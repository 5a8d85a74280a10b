"""The tensors of a file of safetensors, read into memory of their own.

safetensors maps a file into memory, and each page that was read stays in the process until the file is closed. A model
is laid out anew as it is read, so the process would take the whole file beside it.
"""

import json
import weakref
from collections.abc import Collection
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

_LENGTH = 8  # bytes of the number before the header, which is the header's length
_DTYPES = {
    "BOOL": torch.bool,
    "U8": torch.uint8,
    "U16": torch.uint16,
    "U32": torch.uint32,
    "U64": torch.uint64,
    "I8": torch.int8,
    "I16": torch.int16,
    "I32": torch.int32,
    "I64": torch.int64,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E4M3FNUZ": torch.float8_e4m3fnuz,
    "F8_E5M2": torch.float8_e5m2,
    "F8_E5M2FNUZ": torch.float8_e5m2fnuz,
    "F8_E8M0": torch.float8_e8m0fnu,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F32": torch.float32,
    "F64": torch.float64,
    "C64": torch.complex64,
}
"""By their names in the format, https://github.com/huggingface/safetensors#format."""


class TensorFile:
    """Reads tensors of one file, whose header safetensors has found to be valid.

    The file stays open, so that all tensors are of the same one where another is given its name.
    """

    def __init__(self, path: Path) -> None:
        """Raises OSError."""
        self._path, self._file = path, path.open("rb")
        weakref.finalize(self, self._file.close)
        length = int.from_bytes(self._file.read(_LENGTH), "little")
        header: dict[str, Any] = json.loads(self._file.read(length))
        self._begin = _LENGTH + length
        header.pop("__metadata__", None)
        self._header = header

    @property
    def names(self) -> Collection[str]:
        return self._header.keys()

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(self._header[name]["shape"])

    def num_bytes(self, name: str, rows: range | None = None) -> int:
        """The size of a tensor, or of `rows` of it as in `read`."""
        first, end = self._header[name]["data_offsets"]
        shape = self.shape(name)
        return int(end - first) if rows is None else (end - first) * len(rows) // max(1, prod(shape[:-1]))

    def read(self, name: str, rows: range | None = None) -> Tensor:
        """A tensor, or `rows` of it as [rows, size of the last dimension].

        Raises OSError, or ValueError if its numbers are of a kind that is not supported.
        """
        about, shape = self._header[name], self.shape(name)
        if about["dtype"] not in _DTYPES:
            raise ValueError(f"the tensor {name} has numbers of the kind {about['dtype']}, which is not supported")
        dtype = _DTYPES[about["dtype"]]
        first, end = about["data_offsets"]
        if rows is not None:
            row = shape[-1] * dtype.itemsize
            first, end, shape = first + rows.start * row, first + rows.stop * row, (len(rows), shape[-1])
        data = torch.empty(shape, dtype=dtype)
        assert prod(shape) * dtype.itemsize == end - first
        self._file.seek(self._begin + first)
        if self._file.readinto(data.reshape(-1).view(torch.uint8).numpy().data) != end - first:
            raise OSError(f"{self._path} ends within the tensor {name}")
        return data
