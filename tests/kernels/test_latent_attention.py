"""Attention over latent vectors against plain torch. Cache slots that no query may read hold invalid values."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from large import large_but
from ordered_dots import order_dots
from pairwise import pairwise
from quire_kernels._attend_latent import unsupported_rank
from quire_kernels.decode_plan import DecodePlan
from quire_kernels.latent_attention import latent_attention, latent_attention_reference, latent_queries_per_tile
from quire_kernels.latent_decode import latent_decode, latent_decode_reference, latent_splits
from quire_kernels.prefill_tiles import PrefillTiles

MakeBatch = Callable[..., Any]
AssertClose = Callable[[Tensor, Tensor], None]

EDGES = [1, 15, 16, 17, 31, 33, 63, 64, 65, 111, 257]

# The interpreter computes bfloat16 wrongly.
CASES = pairwise(
    {
        "num_heads": [1, 3, 16, 20, 72],
        "rank": [24, 64, 128],
        "rotated": [8, 16],
        "block_size": [8, 16, 64],
        "edge": [8, 16, 32, 64],
        "dtype": [torch.float32, torch.float16],
        "cache_dtype": [None, torch.int8, torch.float8_e4m3fn],
    }
)


def arguments_of(
    make_batch: MakeBatch, sequences: list[tuple[int, int]], num_heads: int, rank: int, rotated: int = 8, **options: Any
) -> dict[str, Any]:
    """Arguments of `latent_attention`."""
    batch = make_batch(sequences, (1, num_heads), rank + rotated, **options)
    return {
        "query": batch.query,
        "key_cache": batch.key_cache,
        "block_tables": batch.block_tables,
        "query_starts": batch.query_starts,
        "context_lens": batch.context_lens,
        "rank": rank,
        "scale": batch.scale,
        "key_scales": batch.key_scales,
    }


def tiles_of(arguments: dict[str, Any], queries: int | None = None) -> PrefillTiles:
    """The tiles of a batch, as a worker plans them; `queries` of each, or as many as the kernel wants."""
    query, cache, rank = arguments["query"], arguments["key_cache"], arguments["rank"]
    num_tokens, num_heads, width = query.shape
    how = num_heads, rank, width - rank, query.dtype, cache.dtype, query.device
    sequences = arguments["query_starts"].cpu().numpy(), arguments["context_lens"].cpu().numpy()
    return PrefillTiles.make(*sequences, num_tokens, queries or latent_queries_per_tile(*how), query.device)


def decode_arguments_of(arguments: dict[str, Any], **changes: Any) -> dict[str, Any]:
    """The same for `latent_decode`; each sequence has one query. `changes` are fields of the plan's splits."""
    query, cache, rank = arguments["query"], arguments["key_cache"], arguments["rank"]
    (_, num_heads, width), device = query.shape, query.device
    splits = latent_splits(num_heads, rank, width - rank, query.dtype, cache.dtype, device)
    plan = DecodePlan.make(replace(splits, **changes), arguments["context_lens"].cpu().numpy(), device)
    rest = {name: value for name, value in arguments.items() if name != "query_starts"}
    return rest | {"plan": plan}


@pytest.mark.parametrize("case", CASES, ids=lambda case: "-".join(map(str, case.values())))
def test_prefill_and_decode(make_batch: MakeBatch, assert_close: AssertClose, case: dict[str, Any]) -> None:
    options = dict(case)
    edge = options.pop("edge")
    arguments = arguments_of(make_batch, [(1, edge - 1), (7, edge), (1, edge + 1), (edge // 2, edge)], **options)
    assert_close(latent_attention(**arguments), latent_attention_reference(**arguments))
    arguments = decode_arguments_of(arguments_of(make_batch, [(1, edge - 1), (1, edge), (1, edge + 1)], **options))
    assert_close(latent_decode(**arguments), latent_decode_reference(**arguments))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
@pytest.mark.parametrize("whole", [False, True], ids=["chunks of one", "whole prompts"])
def test_every_edge(make_batch: MakeBatch, assert_close: AssertClose, whole: bool, dtype: torch.dtype) -> None:
    sequences = [(context if whole else 1, context) for context in EDGES]
    arguments = arguments_of(make_batch, sequences, 5, 24, dtype=dtype)
    expected = latent_attention_reference(**arguments)
    assert_close(latent_attention(**arguments), expected)
    if not whole:
        assert_close(latent_decode(**decode_arguments_of(arguments)), expected)


def test_128_heads(make_batch: MakeBatch, assert_close: AssertClose) -> None:
    arguments = arguments_of(make_batch, [(3, 20), (1, 9)], 128, 24, dtype=torch.float16)
    assert_close(latent_attention(**arguments), latent_attention_reference(**arguments))
    arguments = decode_arguments_of(arguments_of(make_batch, [(1, 20), (1, 9)], 128, 24, dtype=torch.float16))
    assert_close(latent_decode(**arguments), latent_decode_reference(**arguments))


def test_the_sizes_of_deepseek(make_batch: MakeBatch, assert_close: AssertClose) -> None:
    arguments = arguments_of(make_batch, [(5, 70), (1, 33)], 16, 512, 64, dtype=torch.float16)
    assert_close(latent_attention(**arguments), latent_attention_reference(**arguments))
    arguments = decode_arguments_of(arguments_of(make_batch, [(1, 700), (1, 33)], 16, 512, 64, dtype=torch.float16))
    assert_close(latent_decode(**arguments), latent_decode_reference(**arguments))


@pytest.mark.parametrize("num_shares", [1, 2, 7])
def test_a_context_may_be_divided_among_programs(
    make_batch: MakeBatch, assert_close: AssertClose, num_shares: int
) -> None:
    arguments = arguments_of(make_batch, [(1, 2049), (1, 1), (1, 700)], 4, 24, dtype=torch.float16)
    arguments = decode_arguments_of(arguments, num_shares=num_shares)
    assert bool((arguments["plan"].merges[:, 2] > 1).any()) == (num_shares > 1)
    assert_close(latent_decode(**arguments), latent_decode_reference(**arguments))


@pytest.mark.parametrize("num_heads", [3, 40])
def test_a_list_of_tiles_changes_no_bit(make_batch: MakeBatch, num_heads: int) -> None:
    arguments = arguments_of(make_batch, [(1, 20), (40, 53), (3, 30), (12, 12)], num_heads, 24)
    assert torch.equal(latent_attention(**arguments, tiles=tiles_of(arguments)), latent_attention(**arguments))


def test_a_list_of_other_tiles_is_refused(make_batch: MakeBatch) -> None:
    arguments = arguments_of(make_batch, [(3, 20)], 4, 24)
    with pytest.raises(ValueError, match=r"^tiles: must be made for tiles of"):
        latent_attention(**arguments, tiles=tiles_of(arguments, 3))


def test_a_context_of_none_gives_zeros(make_batch: MakeBatch) -> None:
    arguments = arguments_of(make_batch, [(1, 20), (1, 9)], 4, 24)
    arguments["context_lens"][1] = 0
    output = latent_decode(**decode_arguments_of(arguments))
    assert not output[1].any()
    assert bool(output[0].any())


def test_large_scores_do_not_overflow(make_batch: MakeBatch, assert_close: AssertClose) -> None:
    arguments = arguments_of(make_batch, [(1, 40), (9, 70)], 2, 24) | {"scale": 200.0}
    assert_close(latent_attention(**arguments), latent_attention_reference(**arguments))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
@pytest.mark.parametrize("cache_dtype", [None, torch.int8], ids=str)
@pytest.mark.parametrize("num_heads", large_but([3, 40], 3))
def test_neither_the_batch_nor_the_chunk_changes_a_token(
    make_batch: MakeBatch,
    num_heads: int,
    cache_dtype: torch.dtype | None,
    dtype: torch.dtype,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    order_dots(monkeypatch)
    options: dict[str, Any] = {"cache_dtype": cache_dtype, "dtype": dtype}
    together = arguments_of(make_batch, [(1, 20), (40, 53), (3, 30)], num_heads, 24, **options)
    outputs = latent_attention(**together)
    for first, last in ((1, 41), (8, 41), (40, 41), (1, 20)):
        alone = together | {
            "query": together["query"][first:last],
            "block_tables": together["block_tables"][1:2],
            "query_starts": torch.tensor([0, last - first], dtype=torch.int32, device=outputs.device),
            "context_lens": together["context_lens"][1:2] - (41 - last),
        }
        assert torch.equal(latent_attention(**alone), outputs[first:last]), (first, last)


def test_part_of_a_batch_in_place(make_batch: MakeBatch) -> None:
    """The first sequences of a batch can be left to another kernel, which writes to the same output."""
    arguments = arguments_of(make_batch, [(1, 100), (1, 33), (5, 64), (20, 20)], 4, 24)
    whole = latent_attention(**arguments)
    out = torch.full_like(whole, 7.0)
    part = arguments | {name: arguments[name][2:] for name in ("block_tables", "query_starts", "context_lens")}
    assert latent_attention(**part, out=out) is out
    assert torch.equal(out[2:], whole[2:])
    assert bool((out[:2] == 7.0).all())


def test_no_tokens(make_batch: MakeBatch) -> None:
    assert latent_attention(**arguments_of(make_batch, [(0, 7)], 4, 24)).shape == (0, 4, 24)


def test_latent_vectors_of_more_than_512_dimensions_are_refused(make_batch: MakeBatch) -> None:
    assert unsupported_rank(512) is None
    assert unsupported_rank(513) == "attention over latent vectors of 513 dimensions: the most is 512"
    with pytest.raises(ValueError, match=r"^rank: must be at most 512"):
        latent_attention(**arguments_of(make_batch, [(1, 5)], 1, 513))


@pytest.mark.parametrize(
    ("argument", "change"),
    [
        ("query", lambda query: query[0]),
        ("query", lambda query: query[..., :20]),
        ("query", lambda query: query.half()),
        ("key_cache", lambda cache: cache[0]),
        ("key_cache", lambda cache: cache.expand(-1, 2, -1, -1)),
        ("key_cache", lambda cache: cache.double()),
        ("block_tables", lambda tables: tables.long()),
        ("query_starts", lambda starts: starts[1:]),
        ("context_lens", lambda lens: lens[1:]),
        ("rank", lambda _: 0),
        ("rank", lambda rank: rank + 8),
        ("scale", lambda _: 0.0),
        ("out", lambda _: torch.empty(4, 4, 32)),
    ],
)
def test_a_wrong_argument_is_named(make_batch: MakeBatch, argument: str, change: Callable[[Any], Any]) -> None:
    arguments = arguments_of(make_batch, [(1, 20), (3, 9)], 4, 24)
    arguments[argument] = change(arguments.get(argument))
    with pytest.raises(ValueError, match=f"^{argument}: "):
        latent_attention(**arguments)


def test_a_plan_for_other_tiles_is_refused(make_batch: MakeBatch) -> None:
    arguments = decode_arguments_of(arguments_of(make_batch, [(1, 20)], 4, 24), tile_keys=128)
    with pytest.raises(ValueError, match=r"^plan: must be made for tiles of"):
        latent_decode(**arguments)
