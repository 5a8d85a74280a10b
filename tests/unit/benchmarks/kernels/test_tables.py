"""Every case runs at small sizes in Triton's interpreter, and agrees with its peers where possible."""

from functools import partial

import pytest
import torch

from benchmarks.kernels import attention, blocks, compiled, cpu_table, elementwise, gpu_table, invariant
from benchmarks.kernels.case import KernelCase
from benchmarks.kernels.pages import Heads, PagedBatch
from quire_kernels.cpu.linear import MatrixFormat
from worker_svc.step import Direction

CPU = torch.device("cpu")
HEADS = Heads(2, 2, 64)
NATIVE = {"cpu_paged_attention", "compiled attend", "compiled linear", "embed_tokens"}

SMALL: dict[str, partial[KernelCase]] = {
    "decode": partial(attention.decode, heads=HEADS, num_seqs=2, context_len=33),
    "decode int8": partial(attention.decode_8bit, heads=HEADS, num_seqs=2, context_len=33, dtype=torch.int8),
    "prefill": partial(attention.prefill, heads=HEADS, num_seqs=1, num_queries=5, context_len=20),
    "cpu decode": partial(attention.cpu_attention, heads=HEADS, num_seqs=2, num_queries=1, context_len=33),
    "cpu prefill": partial(attention.cpu_attention, heads=HEADS, num_seqs=1, num_queries=20, context_len=20),
    "compiled decode": partial(compiled.attention, heads=HEADS, num_seqs=2, num_queries=1, context_len=33),
    "compiled prefill": partial(compiled.attention, heads=HEADS, num_seqs=1, num_queries=20, context_len=20),
    "compiled store": partial(compiled.store, heads=HEADS, num_tokens=3),
    "compiled linear": partial(compiled.product, num_rows=3, outputs=64, inputs=32, matrix_format=MatrixFormat.PLAIN),
    "compiled linear int8": partial(
        compiled.product, num_rows=3, outputs=64, inputs=32, matrix_format=MatrixFormat.INT8
    ),
    "compiled linear W8A8": partial(
        compiled.product, num_rows=3, outputs=64, inputs=32, matrix_format=MatrixFormat.W8A8
    ),
    "compiled greedy": partial(compiled.greedy, num_rows=3, vocab_size=300),
    "rotary": partial(elementwise.rotary, heads=HEADS, num_tokens=3),
    "store": partial(elementwise.store, heads=HEADS, num_tokens=3),
    "cpu store": partial(elementwise.cpu_store, heads=HEADS, num_tokens=3),
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
    "invariant decode": partial(invariant.decode, heads=HEADS, num_seqs=2, context_len=33),
    "norms": partial(invariant.norms, num_rows=2, vocab_size=300),
    "copy": partial(blocks.copy_blocks, num_pairs=3, block_bytes=64),
    "swap out": partial(blocks.swap_blocks, direction=Direction.OUT, num_pairs=3, block_bytes=64),
    "swap in": partial(blocks.swap_blocks, direction=Direction.IN, num_pairs=3, block_bytes=64),
}


@pytest.mark.skipif(torch.cuda.is_available(), reason="ops are interpreted only where there is no GPU")
@pytest.mark.parametrize("make", SMALL.values(), ids=SMALL)
def test_a_case_runs_with_its_peers(make: partial[KernelCase]) -> None:
    torch.manual_seed(0)
    case = make(CPU)
    assert case.amount > 0
    with torch.inference_mode():
        ours = case.ours()
        for name, peer in case.peers.items():
            theirs = peer()
            # Triton's interpreter rounds bfloat16 unlike any device, so results in it are not compared.
            if case.op in NATIVE and isinstance(ours, torch.Tensor) and isinstance(theirs, torch.Tensor):
                torch.testing.assert_close(ours.float(), theirs.float(), rtol=0.03, atol=0.03, msg=name)


def test_every_op_of_the_table_is_tried_small() -> None:
    assert {make.func for make in (*gpu_table.CASES, *cpu_table.CASES)} <= {make.func for make in SMALL.values()}


def test_gathered_pages_hold_each_sequence_in_order() -> None:
    batch = PagedBatch.make(HEADS, 2, 1, 33, CPU, torch.float32)
    keys, _ = batch.gather()
    block, offset = batch.block_tables[1, 2], 32 % 16
    assert keys.shape == (2, 2, 33, 64)
    assert torch.equal(keys[1, :, 32], batch.key_cache[block, :, offset])


def test_operations_count_the_pairs_that_see_each_other() -> None:
    whole = PagedBatch.make(Heads(1, 1, 64), 1, 3, 3, CPU)
    chunk = PagedBatch.make(Heads(1, 1, 64), 1, 2, 5, CPU)
    assert (whole.operations, chunk.operations) == (4 * 6 * 64, 4 * 9 * 64)
