"""A step for which memory does not suffice is computed without its newest sequences, one after the other."""

import logging
from collections.abc import Callable
from collections.abc import Sequence as Items
from dataclasses import dataclass
from typing import Generic, NamedTuple, Protocol, TypeAlias, TypeVar

import torch

from worker_svc.batch import Batch
from worker_svc.prompt_logprobs import PromptPiece
from worker_svc.sampler import SamplerOutput

logger = logging.getLogger("quire.worker")

OUT_OF_MEMORY = (
    "memory ran out in a step of which this was the newest sequence: lower QUIRE_MAX_STEP_TOKENS or "
    "QUIRE_MAX_SEQUENCES; or, for fewer blocks, QUIRE_MEMORY_FRACTION, or on a CPU QUIRE_CPU_KV_BYTES or "
    "QUIRE_SWAP_SPACE"
)
"""Why such a sequence fails, for the operator: a line of the log."""

Drafts: TypeAlias = Items[Items[int]]
"""Tokens that are computed after the last known one of each sequence, to be accepted where they are sampled too."""

S = TypeVar("S")
R = TypeVar("R")
W = TypeVar("W", bound="Divisible")


class StepWork(NamedTuple, Generic[S]):
    """What an executor computes in a step: see `Executor.launch`.

    `sampled` has an entry for each sequence that samples.
    """

    batch: Batch
    sampled: Items[S]
    drafts: Drafts = ()
    pieces: Items[PromptPiece] = ()

    @property
    def sequence_ids(self) -> Items[int]:
        return self.batch.sequence_ids

    def without(self, sequence_id: int) -> "StepWork[S]":
        """The same without one sequence, of at least two."""
        batch, index = self.batch, self.batch.sequence_ids.index(sequence_id)
        place = None
        if batch.rows_of(index).any():
            place = sum(bool(batch.rows_of(other).any()) for other in range(index))
        return StepWork(
            batch.without(index),
            _without(self.sampled, place),
            _without(self.drafts, place) if self.drafts else (),
            [piece for piece in self.pieces if sequence_id not in piece.batch.sequence_ids],
        )

    def rows_without(self, left_out: Items[int]) -> list[bool]:
        """For each row of logits, whether it is of none of these sequences."""
        rows = [True] * len(self.batch.logits_indices)
        for sequence_id in left_out:
            for row in self.batch.rows_of(self.batch.sequence_ids.index(sequence_id)).nonzero()[0]:
                rows[row] = False
        return rows

    def complete(self, output: SamplerOutput, left_out: Items[int]) -> SamplerOutput:
        """The output of this work, from that of the same without some sequences."""
        if not left_out:
            return output
        rows = self.rows_without(left_out)
        tokens, logprobs, scored = iter(output.tokens), iter(output.logprobs), iter(output.prompt_logprobs)
        are_out = [not set(left_out).isdisjoint(piece.batch.sequence_ids) for piece in self.pieces]
        return SamplerOutput(
            [next(tokens) if is_in else None for is_in in rows],
            [next(logprobs) if is_in else None for is_in in rows],
            [[] if is_out else next(scored) for is_out in are_out],
            left_out,
        )


class Divisible(Protocol):
    """Work of some sequences, which can be done without one of them."""

    @property
    def sequence_ids(self) -> Items[int]: ...

    def without(self: W, sequence_id: int) -> W: ...


class Handle(Protocol):
    """Sampled tokens, as `SampleHandle` in `executor.py`."""

    @property
    def placeholder_tokens(self) -> list[int]: ...

    def is_done(self) -> bool: ...

    def wait(self) -> None: ...

    def result(self) -> SamplerOutput: ...


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an allocation failed, of torch, of Python or of compiled code."""
    if isinstance(error, (MemoryError, torch.OutOfMemoryError)):
        return True
    # torch has no type of its own for this on a CPU.
    return isinstance(error, RuntimeError) and any(text in str(error) for text in _TEXTS)


_TEXTS = ("DefaultCPUAllocator", "std::bad_alloc", "not enough memory", "CUDA out of memory")


def run_within_memory(run: Callable[[StepWork[S]], SamplerOutput], work: StepWork[S]) -> SamplerOutput:
    """The output of `run`, without the sequences that had to be left out. Raises its other errors."""
    output, left_out = leave_out_newest(run, work)
    return work.complete(output if output is not None else SamplerOutput([], []), left_out)


def launch_within_memory(
    launch: Callable[[StepWork[S]], Handle], work: StepWork[S], recover: Callable[[], bool]
) -> Handle:
    """The same for a launch. `recover` is called where memory ran out, and returns whether `launch` may be called
    again, which is first done with all sequences.
    """
    handle, left_out = leave_out_newest(launch, work, recover, is_retried=True)
    return handle if handle is not None and not left_out else _PartialHandle(handle, work, left_out)


def leave_out_newest(
    run: Callable[[W], R], work: W, recover: Callable[[], bool] = lambda: True, *, is_retried: bool = False
) -> tuple[R | None, list[int]]:
    """What `run` returns, and the ids of the sequences without which it did: the newest ones, as many as memory lacks.
    None: without any. Raises its other errors.

    `recover` and `is_retried` are as in `launch_within_memory`.
    """
    left_out: list[int] = []
    while True:
        try:
            return run(work), left_out
        except Exception as error:
            if not is_out_of_memory(error) or not work.sequence_ids or not recover():
                raise
            text = str(error)
        # Here, since the exception no longer refers to the tensors of the attempt.
        if is_retried:
            is_retried = False
            continue
        newest = max(work.sequence_ids)
        left_out.append(newest)
        logger.warning(OUT_OF_MEMORY, extra={"sequence_id": newest, "why": text})
        if len(work.sequence_ids) == 1:
            return None, left_out
        work = work.without(newest)


@dataclass(frozen=True, slots=True)
class _PartialHandle(Generic[S]):
    """The tokens of a launch without some of the sequences of its work; `handle` is None if it is without all."""

    handle: Handle | None
    work: StepWork[S]
    left_out: list[int]

    @property
    def placeholder_tokens(self) -> list[int]:
        """Those of a sequence that was left out mean nothing."""
        placeholders = iter(self.handle.placeholder_tokens if self.handle is not None else ())
        return [next(placeholders) if is_in else 0 for is_in in self.work.rows_without(self.left_out)]

    def is_done(self) -> bool:
        return self.handle is None or self.handle.is_done()

    def wait(self) -> None:
        if self.handle is not None:
            self.handle.wait()

    def result(self) -> SamplerOutput:
        output = self.handle.result() if self.handle is not None else SamplerOutput([], [])
        return self.work.complete(output, self.left_out)


def _without(items: Items[S], place: int | None) -> Items[S]:
    return items if place is None else [*items[:place], *items[place + 1 :]]
