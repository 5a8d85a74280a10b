"""The interface by which the runner has a step computed and sampled, and its implementation for sampling on the
host.
"""

from collections.abc import Callable
from collections.abc import Sequence as Items
from concurrent.futures import Future, wait
from dataclasses import dataclass, replace
from itertools import islice
from typing import Protocol, TypeVar

import numpy as np
from torch import Tensor

from worker_svc.batch import Batch
from worker_svc.forward import Forward
from worker_svc.out_of_memory import Drafts, StepWork, run_within_memory
from worker_svc.prompt_logprobs import PromptPiece, TopLogprobs, score_prompts, top_logprobs_by_torch
from worker_svc.sampler import SamplerOutput, SamplingState, num_accepted, sample_tokens, start_masks
from worker_svc.sequences import Sequence
from worker_svc.step import SamplingParams
from worker_svc.token_masks import TokenMasks


@dataclass(frozen=True, slots=True)
class CudaGraphOptions:
    """Whether decode steps are captured as CUDA graphs on a GPU, and who receives the progress."""

    enabled: bool = True
    report: Callable[[int, int], None] = lambda captured, of: None


class SampleHandle(Protocol):
    """The sampled tokens of a launched step, in the order of `Batch.logits_indices`."""

    @property
    def placeholder_tokens(self) -> list[int]:
        """Placeholders for the tokens, for the batch of the next launch if that comes before they are known.

        A placeholder is the token itself, or a negative number that the executor interprets.
        """

    def is_done(self) -> bool:
        """Whether `result` would return at once. Never raises."""

    def wait(self) -> None:
        """Returns when `is_done` is true. Any thread may call it. Never raises."""

    def result(self) -> SamplerOutput:
        """The sampled tokens; waits for them. Raises the error of the device."""


T = TypeVar("T")


class Executor(Protocol):
    """A model over its cache, with its sampler. For one thread, under `torch.inference_mode`."""

    def launch(
        self, batch: Batch, sequences: Items[Sequence], drafts: Drafts = (), pieces: Items[PromptPiece] = ()
    ) -> SampleHandle:
        """Computes a step after those launched before, and samples a token for each of `batch.logits_indices`.

        `sequences` are those of these rows. Each has one row, and one for each token of its draft; `drafts` are in the
        order of the sequences, or empty. `batch.token_ids` may hold placeholders of the launch before. `pieces` of
        prompts are computed before the batch, in their order; each has at most `max_scored_rows`. At most one launch
        may be unfinished when this is called. It may return before anything is computed.
        """

    def can_verify(self, params: SamplingParams) -> bool:
        """Whether a sequence with these sampling parameters may have a draft."""

    def submit(self, work: Callable[[], T]) -> "Future[T]":
        """Runs other work where steps are computed or enqueued, between the launches before and after it."""


class Sampler(Protocol):
    """Samples tokens."""

    def __call__(self, logits: Tensor, states: Items[SamplingState], masks: TokenMasks | None = None) -> SamplerOutput:
        """A token for each row of logits [rows, vocab], which may be changed; see `worker_svc.sampler`."""


def compute(
    forward: Forward,
    sampler: Sampler,
    batch: Batch,
    states: Items[SamplingState],
    drafts: Drafts = (),
    pieces: Items[PromptPiece] = (),
    top_logprobs: TopLogprobs = top_logprobs_by_torch,
    *,
    forward_finds_argmax: bool = False,
) -> SamplerOutput:
    """Computes a step on the host and samples for each of `batch.logits_indices` by the state of its sequence.

    The accepted tokens are added to the states. A row after a draft token samples as if that token had been sampled,
    so an accepted row has the token that it would have without a draft. Masks of grammars are made while the forward
    pass runs. With `forward_finds_argmax` the sampler takes the argmax from the forward pass, which then writes only
    the rows of `Batch.needs_logits`.
    """
    prompt_logprobs = score_prompts(forward, top_logprobs, pieces) if pieces else ()
    rows = list(states) if not drafts else []
    for state, draft in zip(states, drafts, strict=True) if drafts else ():
        rows += state.ahead(draft)
    if forward_finds_argmax:
        batch = replace(batch, needs_logits=np.array([row.needs_logits for row in rows], bool))
    masks = start_masks(rows)
    try:
        logits = forward(batch)
    finally:
        if masks is not None:
            wait([masks])  # nothing may use the matchers before that
    if not states:
        return SamplerOutput([], [], prompt_logprobs)
    output = sampler(logits, rows, None if masks is None else masks.result())
    tokens = iter(output.tokens)
    for state, draft in zip(states, drafts or [()] * len(states), strict=True):
        sampled = list(islice(tokens, 1 + len(draft)))
        for token in sampled[: num_accepted(sampled, draft)]:
            if token is not None:
                state.add(token)
    return replace(output, prompt_logprobs=prompt_logprobs) if pieces else output


def run_inline(work: Callable[[], T]) -> "Future[T]":
    """Runs the work now. The future is done and has its result or exception."""
    future: Future[T] = Future()
    try:
        future.set_result(work())
    except BaseException as error:
        future.set_exception(error)
    return future


class HostExecutor:
    """A forward pass that blocks, with sampling on the host: all is done when `launch` returns."""

    def __init__(
        self,
        forward: Forward,
        sampler: Sampler = sample_tokens,
        top_logprobs: TopLogprobs = top_logprobs_by_torch,
    ) -> None:
        self._forward, self._sampler, self._top_logprobs = forward, sampler, top_logprobs

    def launch(
        self, batch: Batch, sequences: Items[Sequence], drafts: Drafts = (), pieces: Items[PromptPiece] = ()
    ) -> SampleHandle:
        states = [sequence.sampling for sequence in sequences]
        work = StepWork(batch, states, drafts, pieces)
        return HostSampleHandle(run_within_memory(self._compute, work))

    def _compute(self, work: StepWork[SamplingState]) -> SamplerOutput:
        return compute(self._forward, self._sampler, *work, self._top_logprobs)

    def can_verify(self, params: SamplingParams) -> bool:
        return True

    def submit(self, work: Callable[[], T]) -> "Future[T]":
        return run_inline(work)


class HostSampleHandle:
    """Sampled tokens that are known."""

    def __init__(self, output: SamplerOutput) -> None:
        self._output = output

    @property
    def placeholder_tokens(self) -> list[int]:
        """The tokens themselves; 0 for a row without a token."""
        return [0 if token is None else token for token in self._output.tokens]

    def is_done(self) -> bool:
        return True

    def wait(self) -> None:
        """Returns at once."""

    def result(self) -> SamplerOutput:
        return self._output
