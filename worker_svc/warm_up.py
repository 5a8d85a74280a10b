"""Steps that the worker runs before it serves, to measure memory, compile kernels and measure speed."""

import time
from collections.abc import Callable
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from worker_svc.description import WorkerLimits
from worker_svc.errors import StartupFailed
from worker_svc.runner import Runner
from worker_svc.step import (
    BlockOps,
    BlockPairs,
    FailureReason,
    NewSequence,
    SamplingParams,
    ScheduledSequence,
    Step,
    StepOutcome,
)

# Bytes to swap for the measurement, enough that the start of a copy does not matter; seconds with a rate limit.
_MEASURED_BYTES = 64 * 2**20
_MEASURED_SECONDS = 0.1


_USUAL = SamplingParams(temperature=1.0, top_p=0.9, top_k=1000, repetition_penalty=1.1, logprobs=20)
_COSTLIEST = replace(_USUAL, typical_p=0.9)
_PLAIN = SamplingParams(temperature=1.0)

# Why a valid sequence fails, whatever its tokens are.
_NOT_FINITE = ". The weights of the model hold NaN or infinity, or QUIRE_DTYPE is too small for them"

# Triton compiles a kernel again if a size is 1 or becomes a multiple of 16. On a CPU nothing is compiled: one step of a
# few tokens starts the threads and takes the memory that others use again.
_COUNTS_OF_SEQUENCES = {"cuda": (1, 3, 16, 17), "cpu": (3,)}


class RepeatingDrafter:
    """Guesses as many tokens as allowed, for steps of the largest size."""

    def draft(self, tokens: NDArray[np.int32], max_tokens: int) -> list[int]:
        """The last token, repeated."""
        return [int(tokens[-1])] * max_tokens


def run_largest_step(limits: WorkerLimits, make_runner: Callable[[WorkerLimits], Runner], device_type: str) -> Runner:
    """Runs a step with the maximum of tokens and sequences; one with the most rows of logits of a prompt; and with a
    drafter, one with the maximum of sampled rows.

    On a GPU, where the peak is measured, all rows have the costliest kind of sampling. On a CPU, where what is kept is
    measured, that would take seconds and change nothing: what it takes is given back.

    `make_runner` receives limits with the blocks that this needs; its drafter guesses as much as allowed. Returns the
    runner.
    """
    sampling = _COSTLIEST if device_type == "cuda" else _PLAIN
    num_sequences = min(limits.max_sequences, limits.max_step_tokens)
    share, more = divmod(limits.max_step_tokens, num_sequences)
    lengths = [min(share + (row < more), limits.context_length - 1) for row in range(num_sequences)]
    steps = [_prefill(lengths, limits.block_size, sampling)]
    length = min(limits.max_scored_rows + 1, limits.max_step_tokens, limits.context_length - 1)
    steps.append(
        _prefill([length], limits.block_size, replace(sampling, logprobs=_USUAL.logprobs), result="prompt_logprobs")
    )
    num_drafted = min(limits.max_draft_tokens, limits.max_step_tokens - 1, limits.context_length - 2)
    if num_drafted > 0:
        num_sequences = min(limits.max_sequences, limits.max_step_tokens // (1 + num_drafted))
        # A GPU verifies no draft of a sequence with penalties.
        params = replace(sampling, repetition_penalty=1.0)
        steps.append(_prefill([1] * num_sequences, limits.block_size, params, num_drafted))
    runner = make_runner(replace(limits, num_blocks=max(map(_num_blocks, steps))))
    for step in steps:
        _run(runner, step)
        runner.reset()
    return runner


def warm_up(runner: Runner, device_type: str) -> None:
    """Compile and load what the first steps need: steps with a prompt and steps that sample after it, for as many
    sequences as the device needs. On a GPU the prompts fill a step; on a CPU each fills a block but for the token that
    is sampled after it.
    """
    limits = runner.limits
    length = _longest_prompt(limits)
    if device_type == "cpu":
        length = min(length, max(_COUNTS_OF_SEQUENCES["cpu"]) * (limits.block_size - 1))
    for num_sequences in sorted(
        {min(count, limits.max_sequences, length) for count in _COUNTS_OF_SEQUENCES[device_type]}
    ):
        share = length // num_sequences
        step = _prefill([share] * num_sequences, limits.block_size)
        if _num_blocks(step) > limits.num_blocks:
            break
        _run(runner, step)
        _run(runner, Step([], [], [ScheduledSequence(row, share, 1, []) for row in range(num_sequences)]))
        runner.reset()
    if limits.num_blocks > 1:
        _run(runner, Step([], [], [], BlockOps(copies=[(0, 1)])))


def measure_prefill(runner: Runner) -> float:
    """Prompt tokens per second for a prompt that fills a usual step, or all blocks, after `warm_up`."""
    length = min(runner.limits.usual_step_tokens or runner.limits.max_step_tokens, _longest_prompt(runner.limits))
    step = _prefill([length], runner.limits.block_size)
    started = time.perf_counter()
    _run(runner, step)
    seconds = time.perf_counter() - started
    runner.reset()
    return length / seconds


def measure_swaps(runner: Runner, block_bytes: int, max_rate: float | None) -> float:
    """Bytes per second that swaps move, out and in together; 0 without host blocks.

    The blocks are scattered on the device, as those of a sequence are. `max_rate` is the limit of the settings.
    """
    limits = runner.limits
    most = _MEASURED_BYTES if max_rate is None else int(max_rate * _MEASURED_SECONDS)
    count = min(limits.num_blocks, limits.num_host_blocks, max(1, most // block_bytes))
    if not count:
        return 0.0
    there: BlockPairs = [(count - 1 - block, block) for block in range(count)]
    back = [(destination, source) for source, destination in there]
    # The first time compiles kernels and page-faults memory.
    for _ in range(2 if max_rate is None else 1):
        outcomes = [
            _run(runner, Step([], [], [], block_ops))
            for block_ops in (BlockOps(swap_out=there), BlockOps(swap_in=back))
        ]
    seconds = sum(swap_result.seconds for outcome in outcomes for swap_result in outcome.swap_results)
    return 2 * count * block_bytes / seconds


def _longest_prompt(limits: WorkerLimits) -> int:
    """The tokens of a prompt that one step computes, with room for a sampled token."""
    return min(limits.max_step_tokens, limits.context_length - 2, limits.num_blocks * limits.block_size - 1)


def _prefill(
    lengths: list[int],
    block_size: int,
    params: SamplingParams = _USUAL,
    num_drafted: int = 0,
    result: str = "tokens",
) -> Step:
    new, scheduled, next_block = [], [], 0
    for sequence_id, length in enumerate(lengths):
        blocks = list(range(next_block, next_block + (length + num_drafted) // block_size + 1))
        next_block += len(blocks)
        num_top = params.logprobs or 0
        new.append(NewSequence(sequence_id, [0] * length, length, 0, params, result=result, num_top_of_prompt=num_top))
        scheduled.append(ScheduledSequence(sequence_id, 0, length, blocks, max_extra_tokens=num_drafted))
    return Step([], new, scheduled)


def _num_blocks(step: Step) -> int:
    return sum(len(scheduled.new_block_ids) for scheduled in step.scheduled)


def _run(runner: Runner, step: Step) -> StepOutcome:
    return without_failures(runner.step(step))


def without_failures(outcome: StepOutcome) -> StepOutcome:
    """The outcome of a warm-up step. Raises StartupFailed where a sequence or a swap has failed."""
    for swap in outcome.swap_results:
        if swap.failure is not None:
            raise StartupFailed(f"a warm-up step failed: {swap.failure}")
    for result in outcome.sequences:
        if result.failure is not None:
            hint = "" if result.failure_reason is FailureReason.OUT_OF_MEMORY else _NOT_FINITE
            raise StartupFailed(f"a warm-up step failed: {result.failure}{hint}")
    return outcome
