"""When a modelled worker is done with what it was sent: one step after the other, and copies before or beside them."""

from dataclasses import dataclass

from benchmarks.simulator.machine import CopyMode, Machine
from scheduler_svc.core.plan import Direction, SwapDone


@dataclass(frozen=True, slots=True)
class StepWork:
    """What a step asks of a device.

    `num_context` is how many tokens its decodes look back on, `num_pairs` the same of each token of its prompts.
    """

    num_prefill_tokens: int = 0
    num_decodes: int = 0
    num_context: int = 0
    num_pairs: int = 0
    num_blocks_out: int = 0
    num_blocks_in: int = 0

    @property
    def num_tokens(self) -> int:
        """Tokens that it computes."""
        return self.num_prefill_tokens + self.num_decodes


@dataclass(frozen=True, slots=True)
class StepCompletion:
    """A step that is done. `at` is when its results are at the scheduler, `seconds` how long it computed.

    `swaps` are those that it tells of; each is all blocks of one step that go one way.
    """

    at: float
    seconds: float
    swaps: tuple[SwapDone, ...]


class Device:
    """One worker's clock. Steps run in the order in which they are sent, one at a time.

    A transfer out waits for the steps sent before it, whose blocks it reads, and each transfer for the one before. It
    is told in the results of the first step, its own or a later one, that ends after it. A step that computes nothing
    waits for all of them.
    """

    def __init__(self, machine: Machine) -> None:
        self.machine = machine
        self.busy_seconds = 0.0
        self._free_at = 0.0  # no step runs from then on
        self._copies_free_at = 0.0
        self._copying: list[tuple[float, SwapDone]] = []  # when it is done, of each that no step has told of

    def run(self, step_id: int, work: StepWork, now: float) -> StepCompletion:
        """Send it a step at `now`, in seconds; when it is done, which no later step changes."""
        machine = self.machine
        begins = max(now + machine.dispatch_seconds, self._free_at)
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
        return StepCompletion(ends + machine.dispatch_seconds, seconds, over)

    def _copy(self, step_id: int, work: StepWork, sent: float, begins: float) -> float:
        """Begin a step's transfers; when the step itself can begin."""
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
