"""Steps computed and drawn on a thread of their own, so that what lies between two of them is done while one runs."""

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
from worker_svc.sampler import SamplerOutput, SamplingState
from worker_svc.sequences import Sequence

T = TypeVar("T")


class HostThreadExecutor:
    """An `Executor` on a processor whose `launch` waits for nothing.

    For a forward pass with threads of its own, that lets go of the interpreter: torch computes on one thread beside it.
    """

    def __init__(self, forward: Forward, sampler: Sampler) -> None:
        self._forward, self._sampler = forward, sampler
        self._thread = ThreadPoolExecutor(1, "host", initializer=torch.set_num_threads, initargs=(1,))
        # Of the last step that ran, where stand-ins point. Only the thread looks at them.
        self._sampled: NDArray[np.int64] = np.empty(0, np.int64)

    def launch(self, batch: Batch, sequences: Items[Sequence]) -> SampleHandle:
        """As `Executor` has it."""
        states = [sequence.sampling for sequence in sequences]
        return HostThreadSampleHandle(self._thread.submit(self._run, batch, states), len(states))

    def submit(self, work: Callable[[], T]) -> "Future[T]":
        """As `Executor` has it."""
        return self._thread.submit(self._work, work)

    @torch.inference_mode()
    def _work(self, work: Callable[[], T]) -> T:
        return work()

    @torch.inference_mode()
    def _run(self, batch: Batch, states: list[SamplingState]) -> SamplerOutput:
        is_placeholder = batch.token_ids < 0
        batch.token_ids[is_placeholder] = self._sampled[-1 - batch.token_ids[is_placeholder]]
        # Nothing is to be looked up of a step that raises.
        self._sampled = np.empty(0, np.int64)
        output = compute(self._forward, self._sampler, batch, states)
        # A draw that failed has to be looked up too: any token will do, for what comes of it is thrown away.
        self._sampled = np.array([token or 0 for token in output.tokens], np.int64)
        return output


class HostThreadSampleHandle:
    """The draws of a step that may still run."""

    def __init__(self, output: "Future[SamplerOutput]", num_samples: int) -> None:
        self._output, self._num_samples = output, num_samples

    @property
    def placeholder_tokens(self) -> list[int]:
        """Where the next step finds each token: -1 - row."""
        return list(range(-1, -1 - self._num_samples, -1))

    def is_done(self) -> bool:
        """Whether it has run, or failed."""
        return self._output.done()

    def wait(self) -> None:
        """Return when it has."""
        self._output.exception()  # nobody cancels it

    def result(self) -> SamplerOutput:
        """What was drawn. Raises what the forward pass or the sampler raised."""
        return self._output.result()
