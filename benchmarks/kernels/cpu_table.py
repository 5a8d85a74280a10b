"""The cases of a CPU, each made when its turn comes."""

from functools import partial

from benchmarks.kernels import attention, blocks, compiled, elementwise
from benchmarks.kernels.case import KernelCase
from benchmarks.kernels.pages import LLAMA_8B, SMOLLM_135M
from quire_kernels.cpu.linear import MatrixFormat
from worker_svc.step import Direction


def cases() -> tuple[partial[KernelCase], ...]:
    """Those of this processor."""
    return (*CASES, *AMX_CASES) if compiled.computes_by_amx() else CASES


CASES: tuple[partial[KernelCase], ...] = (
    partial(compiled.attention, heads=SMOLLM_135M, num_seqs=1, num_queries=1, context_len=2048),
    partial(compiled.attention, heads=SMOLLM_135M, num_seqs=32, num_queries=1, context_len=512),
    partial(compiled.attention, heads=LLAMA_8B, num_seqs=8, num_queries=1, context_len=2048),
    partial(compiled.attention, heads=SMOLLM_135M, num_seqs=1, num_queries=512, context_len=512),
    partial(compiled.attention, heads=SMOLLM_135M, num_seqs=1, num_queries=256, context_len=1024),
    partial(compiled.store, heads=SMOLLM_135M, num_tokens=512),
    partial(compiled.product, num_rows=1, outputs=16384, inputs=2048, matrix_format=MatrixFormat.PLAIN),
    partial(compiled.product, num_rows=6, outputs=16384, inputs=2048, matrix_format=MatrixFormat.PLAIN),
    partial(compiled.product, num_rows=8, outputs=16384, inputs=2048, matrix_format=MatrixFormat.PLAIN),
    partial(compiled.product, num_rows=32, outputs=16384, inputs=2048, matrix_format=MatrixFormat.PLAIN),
    partial(compiled.product, num_rows=256, outputs=16384, inputs=2048, matrix_format=MatrixFormat.PLAIN),
    partial(compiled.product, num_rows=1, outputs=16384, inputs=2048, matrix_format=MatrixFormat.INT8),
    partial(compiled.product, num_rows=32, outputs=16384, inputs=2048, matrix_format=MatrixFormat.INT8),
    partial(compiled.product, num_rows=1, outputs=16384, inputs=2048, matrix_format=MatrixFormat.W8A8),
    partial(compiled.product, num_rows=32, outputs=16384, inputs=2048, matrix_format=MatrixFormat.W8A8),
    partial(compiled.product, num_rows=256, outputs=16384, inputs=2048, matrix_format=MatrixFormat.W8A8),
    partial(compiled.product, num_rows=256, outputs=16384, inputs=2048, matrix_format=MatrixFormat.W4A8),
    partial(compiled.greedy, num_rows=32, vocab_size=49152),
    partial(attention.cpu_attention, heads=SMOLLM_135M, num_seqs=1, num_queries=1, context_len=2048),
    partial(attention.cpu_attention, heads=SMOLLM_135M, num_seqs=8, num_queries=1, context_len=512),
    partial(attention.cpu_attention, heads=SMOLLM_135M, num_seqs=32, num_queries=1, context_len=512),
    partial(attention.cpu_attention, heads=SMOLLM_135M, num_seqs=1, num_queries=512, context_len=512),
    partial(attention.cpu_attention, heads=SMOLLM_135M, num_seqs=1, num_queries=256, context_len=1024),
    partial(elementwise.cpu_store, heads=SMOLLM_135M, num_tokens=512),
    partial(blocks.swap_blocks, direction=Direction.OUT, num_pairs=256, block_bytes=360 << 10),
    partial(blocks.swap_blocks, direction=Direction.IN, num_pairs=256, block_bytes=360 << 10),
)
AMX_CASES: tuple[partial[KernelCase], ...] = (
    partial(compiled.attention, heads=SMOLLM_135M, num_seqs=32, num_queries=1, context_len=512, by_amx=True),
    partial(compiled.attention, heads=LLAMA_8B, num_seqs=8, num_queries=1, context_len=2048, by_amx=True),
    partial(compiled.attention, heads=SMOLLM_135M, num_seqs=1, num_queries=512, context_len=512, by_amx=True),
    partial(compiled.attention, heads=SMOLLM_135M, num_seqs=1, num_queries=256, context_len=1024, by_amx=True),
    *(
        partial(
            compiled.product, num_rows=num_rows, outputs=16384, inputs=2048, matrix_format=matrix_format, by_amx=True
        )
        for num_rows in (1, 32, 256)
        for matrix_format in (MatrixFormat.PLAIN, MatrixFormat.W8A8, MatrixFormat.W4A8)
    ),
)
