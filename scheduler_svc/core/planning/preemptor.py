"""Preempts sequences, and queues again what lost its blocks."""

from dataclasses import replace
from functools import partial

from scheduler_svc.core.policy.preemption import PreemptionPolicy
from scheduler_svc.core.policy.waiting import WaitingSequences
from scheduler_svc.core.replica import Replica
from scheduler_svc.core.request import Phase, PreemptionMethod, PreemptionRecord, Sequence
from scheduler_svc.core.totals import Totals


class Preemptor:
    """Carries out what the preemption policy decides."""

    def __init__(self, policy: PreemptionPolicy, waiting: WaitingSequences, totals: Totals) -> None:
        self._policy = policy
        self._waiting = waiting
        self._totals = totals
        self._preempted: list[Sequence] = []
        self.num_sequences_freed = 0  # sequences whose blocks were freed for others

    def take_preempted(self) -> list[Sequence]:
        """The sequences preempted since the last call."""
        preempted, self._preempted = self._preempted, []
        return preempted

    def make_room(self, replica: Replica, sequence: Sequence, count: int, protected_ids: set[int]) -> None:
        """Preempts others until `count` blocks are or will be available for a sequence, or else the sequence itself."""
        while sequence.phase is Phase.RUNNING and count > replica.kv.num_available + replica.num_pending_free:
            if not self.preempt_victim(replica, protected_ids):
                self.preempt(replica, sequence)

    def take_slot(self, replica: Replica, sequence: Sequence) -> bool:
        """Preempts a running sequence for its slot; what it has computed stays on the device.

        False if a block of it is still the target of a copy.
        """
        costs = self._policy.compare_costs(replica, sequence)
        if not replica.kv.unshared_tail(sequence):  # the prefix cache keeps what it has
            self._record(sequence, replace(costs, method=PreemptionMethod.RECOMPUTE))
        elif replica.kv.keep(sequence):
            self._record(sequence, replace(costs, method=PreemptionMethod.KEEP))
        else:
            return False
        self._leave(replica, sequence)
        return True

    def _pause_unpaid(self, replica: Replica) -> None:
        """Takes the slots of sequences that their account cannot pay for now; what they computed stays on the device.

        One of which a block is still the target of a copy keeps its slot for now.
        """
        for sequence in [s for s in (*replica.running, *replica.isolated) if not s.has_budget and s.wants_step]:
            if sequence.phase is not Phase.RUNNING:
                continue
            is_isolated = sequence in replica.isolated  # it must not come back among those that run together
            if is_isolated or not replica.kv.unshared_tail(sequence) or replica.kv.keep(sequence):
                self._leave(replica, sequence)
                self._totals.pauses += 1

    def release_kept(self, replica: Replica, but: Sequence | None = None) -> bool:
        """Has a sequence without a slot give up the blocks that it kept; False if there is none but this one."""
        kept = [sequence for sequence in replica.kept if sequence is not but]
        if not kept:
            return False
        sequence = max(kept, key=partial(self._policy.preemption_key, replica))
        replica.restore_table(sequence)
        preemption = self._choose(replica, sequence)
        replica.free_table(sequence)
        self._record(sequence, preemption)
        if sequence.swapped_kv is None:
            self._waiting.add(sequence)
        return True

    def preempt_victim(self, replica: Replica, protected_ids: set[int]) -> bool:
        """Has one sequence give up its blocks; False if there is none.

        The last running sequence is preempted only if no sequence is swapped out: swapped KV keeps shared blocks on the
        device, and is dropped before.
        """
        if self.release_kept(replica):
            return True
        victim = self._policy.pick_victim(replica, protected_ids)
        if victim is None or len(replica.running) == 1:
            if replica.swapped:
                self.drop_swapped(replica, replica.swapped[-1])
                return True
            if victim is None:
                return False
        self.preempt(replica, victim)
        return True

    def preempt(self, replica: Replica, victim: Sequence) -> None:
        """Has a running sequence give up its slot and its blocks."""
        self._record(victim, self._choose(replica, victim))
        self._leave(replica, victim)

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
        """Begins to swap a sequence out if that costs less than to recompute it, and the host has room."""
        preemption = self._policy.compare_costs(replica, sequence)
        if preemption.method is PreemptionMethod.SWAP and not replica.kv.swap_out(sequence):
            preemption = replace(preemption, method=PreemptionMethod.RECOMPUTE)
        self.num_sequences_freed += 1
        self._policy.record_method(replica, preemption.method)
        return preemption

    def _record(self, sequence: Sequence, preemption: PreemptionRecord) -> None:
        sequence.num_preemptions += 1
        sequence.last_preemption = preemption
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
            self._waiting.add(sequence)

    def drop_swapped(self, replica: Replica, sequence: Sequence) -> None:
        """Frees the KV of a swapped sequence, and queues it."""
        self.num_sequences_freed += 1
        replica.drop_swapped(sequence)
        self._waiting.add(sequence)

    def recompute(self, replica: Replica, sequence: Sequence) -> None:
        """Queues a sequence that lost its KV, since a copy failed."""
        if sequence.phase is Phase.SWAPPING_IN:
            self._waiting.release_all(sequence)
            replica.leave(sequence, Phase.PREEMPTED)
        self._waiting.add(sequence)

    def drain(self, replica: Replica) -> None:
        """Queues all sequences of a replica for other ones."""
        for sequence in list(replica.swapped):
            self.drop_swapped(replica, sequence)
        for sequence in replica.pending_free.values():
            if sequence.swapped_kv is not None:
                replica.drop_swapped(sequence)
        for sequence in [*replica.running, *replica.indivisible, *replica.isolated]:
            self._leave(replica, sequence)

    def clear_deadlock(self, replica: Replica, head: Sequence) -> bool:
        """Makes room for the head of the queue if nothing else will; False if something can still be planned.

        What may be in its way: device blocks that swapped sequences keep, and beams that wait for beams in the queue.
        A swapped beam may need more blocks than its siblings leave; recomputed it shares theirs.
        """
        if (
            replica.steps_in_flight
            or replica.num_pending_free
            or replica.indivisible
            or any(s.is_plannable for s in (*replica.running, *replica.isolated))
        ):
            return False
        if others := [s for s in replica.swapped if s is not head]:
            self.drop_swapped(replica, others[-1])
        elif beams := [s for s in replica.running if s.request.beam is not None and s.request is not head.request]:
            self.preempt(replica, beams[-1])
        elif head.swapped_kv is not None and head.request.beam is not None:
            self.drop_swapped(replica, head)
        else:
            return False
        return True
