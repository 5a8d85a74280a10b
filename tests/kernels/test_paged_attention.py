"""The Triton kernel against plain torch, over a cache that is poisoned wherever no query may look."""

from collections.abc import Callable
from itertools import product
from typing import Any

import pytest
import torch

from quire_kernels.paged_attention import paged_attention, paged_attention_reference

ON_GPU = torch.cuda.is_available()

# (queries, context): decodes, whole prompts, chunks in the middle, around every border of pages and tiles
MIXED = [(1, 1), (1, 16), (17, 17), (1, 63), (5, 33), (1, 65), (31, 64), (66, 111)]
EDGES = [1, 15, 16, 17, 31, 33, 63, 64, 65, 111, 257]

# Pairwise where the interpreter runs them, and more on a GPU. The interpreter computes bfloat16 wrongly.
CASES = [
    ((1, 1), 64, 16, torch.float32),
    ((1, 1), 256, 8, torch.float16),
    ((1, 8), 80, 8, torch.float32),
    ((1, 8), 256, 128, torch.float16),
    ((1, 71), 64, 32, torch.float32),
    ((2, 5), 128, 128, torch.float32),
    ((3, 3), 64, 16, torch.float16),
    ((3, 3), 96, 128, torch.float32),
    ((3, 3), 128, 8, torch.float16),
    ((8, 4), 80, 16, torch.float16),
    ((8, 4), 128, 32, torch.float32),
    ((32, 1), 64, 128, torch.float16),
    ((32, 1), 96, 8, torch.float32),
    ((32, 1), 80, 32, torch.float16),
]
DTYPES = [torch.float32, torch.float16]
if ON_GPU:
    DTYPES.append(torch.bfloat16)
    HEADS = [(1, 1), (1, 8), (1, 71), (3, 3), (8, 4), (32, 1)]
    CASES = [
        *product(HEADS, [64, 80, 96, 128, 256], [16], DTYPES),
        *product([(3, 3), (8, 4)], [64, 80, 128, 256], [8, 32, 128], DTYPES),
    ]


@pytest.mark.parametrize(("heads", "head_dim", "block_size", "dtype"), CASES)
def test_prefill_and_decode_in_one_batch(
    make_batch: Callable[..., Any],
    assert_close: Callable[..., None],
    heads: tuple[int, int],
    head_dim: int,
    block_size: int,
    dtype: torch.dtype,
) -> None:
    sequences = MIXED if ON_GPU or heads[0] <= 3 else MIXED[2:6]
    arguments = make_batch(sequences, heads, head_dim, block_size, dtype).arguments()
    assert_close(paged_attention(**arguments), paged_attention_reference(**arguments))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("block_size", [8, 16, 128])
@pytest.mark.parametrize("whole", [False, True], ids=["decode", "whole prompts"])
def test_every_edge(
    make_batch: Callable[..., Any],
    assert_close: Callable[..., None],
    whole: bool,
    block_size: int,
    dtype: torch.dtype,
) -> None:
    sequences = [(context if whole else 1, context) for context in EDGES]
    arguments = make_batch(sequences, (1, 3), block_size=block_size, dtype=dtype).arguments()
    assert_close(paged_attention(**arguments), paged_attention_reference(**arguments))


def test_long_context(make_batch: Callable[..., Any], assert_close: Callable[..., None]) -> None:
    arguments = make_batch([(3, 4097), (1, 2048)], (1, 8)).arguments()
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


def test_no_tokens(make_batch: Callable[..., Any]) -> None:
    arguments = make_batch([(0, 7)]).arguments()
    assert paged_attention(**arguments).shape == (0, 4, 64)


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
    ],
)
def test_a_wrong_argument_is_named(make_batch: Callable[..., Any], argument: str, change: Callable[[Any], Any]) -> None:
    arguments = make_batch([(1, 20), (3, 9)]).arguments()
    arguments[argument] = change(arguments[argument])
    with pytest.raises(ValueError, match=f"^{argument}: "):
        paged_attention(**arguments)
