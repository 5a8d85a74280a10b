"""Steps computed and sampled on a thread of their own, so that the work between two steps overlaps with a step."""

from collections.abc import Callable
from collections.abc import Sequence as Items
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeVar

import numpy as np
import torch
from numpy.typing import NDArray

from worker_svc.batch import Batch
from worker_svc.executor import SampleHandle, Sampler, compute
from worker_svc.forward import Forward
from worker_svc.out_of_memory import Drafts, StepWork, run_within_memory
from worker_svc.prompt_logprobs import PromptPiece, TopLogprobs, top_logprobs_by_torch
from worker_svc.sampler import SamplerOutput, SamplingState
from worker_svc.sequences import Sequence
from worker_svc.step import SamplingParams

T = TypeVar("T")


class HostThreadExecutor:
    """An `Executor` on a CPU whose `launch` does not block.

    For a forward pass with threads of its own that releases the GIL. Torch computes on one thread.
    """

    def __init__(
        self,
        forward: Forward,
        sampler: Sampler,
        top_logprobs: TopLogprobs = top_logprobs_by_torch,
        *,
        forward_finds_argmax: bool = False,
    ) -> None:
        """With `forward_finds_argmax` the sampler takes the argmax from the forward pass, which then writes only the
        rows of `Batch.needs_logits`.
        """
        self._forward, self._sampler, self._top_logprobs = forward, sampler, top_logprobs
        self._forward_finds_argmax = forward_finds_argmax
        self._thread = ThreadPoolExecutor(1, "host", initializer=torch.set_num_threads, initargs=(1,))
        # The tokens of the last step that ran, which placeholders refer to. Used by the thread only.
        self._sampled: NDArray[np.int64] = np.empty(0, np.int64)

    def launch(
        self, batch: Batch, sequences: Items[Sequence], drafts: Drafts = (), pieces: Items[PromptPiece] = ()
    ) -> SampleHandle:
        states = [sequence.sampling for sequence in sequences]
        output = self._thread.submit(self._run, batch, states, drafts, pieces)
        return HostThreadSampleHandle(output, len(batch.logits_indices))

    def can_verify(self, params: SamplingParams) -> bool:
        return True

    def submit(self, work: Callable[[], T]) -> "Future[T]":
        return self._thread.submit(self._work, work)

    @torch.inference_mode()
    def _work(self, work: Callable[[], T]) -> T:
        return work()

    @torch.inference_mode()
    def _run(
        self, batch: Batch, states: list[SamplingState], drafts: Drafts, pieces: Items[PromptPiece]
    ) -> SamplerOutput:
        is_placeholder = batch.token_ids < 0
        batch.token_ids[is_placeholder] = self._sampled[-1 - batch.token_ids[is_placeholder]]
        # If the step raises, no placeholder may refer to its tokens.
        self._sampled = np.empty(0, np.int64)
        output = run_within_memory(self._compute, StepWork(batch, states, drafts, pieces))
        # A row without a token is looked up too: any token will do, because its result is discarded.
        self._sampled = np.array([token or 0 for token in output.tokens], np.int64)
        return output

    def _compute(self, work: StepWork[SamplingState]) -> SamplerOutput:
        return compute(
            self._forward, self._sampler, *work, self._top_logprobs, forward_finds_argmax=self._forward_finds_argmax
        )


class HostThreadSampleHandle:
    """The sampled tokens of a step that may still run."""

    def __init__(self, output: "Future[SamplerOutput]", num_samples: int) -> None:
        self._output, self._num_samples = output, num_samples

    @property
    def placeholder_tokens(self) -> list[int]:
        """The rows where the next step finds the tokens, as -1 - row."""
        return list(range(-1, -1 - self._num_samples, -1))

    def is_done(self) -> bool:
        return self._output.done()

    def wait(self) -> None:
        self._output.exception()  # nobody cancels it

    def result(self) -> SamplerOutput:
        return self._output.result()
