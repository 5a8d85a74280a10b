"""Decode steps of a worker's runner, without a server."""

from collections.abc import Iterable
from time import perf_counter

from worker_svc.runner import Runner
from worker_svc.step import NewSequence, SamplingParams, ScheduledSequence, Step

CONTEXT = 128  # tokens of each sequence before it decodes
LONGEST = 256  # tokens of each sequence


class DecodingBatch:
    """Sequences that decode together, a step at a time. Several batches may share a runner, as long as its blocks
    suffice for the sequences of all.
    """

    def __init__(self, runner: Runner, ids: Iterable[int], sampling: Iterable[SamplingParams]) -> None:
        """`sampling` has the parameters of each sequence."""
        self._runner, self._ids, self._num_computed = runner, list(ids), CONTEXT
        blocks_each = LONGEST // runner.limits.block_size
        for place, (sequence_id, params) in enumerate(zip(self._ids, sampling, strict=True)):
            first = sequence_id % (runner.limits.num_blocks // blocks_each) * blocks_each
            new = NewSequence(sequence_id, [5 + place] * CONTEXT, CONTEXT, 0, params)
            blocks = list(range(first, first + blocks_each))
            runner.step(Step([], [new], [ScheduledSequence(sequence_id, 0, CONTEXT, blocks)]))

    def seconds(self) -> float:
        """The duration of the next step. Raises RuntimeError if a sequence fails."""
        step = Step([], [], [ScheduledSequence(sequence_id, self._num_computed, 1, []) for sequence_id in self._ids])
        self._num_computed += 1
        started = perf_counter()
        outcome = self._runner.step(step)
        seconds = perf_counter() - started
        for result in outcome.sequences:
            if result.failure is not None:
                raise RuntimeError(f"a sequence failed: {result.failure}")
        return seconds

    def end(self) -> None:
        """The runner forgets the sequences."""
        self._runner.step(Step(self._ids, [], []))
