"""Every backend stores and attends in each layer as configured."""

import itertools

import numpy as np
import pytest
import torch
from torch import Tensor

from quire_kernels.paged_attention import paged_attention_reference
from worker_svc.attention import AttentionKind, make_attention
from worker_svc.batch import Batch, SequenceChunk, make_batch
from worker_svc.cache import CacheShape, KVCache
from worker_svc.model_layout import KVShape, LayerAttention, ModelLayout

LAYERS = [
    LayerAttention(0.25),
    LayerAttention(0.25, window=5),
    LayerAttention(0.1, window=17, soft_cap=0.5),
    LayerAttention(1.0, soft_cap=2.0),
    LayerAttention(0.25, window=1000),
    LayerAttention(0.25, window=17, has_sinks=True),
]
NUM_HEADS, NUM_KV_HEADS, BLOCK_SIZE, HEAD_DIM = 4, 2, 8, 16


def _layout(num_layers: int = len(LAYERS)) -> ModelLayout:
    kv = (KVShape(NUM_KV_HEADS, HEAD_DIM),) * num_layers
    return ModelLayout(97, 128, kv, tuple(LAYERS[:num_layers]), tuple(range(num_layers)))


def _step(cache: Tensor) -> Batch:
    """A decode after 29 tokens, a chunk of a prompt and a whole prompt, over scattered blocks."""
    blocks = np.random.default_rng(0).permutation(cache.shape[0]).astype(np.int32)
    chunks = [
        SequenceChunk(np.zeros(length, np.int32), start, blocks[place * 5 : place * 5 + 5], start, samples=True)
        for place, (start, length) in enumerate([(29, 1), (13, 20), (0, 11)])
    ]
    return make_batch(chunks, BLOCK_SIZE)


def test_each_layer_attends_in_its_own_way() -> None:
    torch.manual_seed(0)
    cache = torch.randn(15, len(LAYERS), 2, NUM_KV_HEADS, BLOCK_SIZE, HEAD_DIM)
    batch = _step(cache)
    attention = make_attention(AttentionKind.TORCH, KVCache.over(cache), _layout(), torch.float32).plan(batch)
    outputs = []
    for layer, how in enumerate(LAYERS):
        query, key, value = (
            torch.randn(len(batch.positions), count, HEAD_DIM) for count in (NUM_HEADS, NUM_KV_HEADS, NUM_KV_HEADS)
        )
        sinks = torch.arange(NUM_HEADS) / 2 if how.has_sinks else None
        output = attention(layer, query, key, value, sinks)
        expected = paged_attention_reference(
            query,
            cache[:, layer, 0],
            cache[:, layer, 1],
            torch.from_numpy(batch.block_tables),
            torch.from_numpy(batch.query_starts),
            torch.from_numpy(batch.context_lens),
            batch.max_query_len,
            how.scale,
            window=how.window,
            soft_cap=how.soft_cap,
            sinks=sinks,
        )
        torch.testing.assert_close(output, expected, rtol=1e-4, atol=1e-5)
        outputs.append(output)
        stored = cache[:, layer].permute(1, 0, 3, 2, 4).flatten(1, 2)[:, batch.slots]
        assert torch.equal(stored, torch.stack([key, value]))
    for one, other in itertools.combinations(outputs, 2):
        assert not torch.allclose(one, other, atol=1e-2)


def test_layers_must_be_those_of_the_cache() -> None:
    cache = torch.zeros(2, 3, 2, NUM_KV_HEADS, BLOCK_SIZE, HEAD_DIM)
    with pytest.raises(ValueError, match=r"^cache: .* 2 layers, not 3"):
        make_attention(AttentionKind.TORCH, KVCache.over(cache), _layout(2), torch.float32)


def test_torchs_attention_reads_no_cache_in_8_bits() -> None:
    cache = CacheShape.of_equal_layers(2, NUM_KV_HEADS, BLOCK_SIZE, HEAD_DIM, torch.int8).allocate(
        3, torch.device("cpu")
    )
    with pytest.raises(ValueError, match=r"^cache: .* 8 bits .* torch"):
        make_attention(AttentionKind.TORCH, cache, _layout(2), torch.float32)
