"""Runs suspected sequences in steps of their own, so that a lost worker shows which request crashes workers.

Isolated steps and the steps of all others alternate on a replica, so that a suspected sequence delays nobody by more
than a step at a time. See `policy/poison.py`.
"""

from collections.abc import Iterable
from weakref import WeakSet

from scheduler_svc.core.planning.preemptor import Preemptor
from scheduler_svc.core.planning.step_builder import StepBuilder
from scheduler_svc.core.policy.poison import IsolatingQueue, PoisonTracker
from scheduler_svc.core.replica import Replica
from scheduler_svc.core.request import Phase, Sequence
from scheduler_svc.core.step import StepPlan


class IsolatedRuns:
    """Decides whose step is next on each replica, and makes the isolated ones."""

    def __init__(self, poison: PoisonTracker, waiting: IsolatingQueue, preemptor: Preemptor) -> None:
        self._poison = poison
        self._waiting = waiting
        self._preemptor = preemptor
        self._ran_isolated: WeakSet[Replica] = WeakSet()  # whose last step was an isolated one

    # Steps.

    def must_wait(self, replica: Replica) -> bool:
        """Whether the next step must wait for those in flight, because one of them or the next one is isolated."""
        if not self._poison.has_suspected or not replica.steps_in_flight:
            return False
        return replica in self._ran_isolated or self.is_due(replica)

    def is_due(self, replica: Replica) -> bool:
        """Whether the next step is an isolated one."""
        if not self._poison.has_suspected or replica in self._ran_isolated:
            return False
        return _next(replica) is not None

    def add_next(self, step: StepBuilder) -> None:
        """Computes the next suspected sequence, or makes room for it. Does nothing while steps are in flight."""
        replica = step.replica
        sequence = _next(replica) if replica.isolated and not replica.steps_in_flight else None
        if sequence is None:
            return
        if replica.shape.is_indivisible(sequence.request):
            step.add_indivisible(sequence)
            return
        num_tokens = min(sequence.num_uncomputed, step.budget)
        num_missing = replica.kv.num_missing_blocks(sequence, num_tokens)
        if num_missing > replica.kv.num_available:
            self._preemptor.make_room(replica, sequence, num_missing, {sequence.id})
        if sequence.phase is Phase.RUNNING and num_missing <= replica.kv.num_available:
            step.add(sequence, num_tokens)

    def note_step(self, replica: Replica, plan: StepPlan) -> None:
        """A replica was given a step."""
        if not self._poison.has_suspected:
            if self._ran_isolated:
                self._ran_isolated.clear()
        elif plan.scheduled and plan.scheduled[0].sequence in replica.isolated:
            self._ran_isolated.add(replica)
        else:
            self._ran_isolated.discard(replica)

    # Suspicion.

    def record_loss(self, sequences: Iterable[Sequence], replicas: Iterable[Replica]) -> str | None:
        """A replica was lost whose steps in flight named these live sequences. Returns the key of the request that
        fails, if any.

        `replicas` are the others. What runs there and is suspected now is isolated; what is swapped there is queued.
        """
        failed_key = self._poison.record_loss(sequences)
        for replica in replicas if self._poison.has_suspected else ():
            is_suspected = self._poison.is_suspected
            for sequence in [s for s in (*replica.running, *replica.indivisible) if is_suspected(s)]:
                replica.isolate(sequence)
            for sequence in [s for s in (*replica.swapped, *replica.pending_free.values()) if is_suspected(s)]:
                if sequence.swapped_kv is not None:
                    self._preemptor.requeue(replica, sequence)
        return failed_key

    def isolate_queued(self, sequences: Iterable[Sequence]) -> None:
        """Sets sequences apart that are queued and suspected."""
        self._waiting.isolate(sequences)

    def clear(self, sequence: Sequence, replica: Replica | None) -> None:
        """A sequence has another token on a replica, or has ended (None)."""
        if not self._poison.has_losses:
            return
        self._poison.clear(sequence)
        for each in sequence.unit if replica is not None else ():
            if replica is not None and each in replica.isolated:
                replica.end_isolation(each)


def _next(replica: Replica) -> Sequence | None:
    """The first isolated sequence that can be planned."""
    return next((s for s in replica.isolated if s.phase is Phase.RUNNING and s.is_plannable), None)
