"""The clock of a modelled worker: steps run one after the other, copies before or beside them."""

from dataclasses import dataclass

from benchmarks.simulator.machine import CopyMode, Machine
from scheduler_svc.core.step import Direction, SwapDone


@dataclass(frozen=True, slots=True)
class StepWork:
    """The work of a step.

    `num_context` is the number of context tokens of its decodes, `num_pairs` the sum over tokens of its prompts.
    """

    num_prefill_tokens: int = 0
    num_decodes: int = 0
    num_context: int = 0
    num_pairs: int = 0
    num_blocks_out: int = 0
    num_blocks_in: int = 0

    @property
    def num_tokens(self) -> int:
        return self.num_prefill_tokens + self.num_decodes


@dataclass(frozen=True, slots=True)
class StepCompletion:
    """A finished step. `at` is when its results are at the scheduler, `seconds` how long it computed, and
    `idle_seconds` how long the device had no step before it.

    `swaps` are those that it confirms; each is all blocks of one step in one direction.
    """

    at: float
    seconds: float
    swaps: tuple[SwapDone, ...]
    idle_seconds: float


class Device:
    """One worker. Steps run in the order in which they are sent, one at a time.

    A transfer out waits for the steps sent before it, whose blocks it reads, and each transfer for the one before. It
    is confirmed in the results of the first step that ends after it. A step that computes nothing waits for all
    transfers.
    """

    def __init__(self, machine: Machine) -> None:
        self.machine = machine
        self.busy_seconds = 0.0
        self._free_at = 0.0  # when the last step ends
        self._copies_free_at = 0.0
        self._copying: list[tuple[float, SwapDone]] = []  # ends of transfers that no step has confirmed

    def run(self, step_id: int, work: StepWork, now: float) -> StepCompletion:
        """Sends it a step at `now`, in seconds, and returns the step's completion, which is final."""
        machine = self.machine
        begins = max(now + machine.dispatch_seconds, self._free_at)
        idle_seconds = begins - self._free_at
        seconds = (
            machine.compute_seconds(work.num_tokens)
            + machine.context_seconds * work.num_context
            + machine.pair_seconds * work.num_pairs
        )
        if work.num_blocks_out or work.num_blocks_in:
            begins = self._copy(step_id, work, now + machine.dispatch_seconds, begins)
        ends = begins + seconds
        if not work.num_tokens:
            ends = max([ends, *(at for at, _ in self._copying)])
        over = tuple(transfer for at, transfer in self._copying if at <= ends)
        if over:
            self._copying = [(at, transfer) for at, transfer in self._copying if at > ends]
        self._free_at = ends
        self.busy_seconds += seconds
        return StepCompletion(ends + machine.dispatch_seconds, seconds, over, idle_seconds)

    def _copy(self, step_id: int, work: StepWork, sent: float, begins: float) -> float:
        """Starts a step's transfers, and returns when the step itself can start."""
        at = begins if self.machine.copies is CopyMode.BEFORE_THE_STEP else max(sent, self._copies_free_at)
        for direction, num_blocks in ((Direction.OUT, work.num_blocks_out), (Direction.IN, work.num_blocks_in)):
            if num_blocks:
                if direction is Direction.OUT:
                    at = max(at, self._free_at)
                seconds = self.machine.copy_seconds(num_blocks)
                at += seconds
                self._copying.append((at, SwapDone(step_id, direction, seconds)))
        self._copies_free_at = at
        return at if self.machine.copies is CopyMode.BEFORE_THE_STEP else begins
