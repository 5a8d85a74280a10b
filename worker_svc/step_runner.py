"""The interfaces by which a service describes a loaded model, and has its steps run."""

from typing import Any, Protocol

from worker_svc.block_hashes import BlockHashTable
from worker_svc.description import WorkerDescription
from worker_svc.device_thread import Launched
from worker_svc.memory_parts import MemoryAccount
from worker_svc.step import Step, StepOutcome


class StepRunner(Protocol):
    """A model and the sequences that it knows. For one thread.

    An error of one sequence is that sequence's failure; the others run.
    """

    @property
    def block_hashes(self) -> BlockHashTable:
        """The hashes of blocks whose contents are known."""

    def reset(self) -> None:
        """Forgets all sequences. No step may be in flight."""

    def launch(self, step: Step) -> Launched:
        """Starts a step; at most one other step may be unfinished. Raises for an internal error or one of the device;
        then every sequence in it has failed, and there is nothing to finish.
        """

    def finish(self, launched: Any) -> StepOutcome:
        """Waits for a launched step. In the order of launches. Raises as `launch` does."""


class StepInstance(Protocol):
    """A loaded, warm model."""

    @property
    def description(self) -> WorkerDescription:
        """What it is, and how much it can hold."""

    @property
    def runner(self) -> StepRunner:
        """For one thread."""

    @property
    def memory(self) -> MemoryAccount:
        """What its memory holds."""

    def close(self) -> None:
        """Ends the threads of the model, and frees it with its cache, whatever else refers to the runner. No step may
        be in flight, and the runner is not used any more.
        """
