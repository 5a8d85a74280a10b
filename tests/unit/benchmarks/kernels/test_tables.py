"""Every case runs at small sizes in Triton's interpreter, and agrees with its peers where possible."""

from functools import partial

import pytest
import torch

from benchmarks.kernels import attention, compiled, cpu_table, elementwise, gpu_table
from benchmarks.kernels.case import KernelCase
from benchmarks.kernels.pages import Heads, PagedBatch
from benchmarks.kernels.small_table import HEADS, SMALL
from quire_kernels.cpu.linear import MatrixFormat

CPU = torch.device("cpu")
NATIVE = {"cpu_paged_attention", "compiled attend", "compiled linear", "embed_tokens"}

SMALL_CPU: dict[str, partial[KernelCase]] = {
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
    "cpu store": partial(elementwise.cpu_store, heads=HEADS, num_tokens=3),
}
EVERY = SMALL | SMALL_CPU


@pytest.mark.skipif(torch.cuda.is_available(), reason="ops are interpreted only where there is no GPU")
@pytest.mark.parametrize("make", EVERY.values(), ids=EVERY)
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
    assert {make.func for make in (*gpu_table.CASES, *cpu_table.CASES)} <= {make.func for make in EVERY.values()}


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
