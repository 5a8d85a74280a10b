"""Machines by name."""

from dataclasses import replace

from benchmarks.simulator.machine import CopyMode, Machine

# SmolLM2-135M in bfloat16 on two cores, as the whole system serves it. The step is fitted to results/sweep.json of
# commit 10ab59de18bb: with it the same requests get within 4% of the tokens per second that were measured, from 1 to 64
# at a time. A block is 16 tokens, twice, of 3 heads of 64 in 30 layers; memory copies 45 GB/s, read and written, and
# attention reads as fast. A prompt's pair is 4 × 9 heads × 64 × 30 layers, by the compiled kernel's 0.41 TFLOP/s.
CPU_SMOLLM = Machine(
    name="cpu-smollm",
    step_seconds=((1, 7.0e-3), (8, 10.0e-3), (32, 18.0e-3), (512, 190.0e-3)),
    context_seconds=23_040 / 45e9,
    pair_seconds=69_120 / 0.41e12,
    block_size=16,
    block_bytes=368_640,
    bytes_per_second=22.5e9,
    transfer_seconds=20e-6,
    copies=CopyMode.BEFORE_THE_STEP,
    dispatch_seconds=0.4e-3,
    num_blocks=4_096,
    num_host_blocks=4_096,
    context_length=8_192,
    max_sequences=64,
    max_step_tokens=512,
    usual_step_tokens=256,
)

# An 8B model of 32 layers with 8 KV heads of 128 in bfloat16, calculated, not measured. A step takes at least
# 16 GB of weights at 4 TB/s; each token adds 16 GFLOP at 600 TFLOP/s where that is more, from about
# 150 tokens on; attention reads 131,072 bytes a token at 4 TB/s; the bus carries 50 GB/s. 80 GB are left for blocks.
GPU_8B = Machine(
    name="gpu-8b",
    step_seconds=((1, 4.5e-3), (150, 5.0e-3), (8_192, 219.0e-3)),
    context_seconds=131_072 / 4e12,
    pair_seconds=4 * 32 * 128 * 32 / 400e12,
    block_size=16,
    block_bytes=2_097_152,
    bytes_per_second=50e9,
    transfer_seconds=30e-6,
    copies=CopyMode.BESIDE_THE_STEPS,
    dispatch_seconds=0.4e-3,
    num_blocks=38_000,
    num_host_blocks=38_000,
    context_length=32_768,
    max_sequences=256,
    max_step_tokens=2_048,
)

# The same behind a bus that is a hundred times slower: recomputing is much faster than copying.
SLOW_BUS = replace(GPU_8B, name="slow-bus", bytes_per_second=0.5e9)

MACHINES = {machine.name: machine for machine in (CPU_SMOLLM, GPU_8B, SLOW_BUS)}
