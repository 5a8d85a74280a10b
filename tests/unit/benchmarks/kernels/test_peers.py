"""Peers compute the same attention as the kernels, by their fastest paths."""

from typing import Any

import pytest
import torch
from torch.nn.attention.bias import CausalBias
from torch.nn.functional import scaled_dot_product_attention

from benchmarks.kernels import peers
from benchmarks.kernels.pages import Heads, PagedBatch

CPU = torch.device("cpu")


@pytest.mark.parametrize(("num_queries", "context_len"), [(1, 37), (5, 37), (37, 37)])
def test_torch_sees_what_the_kernels_see(num_queries: int, context_len: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """And a chunk's mask is one that the fast backends take: they take no tensor of booleans."""
    masks: list[Any] = []

    def recording(query: Any, key: Any, value: Any, mask: Any, **options: Any) -> Any:
        masks.append(mask)
        return scaled_dot_product_attention(query, key, value, mask, **options)

    monkeypatch.setattr(peers, "scaled_dot_product_attention", recording)
    torch.manual_seed(0)
    batch = PagedBatch.make(Heads(2, 2, 64), 2, num_queries, context_len, CPU, torch.float32)
    outputs = [peer() for name, peer in peers.attention_peers(batch, CPU).items() if name.startswith("SDPA")]
    assert all(mask is None or isinstance(mask, CausalBias) for mask in masks)

    visible = torch.arange(context_len) <= torch.arange(context_len - num_queries, context_len)[:, None]
    keys, values = batch.gather()
    expected = scaled_dot_product_attention(batch.plain_query(), keys, values, visible, enable_gqa=True)
    for output in outputs:
        torch.testing.assert_close(output, batch.flat(expected))
    assert len(outputs) == len(masks) == 2
