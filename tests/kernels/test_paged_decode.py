"""The kernels of decodes against plain torch. Cache slots that no query may read hold invalid values."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from pairwise import pairwise
from quire_kernels.paged_decode import paged_decode, paged_decode_reference

EDGES = [1, 15, 16, 17, 31, 33, 63, 64, 65, 111, 255, 256, 257, 511, 513]

# The interpreter computes bfloat16 wrongly.
CASES = pairwise(
    {
        "heads": [(1, 1), (1, 8), (3, 3), (8, 4), (5, 1)],
        "head_dim": [64, 80, 96, 128, 256],
        "block_size": [8, 16, 32, 128],
        "edge": [8, 16, 32, 64, 128],
        "dtype": [torch.float32, torch.float16],
        "cache_dtype": [None, torch.int8, torch.float8_e4m3fn],
        "window": [None, 1, 40],
        "soft_cap": [None, 1.5],
        "sinks": [False, True],
    }
)


@pytest.mark.skipif(torch.cuda.is_available(), reason="tests/gpu runs the whole product")
@pytest.mark.parametrize("case", CASES, ids=lambda case: "-".join(map(str, case.values())))
def test_shapes(make_batch: Callable[..., Any], assert_close: Callable[..., None], case: dict[str, Any]) -> None:
    # The interpreter takes as long for each KV head
    sequences = [(1, case["edge"] + step) for step in ((-1, 0, 1) if case["heads"][0] <= 3 else (0, 1))]
    batch = make_batch(sequences, **{name: value for name, value in case.items() if name != "edge"})
    arguments = batch.decode_arguments(keys_per_split=128 if case["edge"] == 128 else None)
    assert_close(paged_decode(**arguments), paged_decode_reference(**arguments))


@pytest.mark.parametrize(("block_size", "keys_per_split"), [(8, None), (128, None), (16, 128), (32, 384)])
def test_every_edge(
    make_batch: Callable[..., Any], assert_close: Callable[..., None], block_size: int, keys_per_split: int | None
) -> None:
    batch = make_batch([(1, context) for context in EDGES], (1, 3), block_size=block_size, dtype=torch.float16)
    arguments = batch.decode_arguments(keys_per_split=keys_per_split)
    assert_close(paged_decode(**arguments), paged_decode_reference(**arguments))


@pytest.mark.parametrize("head_dim", [8, 15, 40])
def test_narrow_heads(make_batch: Callable[..., Any], assert_close: Callable[..., None], head_dim: int) -> None:
    arguments = make_batch([(1, 33), (1, 300)], (2, 2), head_dim).decode_arguments(keys_per_split=128)
    assert_close(paged_decode(**arguments), paged_decode_reference(**arguments))


@pytest.mark.parametrize("cache_dtype", [None, torch.int8], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
@pytest.mark.parametrize("head_dim", [320, 512])
def test_wide_heads(
    make_batch: Callable[..., Any],
    assert_close: Callable[..., None],
    head_dim: int,
    dtype: torch.dtype,
    cache_dtype: torch.dtype | None,
) -> None:
    batch = make_batch([(1, 33), (1, 300)], (1, 8), head_dim, dtype=dtype, cache_dtype=cache_dtype)
    arguments = batch.decode_arguments(keys_per_split=128)
    assert_close(paged_decode(**arguments), paged_decode_reference(**arguments))


@pytest.mark.parametrize("window", [1, 63, 64, 65, 127, 128, 129, 300])
def test_every_edge_of_a_window(make_batch: Callable[..., Any], assert_close: Callable[..., None], window: int) -> None:
    batch = make_batch([(1, context) for context in (1, 64, 65, 200, 300)], (1, 2), window=window)
    arguments = batch.decode_arguments(keys_per_split=128)
    assert_close(paged_decode(**arguments), paged_decode_reference(**arguments))


@pytest.mark.parametrize("num_shares", [1, 4, 16])
@pytest.mark.parametrize(
    "options",
    [
        {"dtype": torch.float16},
        {"window": 700},
        {"cache_dtype": torch.int8, "soft_cap": 1.5},
        {"sinks": True},
        {"cache_dtype": torch.int8, "sinks": True},
    ],
    ids=["float16", "window", "int8", "sinks", "int8, sinks"],
)
def test_shares_of_ragged_contexts(
    make_batch: Callable[..., Any], assert_close: Callable[..., None], num_shares: int, options: dict[str, Any]
) -> None:
    """Shares end within sequences and between them, and some hold many sequences."""
    batch = make_batch([(1, context) for context in (40, 1900, 3, 900, 16, 64, 800)], (1, 3), **options)
    arguments = batch.decode_arguments(num_shares=num_shares)
    num_split = int((arguments["plan"].merges[:, 2] > 1).sum())
    assert (num_split > 0) == (num_shares > 1)
    assert_close(paged_decode(**arguments), paged_decode_reference(**arguments))


@pytest.mark.parametrize("scale", [0.125, 8.0], ids=["many keys matter", "one key matters"])
def test_long_contexts_in_many_splits(
    make_batch: Callable[..., Any], assert_close: Callable[..., None], scale: float
) -> None:
    """More parts than are merged at once; any of them may have the largest weights."""
    arguments = make_batch([(1, 4097), (1, 2049)], (1, 8)).decode_arguments(keys_per_split=128)
    arguments |= {"scale": scale}
    assert_close(paged_decode(**arguments), paged_decode_reference(**arguments))


@pytest.mark.parametrize("cache_dtype", [None, torch.int8], ids=str)
@pytest.mark.parametrize("sink", [-1e4, -200.0, 200.0, 1e4])
def test_sinks_of_any_size(
    make_batch: Callable[..., Any], assert_close: Callable[..., None], sink: float, cache_dtype: torch.dtype | None
) -> None:
    """One that is far below all scores changes nothing; of one that is far above them the output is zero."""
    batch = make_batch([(1, 40), (1, 700)], (1, 2), cache_dtype=cache_dtype)
    arguments = batch.decode_arguments(keys_per_split=128)
    output = paged_decode(**arguments | {"sinks": torch.full((2,), sink, device=batch.query.device)})
    if sink < 0:
        assert_close(output, paged_decode(**arguments))
    else:
        assert not output.any()


def test_large_scores_do_not_overflow(make_batch: Callable[..., Any], assert_close: Callable[..., None]) -> None:
    arguments = make_batch([(1, 40), (1, 700)], (1, 2)).decode_arguments() | {"scale": 200.0}
    assert_close(paged_decode(**arguments), paged_decode_reference(**arguments))


@pytest.mark.parametrize("cache_dtype", [torch.int8, torch.float8_e4m3fn])
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32], ids=str)
def test_scales_of_any_size(
    make_batch: Callable[..., Any], assert_close: Callable[..., None], dtype: torch.dtype, cache_dtype: torch.dtype
) -> None:
    """Values of some keys are 2 ** 24 times those of others, and some are zero; keys grow as values shrink."""
    batch = make_batch([(1, 300), (1, 65)], (2, 2), dtype=dtype, cache_dtype=cache_dtype)
    for block in range(len(batch.key_scales)):
        batch.value_scales[block] *= 2.0 ** (block % 5 * 6 - 12)
        batch.key_scales[block] *= 2.0 ** (-(block % 5))
    batch.value_scales[::7] = 0.0
    arguments = batch.decode_arguments(keys_per_split=128)
    assert_close(paged_decode(**arguments), paged_decode_reference(**arguments))


@pytest.mark.parametrize("exponent", [-30, 20], ids=["small", "large"])
def test_queries_beyond_float16_beside_codes(
    make_batch: Callable[..., Any], assert_close: Callable[..., None], exponent: int
) -> None:
    """In bfloat16 they may be larger than float16 holds, or smaller."""
    batch = make_batch([(1, 90), (1, 17)], (2, 2), dtype=torch.bfloat16, cache_dtype=torch.int8)
    arguments = batch.decode_arguments() | {"query": batch.query * 2.0**exponent, "scale": batch.scale * 2.0**-exponent}
    assert_close(paged_decode(**arguments), paged_decode_reference(**arguments))


@pytest.mark.parametrize("window", [None, 8])
def test_an_empty_context_gives_zeros(make_batch: Callable[..., Any], window: int | None) -> None:
    batch = make_batch([(1, 20), (1, 31)], window=window)
    batch.context_lens[1] = 0
    arguments = batch.decode_arguments()
    output = paged_decode(**arguments)
    assert bool((output[1] == 0.0).all())
    torch.testing.assert_close(output, paged_decode_reference(**arguments))


def test_a_plan_is_replaced_in_place(make_batch: Callable[..., Any], assert_close: Callable[..., None]) -> None:
    """As between replays of a captured graph: the same tensors hold another plan."""
    batch = make_batch([(1, 20), (1, 1100), (1, 300)])
    arguments = batch.decode_arguments(num_shares=4)
    live, plan = arguments["plan"], batch.decode_plan(torch.zeros(3, dtype=torch.int32), num_shares=4)
    for name in ("starts", "items", "merges"):
        getattr(plan, name).copy_(getattr(live, name))
    assert_close(paged_decode(**arguments | {"plan": plan}), paged_decode_reference(**arguments))


def test_with_fixed_splits_nothing_but_itself_decides_a_sequence(make_batch: Callable[..., Any]) -> None:
    batch = make_batch([(1, 300), (1, 520), (1, 64), (1, 3)], (1, 2))
    together = batch.decode_arguments(keys_per_split=128)
    whole = paged_decode(**together)
    for row, num_shares in ((0, 1), (0, 16), (2, 4), (3, 2)):
        alone = together | {
            "query": batch.query[row : row + 1],
            "block_tables": batch.block_tables[row : row + 1],
            "context_lens": batch.context_lens[row : row + 1],
            "plan": batch.decode_plan(batch.context_lens[row : row + 1], keys_per_split=128, num_shares=num_shares),
        }
        assert torch.equal(paged_decode(**alone)[0], whole[row])


def test_no_sequences(make_batch: Callable[..., Any]) -> None:
    batch = make_batch([(1, 7)])
    arguments = batch.decode_arguments() | {
        "query": batch.query[:0],
        "block_tables": batch.block_tables[:0],
        "context_lens": batch.context_lens[:0],
    }
    assert paged_decode(**arguments).shape == (0, 4, 64)


def test_writes_in_place(make_batch: Callable[..., Any]) -> None:
    """Between other rows, as in a batch that starts with decodes."""
    batch = make_batch([(1, 7), (1, 300)])
    rows = torch.full((5, 4, 64), 7.0, device=batch.query.device)
    out = rows[1:3]
    assert paged_decode(**batch.decode_arguments(), out=out) is out
    assert torch.equal(out, paged_decode(**batch.decode_arguments()))
    assert bool((rows[[0, 3, 4]] == 7.0).all())


@pytest.mark.parametrize(
    ("argument", "change"),
    [
        ("query", lambda query: query[0]),
        ("query", lambda query: query.half()),
        ("key_cache", lambda cache: cache.double()),
        ("value_cache", lambda cache: cache[:-1]),
        ("block_tables", lambda tables: tables[:1]),
        ("block_tables", lambda tables: tables.long()),
        ("context_lens", lambda lens: lens[1:]),
        ("plan", lambda plan: replace(plan, splits=replace(plan.splits, window=5))),
        ("plan", lambda plan: replace(plan, splits=replace(plan.splits, tile_keys=16))),
        ("plan.starts", lambda plan: replace(plan, starts=plan.starts[1:])),
        ("plan.items", lambda plan: replace(plan, items=plan.items[:, 1:])),
        ("plan.merges", lambda plan: replace(plan, merges=plan.merges.long())),
        ("window", lambda _: 0),
        ("soft_cap", lambda _: -1.0),
        ("sinks", lambda _: torch.zeros(3)),
        ("sinks", lambda _: torch.zeros(4, dtype=torch.float64)),
        ("out", lambda _: torch.empty(3, 4, 64)),
    ],
)
def test_a_wrong_argument_is_named(make_batch: Callable[..., Any], argument: str, change: Callable[[Any], Any]) -> None:
    arguments = make_batch([(1, 20), (1, 9)]).decode_arguments()
    field = argument.partition(".")[0]
    arguments[field] = change(arguments.get(field))
    if argument == "block_tables" and len(arguments[argument]) == 1:
        arguments["context_lens"] = arguments["context_lens"][:1]
    with pytest.raises(ValueError, match=f"^{argument}: "):
        paged_decode(**arguments)
