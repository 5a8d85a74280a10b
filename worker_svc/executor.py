"""How a step is computed and drawn: what the runner asks for, and the answer to it where the host draws."""

from collections.abc import Callable
from collections.abc import Sequence as Items
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Protocol, TypeVar

from torch import Tensor

from worker_svc.batch import Batch
from worker_svc.forward import Forward
from worker_svc.sampler import SamplerOutput, SamplingState, sample_tokens
from worker_svc.sequences import Sequence


@dataclass(frozen=True, slots=True)
class CudaGraphOptions:
    """Whether steps of decodes are captured as CUDA graphs, where there is a GPU, and who is told how far that is."""

    enabled: bool = True
    report: Callable[[int, int], None] = lambda captured, of: None


class SampleHandle(Protocol):
    """The draws of a step that was launched, in the order of the sequences that draw."""

    @property
    def placeholder_tokens(self) -> list[int]:
        """What stands for each token in the batch of the next launch, if that comes before the token is known.

        The token itself, or a negative number that means something to the executor alone.
        """

    def is_done(self) -> bool:
        """Whether `result` would return at once. Never raises."""

    def wait(self) -> None:
        """Return when `is_done` is true. Never raises; on any thread."""

    def result(self) -> SamplerOutput:
        """What was drawn; waits for it. Raises what went wrong on the device."""


T = TypeVar("T")


class Executor(Protocol):
    """A model over its cache, and the sampler behind it. For one thread, under `torch.inference_mode`."""

    def launch(self, batch: Batch, sequences: Items[Sequence]) -> SampleHandle:
        """Have a step computed, after those launched before it, and a token drawn for each of `batch.draw_rows`.

        `drawing` are the sequences that these rows are of. `batch.token_ids` may hold stand-ins of the launch before.
        No more than one launch may be unfinished when this is called, and it may return before anything is computed.
        """

    def submit(self, work: Callable[[], T]) -> "Future[T]":
        """Have other work done where steps are computed or enqueued, between those launched before and those after."""


class Sampler(Protocol):
    """What draws."""

    def __call__(self, logits: Tensor, states: Items[SamplingState]) -> SamplerOutput:
        """A token for each row of logits [rows, vocab], which may be changed, as `worker_svc.sampler` says."""


def compute(forward: Forward, sampler: Sampler, batch: Batch, states: Items[SamplingState]) -> SamplerOutput:
    """Compute a step on the host and draw for each of `batch.draw_rows`, as its state says. It takes the token in."""
    logits = forward(batch)
    if not states:
        return SamplerOutput([], [])
    output = sampler(logits, states)
    for state, token in zip(states, output.tokens, strict=True):
        if token is not None:
            state.add(token)
    return output


def run_inline(work: Callable[[], T]) -> "Future[T]":
    """Do the work here. What it gives or raises is the future's, which is done."""
    future: Future[T] = Future()
    try:
        future.set_result(work())
    except BaseException as error:
        future.set_exception(error)
    return future


class HostExecutor:
    """A forward pass that is waited for, and draws by the host: all is done when `launch` returns."""

    def __init__(self, forward: Forward, sampler: Sampler = sample_tokens) -> None:
        self._forward, self._sampler = forward, sampler

    def launch(self, batch: Batch, sequences: Items[Sequence]) -> SampleHandle:
        """As `Executor` has it."""
        return HostSampleHandle(
            compute(self._forward, self._sampler, batch, [sequence.sampling for sequence in sequences])
        )

    def submit(self, work: Callable[[], T]) -> "Future[T]":
        """As `Executor` has it."""
        return run_inline(work)


class HostSampleHandle:
    """Draws that are there."""

    def __init__(self, output: SamplerOutput) -> None:
        self._output = output

    @property
    def placeholder_tokens(self) -> list[int]:
        """The tokens themselves; where none could be drawn, any one."""
        return [0 if token is None else token for token in self._output.tokens]

    def is_done(self) -> bool:
        """Always."""
        return True

    def wait(self) -> None:
        """There is nothing to wait for."""

    def result(self) -> SamplerOutput:
        """What was drawn."""
        return self._output
