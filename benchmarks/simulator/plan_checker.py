"""Tracks the content of every block of a modelled worker, and rejects plans that read or write a wrong one."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from benchmarks.simulator.device import StepCompletion
from benchmarks.simulator.driver import Replica, SimulatedStep
from benchmarks.simulator.prompts import Token
from benchmarks.simulator.simulation import Simulation
from scheduler_svc.core.step import Direction, ScheduledSequence, StepPlan, SwapDone


class InvalidPlan(Exception):  # noqa: N818
    """A plan that a worker could not execute correctly."""


@dataclass(slots=True)
class _WorkerSequence:
    """A sequence at the worker: its tokens, a hash of each with all before it, and its block table."""

    tokens: list[int]
    chain: list[int]
    block_ids: list[int] = field(default_factory=list)

    def append(self, token: int) -> None:
        self.tokens.append(token)
        self.chain.append(hash((self.chain[-1] if self.chain else 0, token)))


class PlanChecker:
    """One worker's memory, slot by slot.

    A copy may happen at any time from its step until it is confirmed. Until then its source must not be written, and
    its destination neither read nor written.
    """

    def __init__(self, block_size: int) -> None:
        self._block_size = block_size
        self._sequences: dict[int, _WorkerSequence] = {}
        self._device: dict[int, list[int | None]] = {}
        self._host: dict[int, list[int | None]] = {}
        self._read_by_copies: dict[tuple[int, Direction], list[int]] = {}  # device blocks, by transfer out
        self._written_by_copies: dict[tuple[int, Direction], list[int]] = {}  # device blocks, by transfer in

    def apply(self, plan: StepPlan, drawn: Sequence[Token]) -> None:
        """Executes a plan whose sequences sample `drawn`. Raises InvalidPlan."""
        for sequence_id in plan.finished_ids:
            del self._sequences[sequence_id]
        self._begin_copies(plan)
        for copy in plan.copies:
            self._check_unlocked(copy.source, self._written_by_copies, "copies from")
            self._device[copy.destination] = list(self._slots(copy.source))
        for change in plan.block_table_updates:
            table = self._sequences[change.sequence_id].block_ids
            if self._slots(table[change.index]) != self._slots(change.block_id):
                raise InvalidPlan(f"block {change.block_id} does not hold what block {table[change.index]} does")
            table[change.index] = change.block_id
        for new in plan.new_sequences:
            self._sequences[new.sequence.id] = worker_sequence = _WorkerSequence([], [])
            for token in new.tokens:
                worker_sequence.append(token)
        for part in plan.scheduled:
            self._write(part)
        for part in plan.scheduled:
            self._read(part)
        for part, result in zip(plan.scheduled, drawn, strict=True):
            if part.samples:
                self._sequences[part.sequence.id].append(result.token_ids[0])

    def confirm(self, swaps: Iterable[SwapDone]) -> None:
        for done in swaps:
            self._read_by_copies.pop((done.step_id, done.direction), None)
            self._written_by_copies.pop((done.step_id, done.direction), None)

    def _begin_copies(self, plan: StepPlan) -> None:
        for pair in plan.swap_out:
            self._host[pair.host] = list(self._slots(pair.device))
        if plan.swap_out:
            self._read_by_copies[plan.step_id, Direction.OUT] = [pair.device for pair in plan.swap_out]
        for pair in plan.swap_in:
            if pair.host not in self._host:
                raise InvalidPlan(f"host block {pair.host} holds nothing")
            self._check_unlocked(pair.device, self._read_by_copies, "copies over")
            self._device[pair.device] = list(self._host[pair.host])
        if plan.swap_in:
            self._written_by_copies[plan.step_id, Direction.IN] = [pair.device for pair in plan.swap_in]

    def _write(self, part: ScheduledSequence) -> None:
        worker_sequence = self._sequences[part.sequence.id]
        worker_sequence.block_ids += part.new_block_ids
        end = part.start + part.num_tokens
        if end > len(worker_sequence.chain):
            raise InvalidPlan(f"sequence {part.sequence.id} has {len(worker_sequence.chain)} tokens, not {end}")
        for place in range(max(part.start, part.num_cached_tokens), end):
            block_id = worker_sequence.block_ids[place // self._block_size]
            self._check_unlocked(block_id, self._read_by_copies, "writes")
            self._check_unlocked(block_id, self._written_by_copies, "writes")
            self._slots(block_id)[place % self._block_size] = worker_sequence.chain[place]

    def _read(self, part: ScheduledSequence) -> None:
        worker_sequence = self._sequences[part.sequence.id]
        end = part.start + part.num_tokens
        for block, block_id in enumerate(worker_sequence.block_ids):
            first = block * self._block_size
            wanted = worker_sequence.chain[first : min(end, first + self._block_size)]
            self._check_unlocked(block_id, self._written_by_copies, "reads")
            if self._slots(block_id)[: len(wanted)] != wanted:
                raise InvalidPlan(f"block {block_id} is not what sequence {part.sequence.id} has from token {first} on")

    def _check_unlocked(self, block_id: int, copies: dict[tuple[int, Direction], list[int]], what: str) -> None:
        for (step_id, _), block_ids in copies.items():
            if block_id in block_ids:
                raise InvalidPlan(f"the plan {what} block {block_id}, which a copy of step {step_id} is not done with")

    def _slots(self, block_id: int) -> list[int | None]:
        return self._device.setdefault(block_id, [None] * self._block_size)


def check_plans(simulation: Simulation) -> None:
    """Checks all plans of a simulation, and its replicas' integrity after each step."""
    checkers = {id(replica): PlanChecker(replica.shape.block_size) for replica in simulation.driver.replicas}

    def scheduled(replica: Replica, step: SimulatedStep) -> None:
        checkers[id(replica)].apply(step.plan, step.results)

    def committed(replica: Replica, done: StepCompletion) -> None:
        checkers[id(replica)].confirm(done.swaps)
        replica.check_integrity()

    simulation.after_schedule, simulation.after_commit = scheduled, committed
