"""The ops of a GPU at sizes for Triton's interpreter."""

from functools import partial

import torch

from benchmarks.kernels import attention, blocks, elementwise, invariant, quantized
from benchmarks.kernels.case import KernelCase
from benchmarks.kernels.pages import Heads
from worker_svc.step import Direction

HEADS = Heads(2, 2, 64)
SMALL: dict[str, partial[KernelCase]] = {
    "decode": partial(attention.decode, heads=HEADS, num_seqs=2, context_len=33),
    "decode int8": partial(attention.decode_8bit, heads=HEADS, num_seqs=2, context_len=33, dtype=torch.int8),
    "ragged decode": partial(attention.decode_ragged, heads=HEADS, contexts=[3, 40, 17], name="ragged"),
    "prefill": partial(attention.prefill, heads=HEADS, num_seqs=1, num_queries=5, context_len=20),
    "rotary": partial(elementwise.rotary, heads=HEADS, num_tokens=3),
    "store": partial(elementwise.store, heads=HEADS, num_tokens=3),
    "norm": partial(elementwise.norm, num_tokens=3, width=64),
    "layer norm": partial(elementwise.layer_norm, num_tokens=3, width=64),
    "norm of the update": partial(elementwise.norm_of_update, num_tokens=3, width=64),
    "gelu": partial(elementwise.gelu, num_tokens=3, width=64),
    "cap": partial(elementwise.cap, num_rows=2, vocab_size=300),
    "activation": partial(elementwise.activation, num_tokens=3, width=64),
    "greedy": partial(elementwise.draw, num_rows=2, vocab_size=300, temperature=0.0),
    "draw": partial(elementwise.draw, num_rows=2, vocab_size=300, temperature=1.0),
    "embed": partial(elementwise.embed, num_tokens=3, vocab_size=30, width=64),
    "adjust": partial(elementwise.adjust, num_rows=2, vocab_size=300, tokens_seen=20),
    "rotary int8": partial(elementwise.rotary_8bit, heads=HEADS, num_tokens=3, dtype=torch.int8),
    "store int8": partial(elementwise.store_8bit, heads=HEADS, num_tokens=3, dtype=torch.int8),
    "invariant product": partial(invariant.product, num_rows=3, inputs=64, outputs=32),
    **{
        f"product in {name}": partial(quantized.product, num_rows=3, inputs=128, outputs=32, quantization=name)
        for name in ("int8", "w8a8", "w4a16", "fp8")
    },
    "invariant decode": partial(invariant.decode, heads=HEADS, num_seqs=2, context_len=33),
    "norms": partial(invariant.norms, num_rows=2, vocab_size=300),
    "copy": partial(blocks.copy_blocks, num_pairs=3, block_bytes=64),
    "swap out": partial(blocks.swap_blocks, direction=Direction.OUT, num_pairs=3, block_bytes=64),
    "swap in": partial(blocks.swap_blocks, direction=Direction.IN, num_pairs=3, block_bytes=64),
}
CASES = tuple(SMALL.values())
