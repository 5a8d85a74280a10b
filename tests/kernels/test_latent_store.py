"""Latent vectors, rotated keys and rotated queries are those of plain torch, and nothing else is written."""

from typing import Any

import pytest
import torch

from quire_kernels.kv_quantization import dequantize
from quire_kernels.latent_store import latent_store, latent_store_reference
from quire_kernels.row_norm import RowNorm

BLOCK_SIZE = 16
# The tolerance of codes for near-ties that the two sides round differently. The interpreter does not round float8.
CODE_ERRORS = {torch.int8: 1 / 127} | ({torch.float8_e4m3fn: 1 / 16} if torch.cuda.is_available() else {})


def make_arguments(
    device: str,
    num_tokens: int = 5,
    num_heads: int = 3,
    rank: int = 24,
    rotated: int = 8,
    dtype: torch.dtype = torch.float32,
    cache_dtype: torch.dtype | None = None,
    **options: Any,
) -> dict[str, Any]:
    torch.manual_seed(0)
    width, num_blocks = rank + rotated, -(-num_tokens // BLOCK_SIZE) + 2
    # As in a worker: a layer's view of a cache of two, and slices of wider products
    cache = torch.zeros(num_blocks, 2, 1, 1, BLOCK_SIZE, width, device=device).to(cache_dtype or dtype)
    scales = torch.zeros(num_blocks, 2, 1, 1, BLOCK_SIZE, device=device)
    product = torch.randn(num_tokens, 40 + width, device=device).to(dtype)
    heads = torch.randn(num_tokens, num_heads, 12 + rotated, device=device).to(dtype)
    slots = torch.randperm(num_blocks * BLOCK_SIZE, device=device)[:num_tokens]
    slots[1:2] = -1
    return {
        "compressed": product[:, 40:],
        "rotated": heads[..., 12:],
        "positions": torch.randint(0, 4000, (num_tokens,), device=device),
        "frequencies": torch.rand(rotated // 2, device=device),
        "norm": RowNorm(torch.randn(rank, device=device).to(dtype), 1e-6),
        "key_cache": cache[:, 1, 0],
        "slots": slots,
        "query": torch.full((num_tokens, num_heads, width), 7.0, dtype=dtype, device=device),
        "rotates_neighbours": True,
        "key_scales": None if cache_dtype is None else scales[:, 1, 0],
    } | options


def _copy(arguments: dict[str, Any]) -> dict[str, Any]:
    copied = {name: arguments[name].clone() for name in ("key_cache", "query")}
    if arguments["key_scales"] is not None:
        copied["key_scales"] = arguments["key_scales"].clone()
    return arguments | copied


def _compare(arguments: dict[str, Any]) -> None:
    expected = _copy(arguments)
    latent_store(**arguments)
    latent_store_reference(**expected)
    tolerance = 2e-5 if arguments["query"].dtype == torch.float32 else 2e-2
    torch.testing.assert_close(arguments["query"], expected["query"], atol=tolerance, rtol=tolerance)
    scales = arguments["key_scales"]
    if scales is None:
        torch.testing.assert_close(arguments["key_cache"], expected["key_cache"], atol=tolerance, rtol=tolerance)
    else:
        torch.testing.assert_close(scales, expected["key_scales"], atol=1e-5, rtol=1e-5)
        ours, theirs = (dequantize(one["key_cache"], one["key_scales"]) for one in (arguments, expected))
        largest = theirs.abs().amax(-1, keepdim=True)
        tolerance = CODE_ERRORS[arguments["key_cache"].dtype]
        assert bool(((ours - theirs).abs() <= 1.01 * tolerance * largest).all())


@pytest.mark.parametrize("rotates_neighbours", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
@pytest.mark.parametrize("cache_dtype", [None, *CODE_ERRORS], ids=str)
def test_rows(device: str, cache_dtype: torch.dtype | None, dtype: torch.dtype, rotates_neighbours: bool) -> None:
    options: dict[str, Any] = {"rotates_neighbours": rotates_neighbours, "attention_factor": 1.3}
    _compare(make_arguments(device, dtype=dtype, cache_dtype=cache_dtype, **options))


@pytest.mark.parametrize(
    ("num_tokens", "num_heads", "rank", "rotated"), [(1, 1, 1, 2), (17, 5, 33, 6), (2, 128, 512, 64)]
)
def test_sizes(device: str, num_tokens: int, num_heads: int, rank: int, rotated: int) -> None:
    _compare(make_arguments(device, num_tokens, num_heads, rank, rotated))


def test_what_is_not_a_rotated_query_stays(device: str) -> None:
    arguments = make_arguments(device)
    latent_store(**arguments)
    assert bool((arguments["query"][..., :24] == 7.0).all())
    assert bool((arguments["query"][..., 24:] != 7.0).all())


def test_the_two_orders_of_pairs_differ(device: str) -> None:
    """Otherwise the tests above would pass with one of them alone."""
    arguments = make_arguments(device)
    other = _copy(arguments) | {"rotates_neighbours": False}
    latent_store(**arguments)
    latent_store(**other)
    assert not torch.allclose(arguments["query"], other["query"], atol=0.1)


def test_no_tokens(device: str) -> None:
    arguments = make_arguments(device, 0)
    latent_store(**arguments)
    assert not arguments["key_cache"].any()


@pytest.mark.parametrize(
    ("argument", "changes"),
    [
        ("compressed", {"compressed": torch.zeros(5, 31)}),
        ("compressed", {"compressed": torch.zeros(5, 32).half()}),
        ("rotated", {"rotated": torch.zeros(5, 3, 6)}),
        ("query", {"query": torch.zeros(5, 4, 32)}),
        ("positions", {"positions": torch.zeros(4, dtype=torch.int64)}),
        ("slots", {"slots": torch.zeros(5, dtype=torch.int32)}),
        ("frequencies", {"frequencies": torch.zeros(16)}),
        ("norm", {"norm": RowNorm(torch.zeros(25), 1e-6)}),
        ("norm", {"norm": RowNorm(torch.zeros(24), 1e-6, is_centered=True)}),
        ("key_cache", {"key_cache": torch.zeros(4, 2, 16, 32)}),
        ("key_scales", {"key_cache": torch.zeros(4, 1, 16, 32, dtype=torch.int8), "key_scales": torch.zeros(4, 1, 8)}),
    ],
)
def test_a_wrong_argument_is_named(argument: str, changes: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=f"^{argument}: "):
        latent_store(**make_arguments("cpu") | changes)
