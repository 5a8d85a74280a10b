"""The Triton kernel against plain torch. Cache slots that no query may read hold invalid values."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

from pairwise import pairwise
from quire_kernels._attend import prefill_tile_keys
from quire_kernels.paged_attention import paged_attention, paged_attention_reference, unsupported_heads

EDGES = [1, 15, 16, 17, 31, 33, 63, 64, 65, 111, 257]

# The interpreter computes bfloat16 wrongly.
CASES = pairwise(
    {
        "heads": [(1, 1), (1, 8), (3, 3), (8, 4), (5, 1)],
        "head_dim": [64, 80, 96, 128, 256],
        "block_size": [8, 16, 32, 128],
        "edge": [8, 16, 32, 64, 128],
        "dtype": [torch.float32, torch.float16],
        "cache_dtype": [None, torch.int8, torch.float8_e4m3fn],
        "window": [None, 1, 23],
        "soft_cap": [None, 1.5],
        "sinks": [False, True],
    }
)


@pytest.mark.skipif(torch.cuda.is_available(), reason="tests/gpu runs the whole product")
@pytest.mark.parametrize("case", CASES, ids=lambda case: "-".join(map(str, case.values())))
def test_prefill_and_decode_in_one_batch(
    make_batch: Callable[..., Any], assert_close: Callable[..., None], case: dict[str, Any]
) -> None:
    edge = case["edge"]
    sequences = [(1, edge - 1), (7, edge), (1, edge + 1)]
    if case["heads"][0] <= 3:  # the interpreter takes as long for each KV head
        sequences += [(edge + 1, edge + 1), (edge // 2, edge)]
    arguments = make_batch(sequences, **{name: value for name, value in case.items() if name != "edge"}).arguments()
    assert_close(paged_attention(**arguments), paged_attention_reference(**arguments))


@pytest.mark.parametrize(("dtype", "block_size"), [(torch.float32, 128), (torch.float16, 8)], ids=str)
@pytest.mark.parametrize("whole", [False, True], ids=["decode", "whole prompts"])
def test_every_edge(
    make_batch: Callable[..., Any],
    assert_close: Callable[..., None],
    whole: bool,
    dtype: torch.dtype,
    block_size: int,
) -> None:
    sequences = [(context if whole else 1, context) for context in EDGES]
    arguments = make_batch(sequences, (1, 3), block_size=block_size, dtype=dtype).arguments()
    assert_close(paged_attention(**arguments), paged_attention_reference(**arguments))


@pytest.mark.parametrize("head_dim", [8, 15, 40])
def test_narrow_heads(make_batch: Callable[..., Any], assert_close: Callable[..., None], head_dim: int) -> None:
    arguments = make_batch([(1, 33), (9, 40)], (2, 2), head_dim).arguments()
    assert_close(paged_attention(**arguments), paged_attention_reference(**arguments))
    assert unsupported_heads(head_dim) is None


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
    sequences = [(1, 33), (9, 40), (17, 17)]
    arguments = make_batch(sequences, (1, 8), head_dim, dtype=dtype, cache_dtype=cache_dtype).arguments()
    assert_close(paged_attention(**arguments), paged_attention_reference(**arguments))


def test_heads_of_more_than_512_dimensions_are_refused(make_batch: Callable[..., Any]) -> None:
    assert unsupported_heads(256, 512) is None
    assert unsupported_heads(513, 256) == "attention of heads of 513 dimensions: the most is 512"
    arguments = make_batch([(1, 33)], (1, 1), 513).arguments()
    with pytest.raises(ValueError, match=r"^query: must have at most 512 dimensions a head"):
        paged_attention(**arguments)


@pytest.mark.parametrize("window", [None, 700])
def test_long_context(make_batch: Callable[..., Any], assert_close: Callable[..., None], window: int | None) -> None:
    arguments = make_batch([(3, 4097), (1, 2048)], (1, 8), dtype=torch.float16, window=window).arguments()
    assert_close(paged_attention(**arguments), paged_attention_reference(**arguments))


@pytest.mark.parametrize("window", [1, 31, 32, 33, 64, 300])
def test_every_edge_of_a_window(make_batch: Callable[..., Any], assert_close: Callable[..., None], window: int) -> None:
    arguments = make_batch([(1, 150), (40, 150), (33, 129), (1, 64), (5, 65)], (1, 2), window=window).arguments()
    assert_close(paged_attention(**arguments), paged_attention_reference(**arguments))


def test_a_window_a_cap_and_sinks_change_what_is_seen(make_batch: Callable[..., Any]) -> None:
    """Otherwise the tests above could pass without either."""
    arguments = make_batch([(9, 70)]).arguments()
    plain = paged_attention_reference(**arguments)
    for change in ({"window": 23}, {"soft_cap": 1.5}, {"sinks": torch.ones(4, device=plain.device)}):
        error = (paged_attention_reference(**arguments | change) - plain).norm() / plain.norm()
        assert error > 0.02


def test_a_group_of_any_size(make_batch: Callable[..., Any], assert_close: Callable[..., None]) -> None:
    arguments = make_batch([(1, 17), (6, 40)], (1, 71), dtype=torch.float16).arguments()
    assert_close(paged_attention(**arguments), paged_attention_reference(**arguments))


def test_large_scores_do_not_overflow(make_batch: Callable[..., Any], assert_close: Callable[..., None]) -> None:
    arguments = make_batch([(1, 40), (9, 70)], (1, 2)).arguments()
    arguments["scale"] = 200.0
    assert_close(paged_attention(**arguments), paged_attention_reference(**arguments))


def test_a_sequence_without_queries_is_skipped(
    make_batch: Callable[..., Any], assert_close: Callable[..., None]
) -> None:
    arguments = make_batch([(2, 20), (0, 31), (1, 5)]).arguments()
    assert_close(paged_attention(**arguments), paged_attention_reference(**arguments))


def test_part_of_a_batch_in_place(make_batch: Callable[..., Any]) -> None:
    """The first sequences of a batch can be left to another kernel, which writes to the same output."""
    batch = make_batch([(1, 100), (1, 33), (5, 64), (20, 20)])
    whole = paged_attention(**batch.arguments())
    out = torch.full_like(batch.query, 7.0)
    part = batch.arguments() | {
        "block_tables": batch.block_tables[2:],
        "query_starts": batch.query_starts[2:],
        "context_lens": batch.context_lens[2:],
        "out": out,
    }
    assert paged_attention(**part) is out
    assert torch.equal(out[2:], whole[2:])
    assert bool((out[:2] == 7.0).all())


def test_no_tokens(make_batch: Callable[..., Any]) -> None:
    arguments = make_batch([(0, 7)]).arguments()
    assert paged_attention(**arguments).shape == (0, 4, 64)


@pytest.mark.parametrize(
    ("head_dim", "dtype", "cache_dtype", "tile_n"),
    [
        (64, torch.bfloat16, torch.bfloat16, 128),
        (96, torch.float16, torch.float16, 128),
        (128, torch.bfloat16, torch.bfloat16, 128),
        (128, torch.bfloat16, torch.int8, 64),
        (64, torch.bfloat16, torch.int8, 64),
        (128, torch.float32, torch.float32, 16),
        (256, torch.bfloat16, torch.bfloat16, 32),
    ],
)
def test_tiles_of_keys_fit_an_h200(head_dim: int, dtype: torch.dtype, cache_dtype: torch.dtype, tile_n: int) -> None:
    assert prefill_tile_keys(128, head_dim, dtype, cache_dtype, torch.device("cpu")) == tile_n


@pytest.mark.parametrize("window", [None, 100])
def test_every_edge_of_tiles_of_128_keys(
    make_batch: Callable[..., Any], assert_close: Callable[..., None], window: int | None
) -> None:
    sequences = [(127, 127), (128, 128), (129, 129), (2, 255), (3, 257)]
    arguments = make_batch(sequences, (1, 2), 128, dtype=torch.float16, window=window).arguments()
    assert_close(paged_attention(**arguments), paged_attention_reference(**arguments))


def test_the_batch_does_not_change_a_sequence(make_batch: Callable[..., Any]) -> None:
    together = make_batch([(1, 100), (1, 33), (1, 64)])
    alone = together.arguments() | {
        "query": together.query[:1],
        "block_tables": together.block_tables[:1],
        "query_starts": together.query_starts[:2],
        "context_lens": together.context_lens[:1],
    }
    assert torch.equal(paged_attention(**together.arguments())[:1], paged_attention(**alone))


@pytest.mark.parametrize(
    ("argument", "change"),
    [
        ("query", lambda query: query[0]),
        ("query", lambda query: query[..., :32]),
        ("query", lambda query: query[:, :3]),
        ("query", lambda query: query.half()),
        ("query", lambda query: query.transpose(1, 2).contiguous().transpose(1, 2)),
        ("key_cache", lambda cache: cache[0]),
        ("key_cache", lambda cache: cache.double()),
        ("key_cache", lambda cache: cache[..., ::2]),
        ("value_cache", lambda cache: cache[:-1]),
        ("value_cache", lambda cache: cache.contiguous()),
        ("value_cache", lambda cache: cache.half()),
        ("block_tables", lambda tables: tables[0]),
        ("block_tables", lambda tables: tables.long()),
        ("block_tables", lambda tables: tables[:, ::2]),
        ("query_starts", lambda starts: starts[1:]),
        ("query_starts", lambda starts: starts.long()),
        ("context_lens", lambda lens: lens[1:]),
        ("context_lens", lambda lens: lens.float()),
        ("max_query_len", lambda _: 0),
        ("scale", lambda _: 0.0),
        ("window", lambda _: 0),
        ("soft_cap", lambda _: 0.0),
        ("sinks", lambda _: torch.zeros(3)),
        ("sinks", lambda _: torch.zeros(4, dtype=torch.float64)),
        ("out", lambda _: torch.empty(4, 4, 32)),
        ("out", lambda _: torch.empty(4, 4, 64, dtype=torch.float16)),
    ],
)
def test_a_wrong_argument_is_named(make_batch: Callable[..., Any], argument: str, change: Callable[[Any], Any]) -> None:
    arguments = make_batch([(1, 20), (3, 9)]).arguments()
    arguments[argument] = change(arguments.get(argument))
    with pytest.raises(ValueError, match=f"^{argument}: "):
        paged_attention(**arguments)


@pytest.mark.parametrize(
    ("argument", "change"),
    [
        ("key_cache", lambda arguments: {"key_scales": None, "value_scales": None}),
        ("key_cache", lambda arguments: {name: arguments[name].float() for name in ("key_cache", "value_cache")}),
        ("key_scales", lambda arguments: {"key_scales": arguments["key_scales"].double()}),
        ("key_scales", lambda arguments: {"key_scales": arguments["key_scales"][..., :8]}),
        ("value_scales", lambda arguments: {"value_scales": arguments["value_scales"].contiguous()}),
        ("value_scales", lambda arguments: {"value_scales": None}),
        ("query", lambda arguments: {"query": arguments["query"].double()}),
    ],
)
def test_a_wrong_argument_beside_a_quantized_cache_is_named(
    make_batch: Callable[..., Any], argument: str, change: Callable[[Any], Any]
) -> None:
    arguments = make_batch([(1, 20), (3, 9)], cache_dtype=torch.int8).arguments()
    with pytest.raises(ValueError, match=f"^{argument}: "):
        paged_attention(**arguments | change(arguments))


@pytest.mark.parametrize("window", [None, 7])
def test_tokens_without_context_get_zeros(
    make_batch: Callable[..., Any], assert_close: Callable[..., None], window: int | None, device: str
) -> None:
    """As those are that pad a graph; nothing of their pages is read."""
    batch = make_batch([(3, 20), (40, 41)], window=window)
    arguments = batch.arguments()
    expected = paged_attention_reference(**arguments)
    padding = arguments | {"context_lens": batch.context_lens * torch.tensor([1, 0], dtype=torch.int32, device=device)}
    padding["block_tables"] = batch.block_tables.clone()
    padding["block_tables"][1] = -7
    output = paged_attention(**padding)
    assert_close(output[:3], expected[:3])
    assert not output[3:].any()
