"""Queries alone come out as those of `rotary_store`, and as in the reference."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from quire_kernels.rotary_store import HeadNorm, rotary_store
from quire_kernels.rotate_queries import rotate_queries, rotate_queries_reference
from quire_kernels.row_norm import RowNorm

SIXTEEN_BITS = torch.bfloat16 if torch.cuda.is_available() else torch.float16


def make_arguments(
    device: str, head_dim: int = 64, rotary_dim: int | None = None, dtype: torch.dtype = torch.float32, **others: Any
) -> dict[str, Any]:
    """Three heads of five tokens, a part of a wider row."""
    torch.manual_seed(0)
    rotary_dim = head_dim if rotary_dim is None else rotary_dim
    exponents = torch.arange(0, rotary_dim, 2, dtype=torch.float32) / max(1, rotary_dim)
    return {
        "query": torch.randn(5, 4 * head_dim)[:, head_dim:].to(device, dtype),
        "positions": torch.randint(131_072, (5,)).to(device),
        "frequencies": (1.0 / 500_000.0**exponents).to(device) if rotary_dim else None,
        "head_dim": head_dim,
        **others,
    }


@pytest.mark.parametrize("dtype", [torch.float32, SIXTEEN_BITS], ids=str)
@pytest.mark.parametrize(("head_dim", "rotary_dim"), [(64, 64), (80, 32), (48, 0), (15, 0), (512, 512), (512, 128)])
@pytest.mark.parametrize(("normed", "after_rotation"), [(False, False), (True, False), (True, True)])
def test_queries_are_those_of_rotary_store(
    head_dim: int,
    rotary_dim: int,
    normed: bool,
    after_rotation: bool,
    dtype: torch.dtype,
    device: str,
    assert_close: Callable[[Tensor, Tensor], None],
) -> None:
    arguments = make_arguments(device, head_dim, rotary_dim, dtype, attention_factor=1.25)
    weight = torch.randn(head_dim, generator=torch.Generator().manual_seed(1)).to(device, dtype)
    norm = RowNorm(weight, 0.5) if normed else None
    rotated = rotate_queries(**arguments, norm=norm, norm_after_rotation=after_rotation)
    assert_close(rotated, rotate_queries_reference(**arguments, norm=norm, norm_after_rotation=after_rotation))
    query = arguments["query"]
    cache = torch.zeros(2, 1, 1, 8, head_dim, device=device, dtype=dtype)
    of_both = rotary_store(
        torch.cat((query, query[:, : 2 * head_dim]), 1),
        arguments["positions"],
        arguments["frequencies"],
        cache[0],
        cache[1],
        torch.arange(5, device=device),
        attention_factor=1.25,
        norm=HeadNorm(weight, weight, 0.5, 0.5, after_rotation) if normed else None,
    )
    assert torch.equal(rotated, of_both)
    assert rotated.is_contiguous()


def test_no_tokens(device: str) -> None:
    arguments = make_arguments(device)
    arguments |= {"query": arguments["query"][:0], "positions": arguments["positions"][:0]}
    assert rotate_queries(**arguments).shape == (0, 3, 64)


@pytest.mark.parametrize(
    ("argument", "change"),
    [
        ("query", lambda query: query[0]),
        ("query", lambda query: query[:, :-1]),
        ("query", lambda query: query.T),
        ("positions", lambda positions: positions.int()),
        ("positions", lambda positions: positions[1:]),
        ("frequencies", lambda frequencies: frequencies.double()),
        ("frequencies", lambda frequencies: frequencies.repeat(2)),
        ("norm.weight", lambda norm: norm._replace(weight=norm.weight[1:])),
        ("norm", lambda norm: norm._replace(is_centered=True)),
        ("norm", lambda norm: norm._replace(bias=norm.weight)),
    ],
)
def test_a_wrong_argument_is_named(argument: str, change: Callable[[Any], Any], device: str) -> None:
    arguments = make_arguments(device, norm=RowNorm(torch.ones(64, device=device), 1e-6))
    name = argument.split(".")[0]
    arguments[name] = change(arguments[name])
    with pytest.raises(ValueError, match=f"^{argument}: "):
        rotate_queries(**arguments)
