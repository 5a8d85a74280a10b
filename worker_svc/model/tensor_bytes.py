"""The bytes of a file of safetensors, read into memory of their own.

safetensors maps a file into memory, and each page that was read stays in the process until the file is closed: beside a
model that is unpacked as it is read, all of the file.
"""

import json
from pathlib import Path

import torch
from torch import Tensor

_LENGTH = 8  # bytes of the number before the header, which is the header's length


class TensorBytes:
    """Reads tensors of one file, which has been found to be whole."""

    def __init__(self, path: Path) -> None:
        self._path = path
        with path.open("rb") as file:
            length = int.from_bytes(file.read(_LENGTH), "little")
            header = json.loads(file.read(length))
        self._begin = _LENGTH + length
        self._places: dict[str, tuple[int, int]] = {
            name: tuple(about["data_offsets"]) for name, about in header.items() if name != "__metadata__"
        }

    def read(self, name: str) -> Tensor:
        """The bytes of a tensor, uint8 [bytes]. Raises OSError."""
        first, end = self._places[name]
        data = torch.empty(end - first, dtype=torch.uint8)
        with self._path.open("rb") as file:
            file.seek(self._begin + first)
            if file.readinto(data.numpy().data) != end - first:
                raise OSError(f"{self._path} ends within the tensor {name}")
        return data
