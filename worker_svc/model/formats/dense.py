"""Dense weights: one floating-point tensor for each linear layer."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from worker_svc.errors import UnsupportedModel


@dataclass(frozen=True, slots=True, eq=False)
class DenseWeight:
    """A `StoredWeight` that needs no unpacking."""

    tensor: Tensor

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.tensor.shape)

    def outputs(self, start: int, stop: int) -> "DenseWeight":
        return DenseWeight(self.tensor[start:stop])

    def strided(self, outputs: slice) -> "DenseWeight":
        return DenseWeight(self.tensor[outputs])

    def inputs(self, start: int, stop: int) -> "DenseWeight":
        return DenseWeight(self.tensor[:, start:stop])

    def dense(self) -> Tensor:
        return self.tensor


class DenseFormat:
    """A `WeightFormat` of one tensor, `weight`."""

    def read_as(self, name: str) -> str | None:
        return name

    def tensors(self, layer: str, outputs: int, inputs: int) -> Mapping[str, tuple[int, ...]]:
        return {f"{layer}.weight": (outputs, inputs)}

    def weight(self, layer: str, tensors: Mapping[str, Tensor]) -> DenseWeight:
        tensor = tensors[f"{layer}.weight"]
        require_numbers(f"{layer}.weight", tensor)
        return DenseWeight(tensor)


def require_numbers(name: str, tensor: Tensor) -> None:
    """Raises UnsupportedModel, which names the tensor, if it has codes, whose numbers are only known with a scale."""
    # Of 8 bits: FP8.
    if not tensor.is_floating_point() or tensor.dtype.itemsize == 1:
        kind = str(tensor.dtype).removeprefix("torch.")
        raise UnsupportedModel(
            f"the tensor {name} is {kind}, and config.json names no format of weights, or the checkpoint has no scale "
            "of it"
        )


def _make(quantization: Mapping[str, Any]) -> DenseFormat:
    return DenseFormat()


FORMAT = _make
