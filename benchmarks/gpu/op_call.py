"""A call of an op that has a reference of the same arguments, and the sizes and numbers that calls share."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields, is_dataclass
from typing import Any

import torch
from torch import Tensor

Arguments = tuple[tuple[Any, ...], dict[str, Any]]


@dataclass(frozen=True)
class OpCall:
    """An op, its reference, and a function that makes the same arguments for each, which both may change."""

    name: str
    op: Callable[..., Any]
    reference: Callable[..., Any]
    make: Callable[[], Arguments]
    bound: float = 1e-2

    def error(self) -> float:
        """The largest relative error, by the norm, of a tensor of the results or of the arguments afterwards.

        Raises ValueError where their shapes differ, or numbers that are not finite.
        """
        pairs = []
        for function in (self.op, self.reference):
            torch.manual_seed(0)
            positional, named = self.make()
            result = function(*positional, **named)
            if torch.cuda.is_available():
                torch.cuda.synchronize()  # a copy to the host may be on its way
            pairs.append(list(_tensors((result, positional, named))))
        ours, expected = pairs
        if [one.shape for one in ours] != [one.shape for one in expected]:
            raise ValueError("the op and its reference have no results of the same shapes")
        return max(_relative_error(*pair) for pair in zip(ours, expected, strict=True))


def _tensors(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif is_dataclass(value):
        for field in fields(value):
            yield from _tensors(getattr(value, field.name))
    elif isinstance(value, tuple | list):
        for part in value:
            yield from _tensors(part)
    elif isinstance(value, dict):
        yield from _tensors(list(value.values()))


def _relative_error(actual: Tensor, expected: Tensor) -> float:
    """Of the finite numbers."""
    ours, theirs = actual.double(), expected.double()
    finite = theirs.isfinite()
    if not torch.equal(ours.isfinite(), finite) or not torch.equal(
        ours[~finite].nan_to_num(nan=0.0), theirs[~finite].nan_to_num(nan=0.0)
    ):
        raise ValueError("the op and its reference differ in numbers that are not finite")
    return float((ours[finite] - theirs[finite]).norm() / theirs[finite].norm().clamp_min(1e-30))


@dataclass(frozen=True)
class Sizes:
    """What the tensors of calls are."""

    device: torch.device
    dtype: torch.dtype
    small: bool

    @property
    def num_tokens(self) -> int:
        return 5 if self.small else 70

    @property
    def width(self) -> int:
        return 64 if self.small else 2048

    def normal(self, *shape: int, dtype: torch.dtype | None = None) -> Tensor:
        """The same numbers on every device."""
        return torch.randn(shape).to(self.device, dtype or self.dtype)

    def ints(self, most: int, *shape: int, dtype: torch.dtype = torch.int64) -> Tensor:
        return torch.randint(most, shape).to(self.device, dtype)


def name_of(dtype: torch.dtype) -> str:
    """Without the package."""
    return str(dtype).removeprefix("torch.")
