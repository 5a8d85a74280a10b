"""Cases of the compiled ops of the CPU backend."""

from functools import cache, partial

import torch
from torch.nn.functional import linear

from benchmarks.kernels.case import BY_AMX, KernelCase, Run, SpeedTarget
from benchmarks.kernels.device import Bound
from benchmarks.kernels.pages import BLOCK_SIZE, Heads, PagedBatch
from benchmarks.kernels.peers import attention_peers
from quire_kernels.cpu.amx import amx_linear, has_amx, pack_for_amx
from quire_kernels.cpu.attention import CacheLayer, attend
from quire_kernels.cpu.attention import store as store_tokens
from quire_kernels.cpu.library import load_library
from quire_kernels.cpu.linear import MatrixFormat, pack_matrix
from quire_kernels.cpu.linear import linear as compiled_linear
from quire_kernels.cpu.sample import argmax
from quire_kernels.cpu.thread_pool import ThreadPool
from svc_common.models import cache_root

# Up to this number of rows, a product is bound by reading the weight.
_FEW_ROWS = 8
# Products with this many rows have a target.
_MANY_ROWS = 256
_TARGETS_OF_MANY_ROWS = {
    MatrixFormat.PLAIN: SpeedTarget.WIDE_PRODUCT,
    MatrixFormat.W8A8: SpeedTarget.INTEGER_PRODUCT,
    MatrixFormat.W4A8: SpeedTarget.INTEGER_PRODUCT,
}
# As workers that use these ops run them.
_compiled_case = partial(KernelCase, leaves_torch_one_thread=True)
_FORMATS = {
    MatrixFormat.PLAIN: "bfloat16",
    MatrixFormat.INT8: "int8",
    MatrixFormat.W8A8: "W8A8",
    MatrixFormat.W4A16: "W4A16",
    MatrixFormat.W4A8: "W4A8",
}


def attention(
    device: torch.device, heads: Heads, num_seqs: int, num_queries: int, context_len: int, *, by_amx: bool = False
) -> KernelCase:
    """Attention over the compiled code's cache layout, by vectors or by AMX."""
    batch = PagedBatch.make(heads, num_seqs, num_queries, context_len, device)
    layer, slots = _layer(batch)
    keys, values = (tensor.transpose(1, 2).flatten(0, 1).contiguous() for tensor in batch.gather())
    store_tokens(_thread_pool(), keys, values, layer, slots)
    tensors = (batch.block_tables, batch.query_starts, batch.context_lens)
    run = partial(attend, _thread_pool(), batch.query, layer, *tensors, batch.scale, use_amx=by_amx)
    shape = f"{batch.heads.num_kv_heads} × {heads.group} heads of {heads.head_dim}, {num_seqs} × {num_queries} of "
    shape += f"{context_len} tokens{BY_AMX if by_amx else ''}"
    peers = attention_peers(batch, device)
    if num_queries == 1:
        return _compiled_case("compiled attend", shape, Bound.MEMORY, batch.kv_bytes, run, peers)
    return _compiled_case("compiled attend", shape, Bound.MATRIX, batch.operations, run, peers)


def store(device: torch.device, heads: Heads, num_tokens: int) -> KernelCase:
    """Stores keys and values in the compiled code's cache layout."""
    batch = PagedBatch.make(heads, 1, 1, num_tokens, device)
    layer, slots = _layer(batch)
    keys, values = (tensor.transpose(1, 2).flatten(0, 1).contiguous() for tensor in batch.gather())
    shape = f"{heads.num_kv_heads} heads of {heads.head_dim}, {num_tokens} tokens"
    run = partial(store_tokens, _thread_pool(), keys, values, layer, slots)
    return _compiled_case("compiled store", shape, Bound.MEMORY, 4 * keys.nbytes, run)


def computes_by_amx() -> bool:
    """Whether this processor has AMX."""
    return has_amx(_thread_pool())


def product(
    device: torch.device,
    num_rows: int,
    outputs: int,
    inputs: int,
    matrix_format: MatrixFormat,
    *,
    by_amx: bool = False,
) -> KernelCase:
    """A product of rows and a weight, by vectors or by AMX."""
    rows = torch.randn(num_rows, inputs, device=device, dtype=torch.bfloat16)
    weight = torch.randn(outputs, inputs, device=device, dtype=torch.bfloat16) * inputs**-0.5
    pack, multiply = (pack_for_amx, amx_linear) if by_amx else (pack_matrix, compiled_linear)
    matrix = pack(_thread_pool(), weight, matrix_format=matrix_format)
    peers: dict[str, Run] = {"torch, bfloat16": lambda: linear(rows, weight)}
    if matrix_format is not MatrixFormat.PLAIN:
        scales = weight.float().abs().amax(1) / 127
        codes = (weight.float() / scales[:, None]).round().to(torch.int8)
        peers["torch, int8"] = lambda: torch._weight_int8pack_mm(rows, codes, scales.to(torch.bfloat16))
    run = partial(multiply, _thread_pool(), rows, matrix)
    shape = f"{num_rows} × {inputs} to {outputs}, {_FORMATS[matrix_format]}{BY_AMX if by_amx else ''}"
    if num_rows <= _FEW_ROWS:
        amount = matrix.panels.nbytes
        return _compiled_case("compiled linear", shape, Bound.MEMORY, amount, run, peers)
    asked = SpeedTarget.NOTHING
    if num_rows == _MANY_ROWS:
        asked = _TARGETS_OF_MANY_ROWS.get(matrix_format, SpeedTarget.NOTHING)
    return _compiled_case("compiled linear", shape, Bound.MATRIX, 2 * num_rows * outputs * inputs, run, peers, asked)


def greedy(device: torch.device, num_rows: int, vocab_size: int) -> KernelCase:
    """The argmax of each row."""
    logits = torch.randn(num_rows, vocab_size, device=device)
    run = partial(argmax, _thread_pool(), logits)
    peers: dict[str, Run] = {"torch": lambda: logits.argmax(-1)}
    return _compiled_case("compiled argmax", f"{num_rows} × {vocab_size}", Bound.MEMORY, logits.nbytes, run, peers)


@cache
def _thread_pool() -> ThreadPool:
    """The thread pool of all cases. Builds the library where it is missing."""
    return ThreadPool(load_library(cache_root() / "kernels"), torch.get_num_threads())


def _layer(batch: PagedBatch) -> tuple[CacheLayer, torch.Tensor]:
    """One layer of an empty cache of two, and the slot of each token of each sequence."""
    heads = batch.heads
    shape = (batch.block_tables.numel(), 2, 2, heads.num_kv_heads, BLOCK_SIZE, heads.head_dim)
    layer = CacheLayer(*torch.zeros(shape, dtype=batch.query.dtype)[:, 1].unbind(1))
    slots = batch.block_tables.long()[:, :, None] * BLOCK_SIZE + torch.arange(BLOCK_SIZE)
    return layer, slots.flatten(1)[:, : batch.context_len].flatten().contiguous()
