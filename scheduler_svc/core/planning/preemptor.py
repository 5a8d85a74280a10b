"""Preempts sequences, and queues again what lost its blocks. All beams of a search are preempted together.

A search whose blocks are freed is queued as the sequence of one beam; the others end, and are forked from it later.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from functools import partial
from itertools import chain

from scheduler_svc.core.beam_search import BeamGroup
from scheduler_svc.core.policy.preemption import PreemptionPolicy
from scheduler_svc.core.policy.waiting import WaitingSequences
from scheduler_svc.core.replica import Replica
from scheduler_svc.core.request import Phase, PreemptionMethod, PreemptionRecord, Sequence
from scheduler_svc.core.totals import Totals


class Preemptor:
    """Carries out what the preemption policy decides."""

    def __init__(
        self,
        policy: PreemptionPolicy,
        waiting: WaitingSequences,
        searches: Mapping[str, BeamGroup],
        totals: Totals,
    ) -> None:
        """`searches` are the live ones, by the key of their request."""
        self._policy = policy
        self._searches = searches
        self._waiting = waiting
        self._totals = totals
        self._preempted: list[Sequence] = []
        self.num_sequences_freed = 0  # sequences whose blocks were freed for others

    def take_preempted(self) -> list[Sequence]:
        """The sequences preempted since the last call."""
        preempted, self._preempted = self._preempted, []
        return preempted

    def make_room(self, replica: Replica, sequence: Sequence, count: int, protected_ids: set[int]) -> None:
        """Preempts others until `count` blocks are or will be available for a sequence, or else the sequence itself.

        None with an id in `protected_ids`. A beam waits if another one of its search is.
        """
        while sequence.phase is Phase.RUNNING and count > replica.kv.num_available + replica.num_pending_free:
            if not self.preempt_victim(replica, protected_ids):
                if any(beam.id in protected_ids for beam in sequence.unit if beam is not sequence):
                    return
                self.preempt(replica, sequence)

    def take_slot(self, replica: Replica, sequence: Sequence) -> bool:
        """Preempts a running sequence, or its search, for its slots; what it has computed stays on the device.

        False if a block of it is still the target of a copy.
        """
        costs = self._policy.compare_costs(replica, sequence)
        if sequence.request.beam is None and not replica.kv.unshared_tail(sequence):  # the prefix cache keeps it
            self._record(sequence, replace(costs, method=PreemptionMethod.RECOMPUTE))
        elif replica.kv.keep(sequence.unit):
            self._record(sequence, replace(costs, method=PreemptionMethod.KEEP))
        else:
            return False
        for each in list(sequence.unit):
            self._leave(replica, each)
        return True

    def _pause_unpaid(self, replica: Replica) -> None:
        """Takes the slots of sequences that their account cannot pay for now; what they computed stays on the device.

        One of which a block is still the target of a copy keeps its slot for now.
        """
        for sequence in [s for s in (*replica.running, *replica.isolated) if not s.has_budget and s.wants_step]:
            if sequence.phase is not Phase.RUNNING:
                continue
            is_isolated = sequence in replica.isolated  # it must not come back among those that run together
            if is_isolated or not replica.kv.unshared_tail(sequence) or replica.kv.keep([sequence]):
                self._leave(replica, sequence)
                self._totals.pauses += 1

    def release_kept(self, replica: Replica, but: Sequence | None = None) -> bool:
        """Has a sequence without a slot, or a search, give up the blocks that it kept; False if there is none but this
        one.
        """
        kept = [s for s in replica.kept if (but is None or s not in but.unit) and not s.is_leaving]
        if not kept:
            return False
        sequence = max(kept, key=partial(self._policy.preemption_key, replica))
        for each in sequence.unit:
            replica.restore_table(each)
        preemption = self._choose(replica, sequence)
        for each in sequence.unit:
            replica.free_table(each)
        self._record(sequence, preemption)
        if sequence.swapped_kv is None:
            self.requeue(replica, sequence)
        return True

    def preempt_victim(self, replica: Replica, protected_ids: set[int]) -> bool:
        """Has one sequence, or one search, give up its blocks; False if there is none.

        The last one that runs is preempted only if no sequence is swapped out: swapped KV keeps shared blocks on the
        device, and is dropped before.
        """
        if self.release_kept(replica):
            return True
        victim = self._policy.pick_victim(replica, protected_ids)
        if victim is None or len(replica.running) == len(victim.unit):
            if replica.swapped:
                self.requeue(replica, replica.swapped[-1])
                return True
            if victim is None:
                return False
        self.preempt(replica, victim)
        return True

    def preempt_newest(self, replica: Replica) -> bool:
        """Preempts the sequence, or the search, that was admitted last, if another one runs; whether it did.

        Not the one that the policy names: of those that were admitted earlier, each would lose more.
        """
        units = [s for s in replica.running if s.is_unit_running and s is s.unit[0]]
        newest = min(units, key=lambda s: (s.num_steps, -s.arrival), default=None)
        if newest is None or len(replica.running) == len(newest.unit):
            return False
        self.preempt(replica, newest)
        return True

    def preempt(self, replica: Replica, victim: Sequence) -> None:
        """Has a running sequence, or its search, give up its slots and its blocks."""
        self._record(victim, self._choose(replica, victim))
        if victim.swapped_kv is None:
            self.requeue(replica, victim)
            return
        for each in list(victim.unit):
            self._leave(replica, each)

    def limit_accounts(self, replica: Replica) -> bool:
        """Preempts sequences of accounts that use too many blocks, or have no tokens left.

        Returns whether it queued some that were held back.
        """
        if self._waiting.accounts.has_limits:
            self._pause_unpaid(replica)
        accounts = self._waiting.accounts
        accounts.measure()
        for sequence in accounts.take_excess(replica):
            # It is not swapped: it may wait long for its own account, and others need the host's memory.
            costs = self._policy.compare_costs(replica, sequence)
            self._record(sequence, replace(costs, method=PreemptionMethod.RECOMPUTE))
            self.num_sequences_freed += 1
            self._leave(replica, sequence)
        return accounts.release(self._waiting.now)

    def _choose(self, replica: Replica, sequence: Sequence) -> PreemptionRecord:
        """Begins to swap a sequence or search out if that costs less than to recompute it, and the host has room."""
        preemption = self._policy.compare_costs(replica, sequence)
        if preemption.method is PreemptionMethod.SWAP and not _swap_out(replica, sequence.unit):
            preemption = replace(preemption, method=PreemptionMethod.RECOMPUTE)
        self.num_sequences_freed += 1
        self._policy.record_method(replica, preemption.method)
        return preemption

    def _record(self, sequence: Sequence, preemption: PreemptionRecord) -> None:
        for each in sequence.unit:
            each.num_preemptions += 1
            each.last_preemption = preemption
        self._preempted.append(sequence)
        self._totals.preemptions += 1
        self._totals.swaps += preemption.method is PreemptionMethod.SWAP
        self._totals.keeps += preemption.method is PreemptionMethod.KEEP

    def _leave(self, replica: Replica, sequence: Sequence) -> None:
        self._waiting.release_all(sequence)
        replica.leave(sequence, Phase.PREEMPTED)
        if not sequence.num_steps_in_flight:
            self.finish(replica, sequence)

    def finish(self, replica: Replica, sequence: Sequence) -> None:
        """No step names a preempted sequence any more: it waits on the replica if it is swapped, else in the queue."""
        if sequence.swapped_kv is not None:
            if sequence.can_pay:  # a pause does not count as waiting
                sequence.start_waiting(self._waiting.now)
            replica.keep_swapped(sequence)
        else:
            self.requeue(replica, sequence)

    def requeue(self, replica: Replica, sequence: Sequence) -> None:
        """Frees the KV of a sequence that is on a replica, or of its search, and queues it.

        One that steps in flight name is queued when they are done.
        """
        self.num_sequences_freed += 1
        sequence = self._collapse(sequence, replica.end)
        if sequence.phase in (Phase.RUNNING, Phase.SWAPPING_IN):
            self._leave(replica, sequence)
        elif sequence.swapped_kv is not None:
            replica.drop_swapped(sequence)
        if sequence.phase in (Phase.SWAPPED, Phase.PREEMPTED) and sequence.id not in replica.pending_free:
            self._waiting.add(sequence)

    def requeue_all(self, replica: Replica) -> None:
        """Queues all sequences of a replica for other ones."""
        running = (replica.running, replica.indivisible, replica.isolated)
        for sequence in list(chain(replica.swapped, replica.pending_free.values(), *running)):
            if sequence.phase not in (Phase.QUEUED, Phase.ENDED):
                self.requeue(replica, sequence)

    def requeue_lost(self, sequences: Iterable[Sequence]) -> None:
        """Queues the sequences of a lost replica."""
        for sequence in sequences:
            if sequence.phase not in (Phase.QUEUED, Phase.ENDED):
                queued = self._collapse(sequence, lambda beam: beam.set_phase(Phase.ENDED))
                self._waiting.add(queued)
                self._waiting.release_all(queued)

    def _collapse(self, sequence: Sequence, end: Callable[[Sequence], None]) -> Sequence:
        """The sequence to be queued for this one: that of one beam, if it is of a search. The other beams end."""
        if sequence.request.beam is None:
            return sequence
        leader = self._searches[sequence.request.key].collapse()
        for beam in [beam for beam in leader.siblings if beam is not leader]:
            self._waiting.release_all(beam)
            end(beam)
            leader.siblings.remove(beam)
        return leader

    def clear_deadlock(self, replica: Replica, head: Sequence) -> bool:
        """Makes room for the head of the queue if nothing else will; False if something can still be planned.

        What may be in its way: device blocks that swapped sequences keep.
        """
        if (
            replica.steps_in_flight
            or replica.num_pending_free
            or replica.indivisible
            or any(s.is_plannable for s in (*replica.running, *replica.isolated))
        ):
            return False
        others = [s for s in replica.swapped if s not in head.unit]
        if others:
            self.requeue(replica, others[-1])
        return bool(others)


def _swap_out(replica: Replica, sequences: list[Sequence]) -> bool:
    """Begins to swap sequences out; False if not all of them can be, and none is."""
    if any(sequence.phase is Phase.SWAPPING_IN for sequence in sequences):
        return False
    for number, sequence in enumerate(sequences):
        if not replica.kv.swap_out(sequence):
            for other in sequences[:number]:
                replica.kv.drop_swapped(other)
            return False
    return True
