"""Writes tensors into a file of safetensors one after the other: `safetensors.torch.save_file` needs all in memory."""

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import BinaryIO

import torch
from torch import Tensor

_DTYPES = {torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16", torch.uint8: "U8"}
_ALIGNED = 8  # bytes that the header is a multiple of


@dataclass(frozen=True, slots=True)
class PlannedTensor:
    """A tensor that is made when it is written."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    make: Callable[[], Tensor]

    @property
    def num_bytes(self) -> int:
        return prod(self.shape) * self.dtype.itemsize


def write_tensors(path: Path, tensors: Mapping[str, PlannedTensor]) -> None:
    """Writes tensors of float32, float16, bfloat16 and uint8. Raises OSError."""
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, planned in tensors.items():
        offsets = [end, end := end + planned.num_bytes]
        header[name] = {"dtype": _DTYPES[planned.dtype], "shape": list(planned.shape), "data_offsets": offsets}
    encoded = json.dumps(header).encode()
    encoded += b" " * (-len(encoded) % _ALIGNED)
    with path.open("wb") as file:
        file.write(len(encoded).to_bytes(8, "little") + encoded)
        for planned in tensors.values():
            _write(file, planned)


def _write(file: BinaryIO, planned: PlannedTensor) -> None:
    tensor = planned.make().contiguous()
    assert tensor.dtype == planned.dtype, "a tensor is made as it was planned"
    assert tensor.shape == planned.shape, "a tensor is made as it was planned"
    file.write(tensor.flatten().view(torch.uint8).numpy().data)
