"""Steps of the worker's own, before it serves: what a step needs at most, what it compiles, and how fast it is."""

import time
from collections.abc import Callable
from dataclasses import replace

from worker_svc.description import WorkerLimits
from worker_svc.runner import Runner
from worker_svc.step import BlockOps, BlockPairs, NewSequence, SamplingParams, ScheduledSequence, Step, StepOutcome

# What is swapped to measure how fast that is: much longer on its way than its start takes. Held back by a setting, what
# takes this long.
_MEASURED_BYTES = 64 * 2**20
_MEASURED_SECONDS = 0.1


def run_largest_step(limits: WorkerLimits, make_runner: Callable[[WorkerLimits], Runner]) -> Runner:
    """Run a step of all tokens and all sequences that a step may hold, each with a draw of the costliest kind.

    `make_runner` is given the limits with as many blocks as that needs. Returns the runner.
    """
    num_sequences = min(limits.max_sequences, limits.max_step_tokens)
    share, more = divmod(limits.max_step_tokens, num_sequences)
    lengths = [min(share + (row < more), limits.context_length - 1) for row in range(num_sequences)]
    step = _prefill(lengths, limits.block_size)
    runner = make_runner(replace(limits, num_blocks=_num_blocks(step)))
    _run(runner, step)
    return runner


def warm_up(runner: Runner) -> None:
    """Compile and load what the first steps need: one with a prompt, one with a draw after it, and so for more of them.

    Triton compiles a kernel anew where a size is 1 or becomes a multiple of 16.
    """
    limits = runner.limits
    length = _longest_prompt(limits)
    for num_sequences in sorted({min(count, limits.max_sequences, length) for count in (1, 3, 16, 17)}):
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
    """Tokens per second of a prompt that fills a step, or all blocks there are. The runner must be warm."""
    length = _longest_prompt(runner.limits)
    step = _prefill([length], runner.limits.block_size)
    started = time.perf_counter()
    _run(runner, step)
    seconds = time.perf_counter() - started
    runner.reset()
    return length / seconds


def measure_swaps(runner: Runner, block_bytes: int, max_rate: float | None) -> float:
    """Bytes per second that blocks swap at, out and in together; 0 where there are none on the host.

    They are scattered on the device, as those of a sequence come to be. `max_rate` is what the settings hold it to.
    """
    limits = runner.limits
    most = _MEASURED_BYTES if max_rate is None else int(max_rate * _MEASURED_SECONDS)
    count = min(limits.num_blocks, limits.num_host_blocks, max(1, most // block_bytes))
    if not count:
        return 0.0
    there: BlockPairs = [(count - 1 - block, block) for block in range(count)]
    back = [(destination, source) for source, destination in there]
    # The first time compiles kernels, and takes memory from the system.
    for _ in range(2 if max_rate is None else 1):
        outcomes = [
            _run(runner, Step([], [], [], block_ops))
            for block_ops in (BlockOps(swap_out=there), BlockOps(swap_in=back))
        ]
    seconds = sum(swap_result.seconds for outcome in outcomes for swap_result in outcome.swap_results)
    return 2 * count * block_bytes / seconds


def _longest_prompt(limits: WorkerLimits) -> int:
    """The tokens of a prompt that one step computes, with room for a draw behind it."""
    return min(limits.max_step_tokens, limits.context_length - 2, limits.num_blocks * limits.block_size - 1)


def _prefill(lengths: list[int], block_size: int) -> Step:
    params = SamplingParams(temperature=1.0, top_p=0.9, top_k=1000, repetition_penalty=1.1, logprobs=20)
    new, scheduled, next_block = [], [], 0
    for sequence_id, length in enumerate(lengths):
        blocks = list(range(next_block, next_block + length // block_size + 1))
        next_block += len(blocks)
        new.append(NewSequence(sequence_id, [0] * length, length, 0, params))
        scheduled.append(ScheduledSequence(sequence_id, 0, length, blocks))
    return Step([], new, scheduled)


def _num_blocks(step: Step) -> int:
    return sum(len(scheduled.new_block_ids) for scheduled in step.scheduled)


def _run(runner: Runner, step: Step) -> StepOutcome:
    outcome = runner.step(step)
    failures = [result.failure for result in outcome.sequences] + [
        result_of_swap.failure for result_of_swap in outcome.swap_results
    ]
    for failure in failures:
        if failure is not None:
            raise RuntimeError(f"a step of the worker's own failed: {failure}")
    return outcome
