"""Admits waiting sequences to replicas."""

from dataclasses import replace
from functools import partial

from scheduler_svc.core.kv.prefix_cache import Hit
from scheduler_svc.core.planning import indivisible
from scheduler_svc.core.planning.capacity import Capacity
from scheduler_svc.core.planning.preemptor import Preemptor
from scheduler_svc.core.planning.prompt_turns import PromptTurns
from scheduler_svc.core.planning.step_builder import StepBuilder
from scheduler_svc.core.policy.placement import Placement, PlacementOffer
from scheduler_svc.core.policy.waiting import WaitingSequences
from scheduler_svc.core.replica import Replica
from scheduler_svc.core.request import Phase, Sequence
from scheduler_svc.core.totals import Totals

MAX_PREFIX_WAITS = 64  # heads of the queue that wait for another sequence's prefix, that one step looks at


class Admitter:
    """Takes sequences from the head of the queue as long as all their known tokens fit together with what runs."""

    def __init__(
        self,
        waiting: WaitingSequences,
        placement: Placement,
        capacity: Capacity,
        preemptor: Preemptor,
        turns: PromptTurns,
        totals: Totals,
    ) -> None:
        self._waiting = waiting
        self._placement = placement
        self._capacity = capacity
        self._preemptor = preemptor
        self._turns = turns
        self._totals = totals

    def admit(self, step: StepBuilder) -> None:
        """Admits sequences to the step's replica, or to others that are predicted to end them earlier.

        Those that come to this replica are computed in this step, as far as its budget goes.
        """
        self._admit(step)

    def admit_before(self, step: StepBuilder, running: Sequence) -> None:
        """Admits sequences that are computed before a prompt that runs on the step's replica."""
        head = self._waiting.head(step.replica)
        if head is not None and self._turns.goes_before(head, running, step.replica):
            self._admit(step, running)

    def _admit(self, step: StepBuilder, before: Sequence | None = None) -> None:
        if not step.budget or step.is_closed:
            return
        replica = step.replica
        self._placement.measure(replica)
        num_prefix_waits = 0
        while step.budget and not step.is_closed and num_prefix_waits < MAX_PREFIX_WAITS:
            head = self._waiting.head(replica)
            if head is None or not self._may_enter(replica, head):
                return
            if before is not None and not self._turns.goes_before(head, before, replica):
                return
            if head.swapped_kv is not None:
                at = self._resume(replica, head)
            else:
                offer = self._choose(replica, head)
                if offer is not None and offer.pending_prefix is not None:
                    self._waiting.remove(head)
                    self._waiting.wait_for_prefix(*offer.pending_prefix, head)
                    num_prefix_waits += 1
                    continue
                if offer is not None and not self._pays(offer, head):
                    continue  # it is not the head any more
                at = self._enter(offer, head) if offer is not None else None
            if at is not None:
                self._waiting.accounts.note_admitted(head, at.shape, self._waiting.now)
                for sequence in head.unit:
                    num_tokens = self._compute(step, at, sequence)
                    if before is not None and num_tokens:
                        self._turns.charge(replica, sequence, num_tokens)
            elif before is not None or step.scheduled or not self._preemptor.clear_deadlock(replica, head):
                return

    def _may_enter(self, replica: Replica, head: Sequence) -> bool:
        """Whether the head of the queue can be admitted by this replica, if there is room. Else others wait, too."""
        if head.swapped_kv is not None and head.is_leaving:
            return False
        return replica.shape.computes(head.request) and self._capacity.num_missing_slots(replica, head) <= 0

    def _compute(self, step: StepBuilder, at: Replica, sequence: Sequence) -> int:
        """Computes what has just been admitted in this step, if it can be; returns how many tokens of a prompt."""
        num_tokens = 0
        if at is not step.replica:
            self._placement.note_placed(at)
        elif at.shape.is_indivisible(sequence.request):
            indivisible.add_fitting(step)
        elif sequence.phase is Phase.RUNNING and sequence not in at.isolated and step.can_send(sequence):
            num_tokens = step.num_prefill_tokens(sequence)
            if num_tokens:
                step.add(sequence, num_tokens)
        self._placement.note_admitted(at, sequence)
        return num_tokens

    def _resume(self, replica: Replica, sequence: Sequence) -> Replica | None:
        num_needed = self._capacity.num_needed_to_resume(replica, sequence)
        if not self._capacity.has_room(replica, sequence, num_needed):
            return None
        for each in sequence.unit:
            each.stop_waiting(self._waiting.now)
            replica.resume(each)
        return replica

    def _choose(self, replica: Replica, sequence: Sequence) -> PlacementOffer | None:
        num_output = max(1.0, self._waiting.admission.expected_output(sequence.request) - sequence.num_output)
        return self._placement.choose(replica, sequence, num_output, partial(self._offer, sequence))

    def _offer(self, sequence: Sequence, replica: Replica) -> PlacementOffer | None:
        """What a replica has for a queued sequence; None without a free slot, or as many as its search needs."""
        if self._capacity.num_missing_slots(replica, sequence) > 0 or not replica.shape.computes(sequence.request):
            return None
        hit = replica.kv.match(sequence)
        if hit.pending_prefix is not None:
            producer = hit.pending_prefix.producer
            if self._waiting.policy.outranks(sequence, producer, self._waiting.now):  # it has the later turns
                hit = replace(hit, pending_prefix=None, overtaken=producer)
        num_needed = replica.kv.num_needed(sequence, hit)
        has_room = self._capacity.has_room(replica, sequence, num_needed)
        return PlacementOffer(replica, hit, has_room)

    def _pays(self, offer: PlacementOffer, sequence: Sequence) -> bool:
        """Pays for the prompt, unless that is done; False if its account has too few tokens, now that it is known what
        is cached.
        """
        if sequence.charge is None:
            return True
        num_cached = offer.hit.num_full * offer.replica.shape.block_size
        if offer.replica.shape.is_indivisible(sequence.request):
            num_cached = 0
        num_cached = min(num_cached, len(sequence.request.prompt), len(sequence.tokens) - 1)
        return sequence.charge.pay_prompt(num_cached, max(1, sequence.request.max_tokens - sequence.num_output))

    def _enter(self, offer: PlacementOffer, sequence: Sequence) -> Replica:
        replica, hit = offer.replica, offer.hit
        self._waiting.remove(sequence)
        sequence.stop_waiting(self._waiting.now)
        self._waiting.leave_admission(sequence)
        replica.admit(sequence, self._with_partial(replica, sequence, hit))
        if offer.is_isolated:
            replica.isolate(sequence)
        self._count_hit(replica, sequence, hit)
        if sequence.num_cached_prompt_tokens is None:
            sequence.num_cached_prompt_tokens = min(sequence.num_computed, len(sequence.request.prompt))
            self._waiting.policy.charge(sequence, len(sequence.request.prompt) - sequence.num_cached_prompt_tokens)
        return replica

    def _count_hit(self, replica: Replica, sequence: Sequence, hit: Hit) -> None:
        size = replica.shape.block_size
        if not replica.shape.is_indivisible(sequence.request):
            self._totals.cache_queries += len(sequence.tokens)
        self._totals.cache_hits += sequence.num_computed
        num_from_device = len(hit.device_ids) * size
        self._totals.host_hits += min(len(hit.host_ids) * size, max(0, sequence.num_computed - num_from_device))

    def _with_partial(self, replica: Replica, sequence: Sequence, hit: Hit) -> Hit:
        """A hit, with the last block of the prompt if a sibling has it. It is copied, since both write to it."""
        num_prompt, size = len(sequence.request.prompt), replica.shape.block_size
        if sequence.num_output or num_prompt % size == 0 or hit.num_full != num_prompt // size:
            return hit
        if sequence.needs_prompt_logprobs:
            return hit
        for sibling in sequence.siblings:
            if sibling.phase is Phase.RUNNING and sibling.num_committed >= num_prompt and replica.holds(sibling):
                return replace(hit, partial_id=sibling.block_ids[num_prompt // size])
        return hit
