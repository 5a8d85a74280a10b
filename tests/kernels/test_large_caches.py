"""Caches of more than 2^31 elements, of which next to nothing is written: the system has no memory for the rest."""

import mmap

import numpy as np
import pytest
import torch
from torch import Tensor

from quire_kernels.decode_plan import DecodePlan, decode_splits
from quire_kernels.paged_attention import paged_attention, paged_attention_reference
from quire_kernels.paged_decode import paged_decode
from quire_kernels.store_kv import store_kv

BLOCK_SIZE, HEAD_DIM = 8, 16
STRIDE = 2**30 + 64  # of a block, in elements
NO_RESERVE = 0x4000  # of Linux: memory counts when it is written


def _caches() -> tuple[Tensor, Tensor]:
    """Keys and values of blocks 0 to 4: an offset of 32 bits into the last one would lead to the first one."""
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | NO_RESERVE
    memory = torch.frombuffer(mmap.mmap(-1, 2 * 5 * STRIDE, flags=flags), dtype=torch.float16)
    shape, strides = (5, 1, BLOCK_SIZE, HEAD_DIM), (STRIDE, BLOCK_SIZE * HEAD_DIM, HEAD_DIM, 1)
    keys, values = (memory.as_strided(shape, strides, kind * BLOCK_SIZE * HEAD_DIM) for kind in range(2))
    return keys, values


@pytest.mark.skipif(torch.cuda.is_available(), reason="the memory is the system's")
def test_offsets_of_blocks_have_64_bits() -> None:
    generator = torch.Generator().manual_seed(1)
    keys, values = _caches()
    key, value, query = torch.randn(3, BLOCK_SIZE, 1, HEAD_DIM, generator=generator).half()
    store_kv(key, value, keys, values, 4 * BLOCK_SIZE + torch.arange(BLOCK_SIZE))
    assert torch.equal(keys[4, 0], key[:, 0])
    assert torch.equal(values[4, 0], value[:, 0])
    tables, contexts = torch.tensor([[4]], dtype=torch.int32), torch.tensor([BLOCK_SIZE], dtype=torch.int32)
    starts = torch.tensor([0, 1], dtype=torch.int32)
    layout = query[:1], keys, values, tables
    expected = paged_attention_reference(*layout, starts, contexts, 2, 0.25)
    found = paged_attention(*layout, starts, contexts, 2, 0.25)
    torch.testing.assert_close(found, expected, atol=2e-3, rtol=2e-3)
    splits = decode_splits(1, 1, HEAD_DIM, torch.float16, torch.float16, keys.device)
    plan = DecodePlan.make(splits, contexts.numpy().astype(np.int32), keys.device)
    torch.testing.assert_close(paged_decode(*layout, contexts, plan, 0.25), expected, atol=2e-3, rtol=2e-3)
