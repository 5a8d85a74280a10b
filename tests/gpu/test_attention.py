"""Attention on a GPU only: CUDA graphs, and bits that do not depend on batch and chunk."""

from typing import Any

import pytest
import torch

from paged_batches import assert_close, make_batch
from quire_kernels.paged_attention import paged_attention
from quire_kernels.paged_decode import paged_decode, paged_decode_reference

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


def cuda_batch(sequences: list[tuple[int, int]], **shape: Any) -> Any:
    return make_batch(sequences, (8, 4), 128, dtype=torch.bfloat16, device="cuda", **shape)


def test_a_captured_decode_follows_what_its_tensors_hold() -> None:
    contexts = [1, 300, 4097, 77, 2048, 16, 900, 33]
    small, large = cuda_batch([(1, 1)] * 8), cuda_batch([(1, context) for context in contexts])
    live = large.decode_arguments()
    # Captured with short contexts, in tensors that are overwritten later
    tables, lens = torch.zeros_like(large.block_tables), torch.ones_like(large.context_lens)
    tables[:, 0] = large.block_tables[:, 0]
    plan = small.decode_plan(small.context_lens)
    captured = live | {"block_tables": tables, "context_lens": lens, "query": small.query.clone(), "plan": plan}
    paged_decode(**captured)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        output = paged_decode(**captured)
    for name in ("block_tables", "context_lens", "query"):
        captured[name].copy_(live[name])
    for name in ("starts", "items", "merges"):
        getattr(plan, name).copy_(getattr(live["plan"], name))
    graph.replay()
    assert_close(output, paged_decode_reference(**live))


def test_with_fixed_splits_nothing_but_itself_decides_a_sequence() -> None:
    batch = cuda_batch([(1, context) for context in (700, 4097, 1, 2048, 33)])
    together = batch.decode_arguments(keys_per_split=512)
    whole = paged_decode(**together)
    for row in range(5):
        alone = together | {
            "query": batch.query[row : row + 1],
            "block_tables": batch.block_tables[row : row + 1],
            "context_lens": batch.context_lens[row : row + 1],
            "plan": batch.decode_plan(batch.context_lens[row : row + 1], keys_per_split=512, num_shares=3),
        }
        assert torch.equal(paged_decode(**alone)[0], whole[row])


def test_chunks_of_a_prompt_are_the_prompt_to_the_bit() -> None:
    """A decode is such a chunk too, with a bound of two queries a sequence."""
    batch = cuda_batch([(1000, 1000)])
    whole = paged_attention(**batch.arguments())
    for start, end in ((0, 3), (3, 400), (400, 999), (999, 1000)):
        chunk = batch.arguments() | {
            "query": batch.query[start:end],
            "query_starts": torch.tensor([0, end - start], dtype=torch.int32, device="cuda"),
            "context_lens": torch.tensor([end], dtype=torch.int32, device="cuda"),
            "max_query_len": max(2, end - start),
        }
        assert torch.equal(paged_attention(**chunk), whole[start:end])
