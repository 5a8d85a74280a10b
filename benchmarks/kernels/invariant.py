"""Cases of ops of deterministic mode, beside those that are used without it."""

import torch
from torch import Tensor
from torch.nn import functional

from benchmarks.kernels.case import KernelCase
from benchmarks.kernels.device import Bound
from benchmarks.kernels.pages import Heads, PagedBatch


def product(
    device: torch.device, num_rows: int, inputs: int, outputs: int, dtype: torch.dtype = torch.bfloat16
) -> KernelCase:
    """A product whose rows are independent of each other, beside torch's."""
    from quire_kernels.invariant_linear import invariant_linear

    values = torch.randn(num_rows, inputs, device=device, dtype=dtype)
    weight = torch.randn(outputs, inputs, device=device, dtype=dtype) / inputs**0.5

    def plain() -> Tensor:
        return functional.linear(values, weight)

    def ours() -> Tensor:
        return invariant_linear(values, weight)

    shape = f"{num_rows} × {inputs} → {outputs}"
    if num_rows < 256:  # reading the weight takes longer than multiplying with it
        return KernelCase("invariant_linear", shape, Bound.MEMORY, weight.nbytes, ours, {"torch": plain})
    return KernelCase("invariant_linear", shape, Bound.MATRIX, 2 * num_rows * inputs * outputs, ours, {"torch": plain})


def decode(device: torch.device, heads: Heads, num_seqs: int, context_len: int) -> KernelCase:
    """Decodes by tiles of queries, which is how a prompt's tokens are computed, beside the kernel for decodes."""
    from quire_kernels.paged_attention import paged_attention
    from quire_kernels.paged_decode import paged_decode

    batch = PagedBatch.make(heads, num_seqs, 1, context_len, device)
    plan, tiles = batch.decode_plan(), batch.tiles()
    pages = (batch.query, batch.key_cache, batch.value_cache, batch.block_tables)

    def ours() -> Tensor:
        return paged_attention(*pages, batch.query_starts, batch.context_lens, 1, batch.scale, tiles=tiles)

    def by_splits() -> Tensor:
        return paged_decode(*pages, batch.context_lens, plan, batch.scale)

    shape = f"{heads.num_kv_heads} × {heads.group} heads of {heads.head_dim}, {num_seqs} × 1 of {context_len} tokens"
    return KernelCase("paged_attention", shape, Bound.MEMORY, batch.kv_bytes, ours, {"paged_decode": by_splits})


def norms(device: torch.device, num_rows: int, vocab_size: int) -> KernelCase:
    """The norms of log-probabilities."""
    from quire_kernels.log_norms import log_norms

    logits = torch.randn(num_rows, vocab_size, device=device) * 4
    peers = {"torch": lambda: logits.logsumexp(-1)}
    return KernelCase(
        "log_norms", f"{num_rows} × {vocab_size}", Bound.MEMORY, logits.nbytes, lambda: log_norms(logits), peers
    )
