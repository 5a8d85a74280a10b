"""The CPU's attention and store against the references. Cache slots that no query may read hold invalid values."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from quire_kernels.cpu_attention import cpu_paged_attention, plan_cpu_attention
from quire_kernels.paged_attention import paged_attention_reference

EDGES = [1, 15, 16, 17, 31, 33, 63, 64, 65, 111, 257]
BATCHES = {
    "one decode": [(1, 40)],
    "decode, few keys": [(1, context) for context in EDGES],
    "decode, many keys": [(1, context) for context in [*EDGES, 700, 1, 2048, 128, 5]],
    "decode, several slabs": [(1, 9000), (1, 3), (1, 8000)],
    "whole prompts": [(context, context) for context in EDGES],
    "many short prompts": [(5 + i % 7, 5 + i % 7) for i in range(40)],
    "one long prompt": [(300, 300)],
    "a chunk of it": [(300, 555)],
    "everything": [(1, 600), (17, 17), (1, 1), (300, 701), (2, 50), (0, 9), (1, 800), (1, 1024), (130, 130), (1, 3000)],
    "nothing": [(0, 5)],
}


@pytest.fixture
def device() -> str:
    return "cpu"


def attend(batch: Any) -> torch.Tensor:
    plan = plan_cpu_attention(
        batch.block_tables,
        batch.query_starts,
        batch.context_lens,
        block_size=batch.key_cache.shape[2],
        window=batch.window,
    )
    return cpu_paged_attention(
        batch.query, batch.key_cache, batch.value_cache, plan, batch.scale, soft_cap=batch.soft_cap, sinks=batch.sinks
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("sequences", BATCHES.values(), ids=BATCHES)
def test_batches(
    make_batch: Callable[..., Any],
    assert_close: Callable[..., None],
    sequences: list[tuple[int, int]],
    dtype: torch.dtype,
) -> None:
    batch = make_batch(sequences, (3, 3), dtype=dtype)
    output = attend(batch)
    assert output.is_contiguous()
    assert_close(output, paged_attention_reference(**batch.arguments()))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(
    ("heads", "head_dim"), [((1, 1), 64), ((1, 8), 80), ((8, 4), 128), ((32, 1), 96), ((2, 5), 256)]
)
@pytest.mark.parametrize("block_size", [8, 24, 128])
def test_shapes(
    make_batch: Callable[..., Any],
    assert_close: Callable[..., None],
    heads: tuple[int, int],
    head_dim: int,
    block_size: int,
    dtype: torch.dtype,
) -> None:
    sequences = [(1, 7), (1, 64), (33, 70), (1, 600), (1, 129), (1, 1), (1, 1000)]
    batch = make_batch(sequences, heads, head_dim, block_size, dtype)
    assert_close(attend(batch), paged_attention_reference(**batch.arguments()))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("block_size", [16, 24])
@pytest.mark.parametrize("window", [1, 5, 16, 17, 64, 130, 1000, 10**6])
def test_windows(
    make_batch: Callable[..., Any],
    assert_close: Callable[..., None],
    window: int,
    block_size: int,
    dtype: torch.dtype,
) -> None:
    for sequences in (BATCHES["everything"], BATCHES["decode, few keys"], BATCHES["one long prompt"]):
        batch = make_batch(sequences, (2, 3), block_size=block_size, dtype=dtype, window=window)
        assert_close(attend(batch), paged_attention_reference(**batch.arguments()))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("window", [None, 33])
@pytest.mark.parametrize("sequences", BATCHES.values(), ids=BATCHES)
def test_soft_caps(
    make_batch: Callable[..., Any],
    assert_close: Callable[..., None],
    sequences: list[tuple[int, int]],
    window: int | None,
    dtype: torch.dtype,
) -> None:
    batch = make_batch(sequences, (2, 2), dtype=dtype, window=window, soft_cap=0.7)
    capped = attend(batch)
    assert_close(capped, paged_attention_reference(**batch.arguments()))
    assert not capped.numel() or (capped - attend(replace(batch, soft_cap=None))).abs().max() > 0.01


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("options", [{}, {"window": 33}, {"soft_cap": 0.7}], ids=str)
@pytest.mark.parametrize("sequences", BATCHES.values(), ids=BATCHES)
def test_sinks(
    make_batch: Callable[..., Any],
    assert_close: Callable[..., None],
    sequences: list[tuple[int, int]],
    options: dict[str, Any],
    dtype: torch.dtype,
) -> None:
    batch = make_batch(sequences, (2, 2), dtype=dtype, sinks=True, **options)
    output = attend(batch)
    assert_close(output, paged_attention_reference(**batch.arguments()))
    assert not output.numel() or (output - attend(replace(batch, sinks=None))).abs().max() > 0.01


def test_tokens_of_other_sequences_have_no_influence(make_batch: Callable[..., Any]) -> None:
    """A sequence alone and in a batch: equal up to rounding, which depends on the layout of the product."""
    batch = make_batch([(1, 700), *[(1, context) for context in EDGES], (1, 3000)], (3, 3))
    plan = plan_cpu_attention(batch.block_tables[:1], batch.query_starts[:2], batch.context_lens[:1], 16)
    alone = cpu_paged_attention(batch.query[:1], batch.key_cache, batch.value_cache, plan, batch.scale)
    torch.testing.assert_close(attend(batch)[:1], alone, rtol=1e-5, atol=1e-6)


def test_a_plan_takes_arrays_and_lists(make_batch: Callable[..., Any]) -> None:
    batch = make_batch([(1, 40), (20, 33)])
    plan = plan_cpu_attention(
        batch.block_tables.numpy(), batch.query_starts.tolist(), batch.context_lens.numpy(), block_size=16
    )
    output = cpu_paged_attention(batch.query, batch.key_cache, batch.value_cache, plan, batch.scale)
    assert torch.equal(output, attend(batch))


def test_a_plan_serves_every_layer_and_dtype(make_batch: Callable[..., Any], assert_close: Callable[..., None]) -> None:
    plan = None
    for dtype in (torch.float32, torch.bfloat16):
        for heads in ((3, 3), (2, 4)):
            batch = make_batch([(1, 40), (20, 33)], heads, dtype=dtype)
            plan = plan or plan_cpu_attention(batch.block_tables, batch.query_starts, batch.context_lens, 16)
            output = cpu_paged_attention(batch.query, batch.key_cache, batch.value_cache, plan, batch.scale)
            assert_close(output, paged_attention_reference(**batch.arguments()))


def test_inside_and_outside_of_inference_mode(make_batch: Callable[..., Any]) -> None:
    batch = make_batch([(1, 40), (20, 9000)])
    with torch.inference_mode():
        inside = attend(batch)
    assert torch.equal(attend(batch), inside)


@pytest.mark.parametrize(
    ("argument", "tables", "starts", "contexts"),
    [
        ("block_tables", [0, 1], [0, 1], [5]),
        ("query_starts", [[0, 1]], [0, 1, 2], [5]),
        ("query_starts", [[0, 1], [2, 3]], [0, 2, 1], [5, 5]),
        ("context_lens", [[0, 1]], [0, 1], [5, 5]),
        ("context_lens", [[0, 1]], [0, 6], [5]),
        ("context_lens", [[0, 1]], [0, 1], [33]),
    ],
)
def test_an_impossible_plan_is_refused(argument: str, tables: Any, starts: Any, contexts: Any) -> None:
    with pytest.raises(ValueError, match=f"^{argument}: "):
        plan_cpu_attention(tables, starts, contexts, block_size=16)


def test_a_window_of_nothing_is_refused() -> None:
    with pytest.raises(ValueError, match=r"^window: "):
        plan_cpu_attention([[0]], [0, 1], [5], block_size=16, window=0)


@pytest.mark.parametrize(
    ("argument", "change"),
    [
        ("query", lambda query: query[0]),
        ("query", lambda query: query[:, :3]),
        ("query", lambda query: query.half()),
        ("key_cache", lambda cache: cache.long()),
        ("key_cache", lambda cache: cache[:, ::2]),
        ("value_cache", lambda cache: cache.contiguous()),
        ("plan", lambda _: plan_cpu_attention([[0]], [0, 1], [5], block_size=16)),
        ("plan", lambda _: plan_cpu_attention([[0]], [0, 4], [5], block_size=8)),
        ("soft_cap", lambda _: 0.0),
        ("sinks", lambda _: torch.zeros(3)),
    ],
)
def test_a_wrong_argument_is_named(make_batch: Callable[..., Any], argument: str, change: Callable[[Any], Any]) -> None:
    batch = make_batch([(1, 20), (3, 9)])
    arguments = {
        "query": batch.query,
        "key_cache": batch.key_cache,
        "value_cache": batch.value_cache,
        "plan": plan_cpu_attention(batch.block_tables, batch.query_starts, batch.context_lens, block_size=16),
        "scale": batch.scale,
        "soft_cap": None,
        "sinks": None,
    }
    arguments[argument] = change(arguments[argument])
    if argument == "key_cache":
        arguments["value_cache"] = change(arguments["value_cache"])
    with pytest.raises(ValueError, match=f"^{argument}: "):
        cpu_paged_attention(**arguments)
