"""The cases of a GPU, each made when its turn comes, so that it has all memory."""

from functools import partial

import torch

from benchmarks.decode_balance.contexts import lognormal, one_long
from benchmarks.kernels import attention, blocks, elementwise, invariant, quantized
from benchmarks.kernels.case import KernelCase
from benchmarks.kernels.pages import GEMMA2_9B, LLAMA_8B
from worker_svc.step import Direction

LOGNORMAL, ONE_LONG = lognormal(64, 2048).tolist(), one_long(63, 1024, 32768).tolist()
CASES: tuple[partial[KernelCase], ...] = (
    partial(attention.decode, heads=LLAMA_8B, num_seqs=1, context_len=4096),
    partial(attention.decode, heads=LLAMA_8B, num_seqs=1, context_len=32768),
    partial(attention.decode, heads=LLAMA_8B, num_seqs=32, context_len=4096),
    partial(attention.decode, heads=LLAMA_8B, num_seqs=64, context_len=8192),
    partial(attention.decode, heads=LLAMA_8B, num_seqs=256, context_len=1024),
    partial(attention.decode_ragged, heads=LLAMA_8B, contexts=LOGNORMAL, name="64 lognormal, median 2048"),
    partial(attention.decode_ragged, heads=LLAMA_8B, contexts=ONE_LONG, name="63 × 1024, 1 × 32768"),
    partial(attention.decode, heads=GEMMA2_9B, num_seqs=32, context_len=4096),
    partial(attention.decode_8bit, heads=LLAMA_8B, num_seqs=32, context_len=4096, dtype=torch.float8_e4m3fn),
    partial(attention.decode_8bit, heads=LLAMA_8B, num_seqs=32, context_len=4096, dtype=torch.int8),
    partial(attention.prefill, heads=LLAMA_8B, num_seqs=1, num_queries=4096, context_len=4096),
    partial(attention.prefill, heads=LLAMA_8B, num_seqs=8, num_queries=1024, context_len=1024),
    partial(attention.prefill, heads=LLAMA_8B, num_seqs=1, num_queries=2048, context_len=8192),
    partial(attention.prefill, heads=GEMMA2_9B, num_seqs=8, num_queries=1024, context_len=1024),
    partial(elementwise.rotary, heads=LLAMA_8B, num_tokens=64),
    partial(elementwise.rotary, heads=LLAMA_8B, num_tokens=4096),
    partial(elementwise.store, heads=LLAMA_8B, num_tokens=4096),
    partial(elementwise.rotary_8bit, heads=LLAMA_8B, num_tokens=4096, dtype=torch.float8_e4m3fn),
    partial(elementwise.store_8bit, heads=LLAMA_8B, num_tokens=4096, dtype=torch.float8_e4m3fn),
    partial(elementwise.store_8bit, heads=LLAMA_8B, num_tokens=4096, dtype=torch.int8),
    partial(elementwise.embed, num_tokens=64, vocab_size=128256, width=4096),
    partial(elementwise.embed, num_tokens=4096, vocab_size=128256, width=4096),
    partial(elementwise.norm, num_tokens=64, width=4096),
    partial(elementwise.norm, num_tokens=4096, width=4096),
    partial(elementwise.layer_norm, num_tokens=4096, width=4096),
    partial(elementwise.norm_of_update, num_tokens=4096, width=4096),
    partial(elementwise.activation, num_tokens=64, width=14336),
    partial(elementwise.activation, num_tokens=4096, width=14336),
    partial(elementwise.gelu, num_tokens=4096, width=16384),
    partial(elementwise.cap, num_rows=64, vocab_size=256000),
    partial(elementwise.adjust, num_rows=64, vocab_size=128256, tokens_seen=1024),
    partial(elementwise.draw, num_rows=64, vocab_size=128256, temperature=0.0),
    partial(elementwise.draw, num_rows=64, vocab_size=128256, temperature=1.0),
    partial(invariant.product, num_rows=64, inputs=4096, outputs=28672),
    partial(invariant.product, num_rows=64, inputs=4096, outputs=4096),
    partial(invariant.product, num_rows=2048, inputs=4096, outputs=28672),
    *(
        partial(quantized.product, num_rows=num_rows, inputs=4096, outputs=28672, quantization=quantization)
        for quantization in ("int8", "w8a8", "fp8")
        for num_rows in (1, 64, 2048)
    ),
    *(
        partial(quantized.product, num_rows=num_rows, inputs=4096, outputs=28672, quantization="w4a16", group=group)
        for group in (32, 128)
        for num_rows in (1, 16, 32, 64, 128, 2048)
    ),
    *(
        partial(quantized.product, num_rows=num_rows, inputs=inputs, outputs=4096, quantization="w4a16")
        for inputs in (4096, 14336)
        for num_rows in (1, 64)
    ),
    partial(invariant.decode, heads=LLAMA_8B, num_seqs=1, context_len=4096),
    partial(invariant.decode, heads=LLAMA_8B, num_seqs=64, context_len=8192),
    partial(invariant.norms, num_rows=64, vocab_size=128256),
    partial(blocks.copy_blocks, num_pairs=256, block_bytes=2 << 20),
    partial(blocks.swap_blocks, direction=Direction.OUT, num_pairs=128, block_bytes=2 << 20),
    partial(blocks.swap_blocks, direction=Direction.IN, num_pairs=128, block_bytes=2 << 20),
)
