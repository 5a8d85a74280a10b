"""Makes steps: who computes how much, who comes in, and who gives way."""

from dataclasses import replace
from functools import partial

from scheduler_svc.core.explain import PreemptionMethod
from scheduler_svc.core.limits import SchedulerLimits, Totals
from scheduler_svc.core.placement import Placement, PlacementOffer
from scheduler_svc.core.plan import NewSequence, ScheduledSequence, StepPlan
from scheduler_svc.core.preemption import PreemptionPolicy
from scheduler_svc.core.replica import Hit, Replica
from scheduler_svc.core.sequence import Phase, Sequence
from scheduler_svc.core.step_builder import StepBuilder
from scheduler_svc.core.waiting import WaitingSequences

STOP_STRING_LEAD = 64  # tokens that a sequence with stop strings may run ahead of the gateway's search
MAX_STEPS_IN_FLIGHT = 2  # steps in flight per replica: one runs while the next is made
MAX_PREFIX_WAITS = 64  # who come first and wait for another one's prefix, that one step looks at


class Planner:
    """The rule by which steps are made."""

    def __init__(
        self, limits: SchedulerLimits, totals: Totals, waiting: WaitingSequences, placement: Placement
    ) -> None:
        self._limits = limits
        self._totals = totals
        self._waiting = waiting
        self._placement = placement
        self._preemption = PreemptionPolicy(waiting.policy, limits.preemption)
        self._preempted: list[Sequence] = []  # since the last step, to be told of
        self.now = 0.0  # as the driver said last

    def schedule(self, replica: Replica, now: float) -> StepPlan | None:
        """Make the replica's next step; None where there is nothing to do, or DEPTH steps are in flight.

        There is no prefill and no decode: each sequence has known tokens, and a step computes some of those that are
        not computed yet, within the budgets of tokens, sequences and blocks. Those with one token to compute go first:
        they wait for nobody's prompt. What room is left admits those who wait.

        While there are suspects, which are tried alone, their steps and those of the others take turns.
        """
        self.now = now
        if len(replica.in_flight) == MAX_STEPS_IN_FLIGHT:
            return None
        if not self._waiting.quarantine.has_suspected:
            return self._build(replica)
        return self._build_alternating(replica)

    def _build(self, replica: Replica) -> StepPlan | None:
        """A step of those who are not tried alone, and who comes in."""
        step = StepBuilder(min(self._limits.max_step_tokens, replica.shape.max_step_tokens), replica.costs)
        decodes, is_short = self._pick_decodes(replica)
        if len(decodes) > step.budget:
            decodes.sort(key=lambda sequence: sequence.num_steps)  # they take turns
        for sequence in decodes[: step.budget]:
            self._plan(replica, step, sequence, 1)
        if step.scheduled:
            step.long_prompt_seconds = (self._limits.gap_factor - 1) * replica.costs.step_seconds(
                0, len(step.scheduled)
            )
        prompts = self._not_suspected([s for s in replica.running if s.is_prefill]) if not is_short else []
        for sequence in prompts:
            if step.budget == 0:
                break
            if not sequence.is_plannable(STOP_STRING_LEAD):
                continue
            num_tokens = step.num_prefill_tokens(sequence)
            if num_tokens == 0:
                continue
            num_missing = replica.num_missing_blocks(sequence, num_tokens)
            if num_missing > replica.device.pool.num_available:
                is_short = True  # those behind it take no block before it has its own
                self._ensure_blocks(replica, sequence, num_missing, {part.sequence.id for part in step.scheduled})
                break
            self._plan(replica, step, sequence, num_tokens)
        if step.budget and not is_short:
            self._admit(replica, step)
        return self._send(replica, step)

    def _send(self, replica: Replica, step: StepBuilder) -> StepPlan | None:
        if step.scheduled and self._wants_backups(replica):
            replica.back_up()
        awaits_copies = len(replica.swaps) > 0 and not replica.in_flight
        if not step.scheduled and not replica.has_pending_updates and not awaits_copies:
            return None
        # Those who share a prefix stand side by side, for the sake of caches that hold its keys and values.
        step.scheduled.sort(key=_first_block)
        replica.num_steps += 1
        plan = StepPlan(replica.num_steps, replica.finished_ids, step.new_sequences, step.scheduled)
        plan.preempted.extend(self._preempted)
        self._preempted.clear()
        replica.start_step(plan)
        self._count_slots(replica)
        return plan

    # Who is tried alone.

    def _build_alternating(self, replica: Replica) -> StepPlan | None:
        """A step where there are suspects: of one of them, beside which nothing is in flight, or of the others."""
        quarantine = self._waiting.quarantine
        if replica.in_flight and not quarantine.may_run_isolated(replica):
            return None  # what is in flight is a suspect's
        if quarantine.may_run_isolated(replica) and (suspected := self._next_suspected(replica)) is not None:
            return None if replica.in_flight else self._build_isolated(replica, suspected)
        plan = self._build(replica)
        if plan is not None:
            quarantine.note_step(replica, is_isolated=False)
        elif not replica.in_flight and (suspected := self._next_suspected(replica)) is not None:
            plan = self._build_isolated(replica, suspected)
        return plan

    def _next_suspected(self, replica: Replica) -> Sequence | None:
        """Who of the suspects that run on a replica is tried next: the first that can go on."""
        is_suspected = self._waiting.quarantine.is_suspected
        ready = (s for s in replica.running if s.phase is Phase.RUNNING and is_suspected(s))
        return next((s for s in ready if s.is_plannable(STOP_STRING_LEAD)), None)

    def _build_isolated(self, replica: Replica, suspected: Sequence) -> StepPlan | None:
        """A step of a suspect alone, or what makes room for it."""
        step = StepBuilder(min(self._limits.max_step_tokens, replica.shape.max_step_tokens), replica.costs)
        num_tokens = min(suspected.num_uncomputed, step.budget)
        num_missing = replica.num_missing_blocks(suspected, num_tokens)
        if num_missing > replica.device.pool.num_available:
            self._ensure_blocks(replica, suspected, num_missing, {suspected.id})
        can_go_on = suspected.phase is Phase.RUNNING and num_missing <= replica.device.pool.num_available
        if can_go_on:
            self._plan(replica, step, suspected, num_tokens)
        self._waiting.quarantine.note_step(replica, is_isolated=can_go_on)
        return self._send(replica, step)

    def _not_suspected(self, sequences: list[Sequence]) -> list[Sequence]:
        quarantine = self._waiting.quarantine
        return [s for s in sequences if not quarantine.is_suspected(s)] if quarantine.has_suspected else sequences

    # Who runs.

    def _plan(self, replica: Replica, step: StepBuilder, sequence: Sequence, num_tokens: int) -> None:
        """Add a sequence to a step."""
        start = sequence.num_computed
        num_missing = replica.num_missing_blocks(sequence, num_tokens)
        if num_missing > 0:
            replica.allocate(sequence, num_missing)
        samples = start + num_tokens == sequence.num_known
        num_extra = 0
        if samples and replica.shape.max_new_tokens > 1:
            num_extra = replica.num_extra_tokens(sequence, num_tokens)
            sequence.num_extra += num_extra
        sequence.num_computed += num_tokens
        sequence.num_promised += samples
        sequence.num_in_flight += 1
        sequence.num_steps += 1
        if sequence.num_sent_blocks is None:
            step.new_sequences.append(NewSequence(sequence, list(sequence.tokens)))
        new_block_ids = sequence.block_ids[sequence.num_sent_blocks or 0 :]
        sequence.num_sent_blocks = len(sequence.block_ids)
        num_cached_tokens = max(start, sequence.num_stored)
        step.scheduled.append(
            ScheduledSequence(sequence, start, num_tokens, new_block_ids, num_cached_tokens, samples, num_extra)
        )
        step.budget -= num_tokens
        self._totals.computed_tokens += num_tokens

    def _pick_decodes(self, replica: Replica) -> tuple[list[Sequence], bool]:
        """Who decodes in this step, and whether they are short of blocks. Who has to give way for them, does.

        Those who are swapped begin to leave while there are still some blocks: nobody waits for their copies.
        """
        decodes = self._not_suspected([s for s in replica.running if s.is_decode and s.is_plannable(STOP_STRING_LEAD)])
        pool = replica.device.pool
        need = sum(map(replica.needs_block, decodes))
        low = self._preemption.low_watermark(replica, len(decodes))
        if need + low <= pool.num_available:
            return decodes, False
        has_begun = False
        while (spare := pool.num_available + replica.num_pending_free - need) < low:
            if spare >= 0 and (has_begun or not self._preemption.should_swap_early(replica)):
                break
            has_begun = True
            if not self._preempt_victim(replica, protected_ids=set()):
                break
            decodes = [s for s in decodes if s.phase is Phase.RUNNING]
            need = sum(map(replica.needs_block, decodes))
        if need <= pool.num_available:
            return decodes, False
        # Enough is on its way. Those who need a block before that is there wait.
        room = pool.num_available
        able = []
        for sequence in decodes:
            needs_block = replica.needs_block(sequence)
            if not needs_block or room:
                room -= needs_block
                able.append(sequence)
        return able, True

    def _ensure_blocks(self, replica: Replica, sequence: Sequence, count: int, protected_ids: set[int]) -> None:
        """See that `count` blocks will be available for a sequence, or that it gives way itself."""
        while sequence.phase is Phase.RUNNING and count > replica.device.pool.num_available + replica.num_pending_free:
            if not self._preempt_victim(replica, protected_ids):
                self._preempt(replica, sequence)

    def _preempt_victim(self, replica: Replica, protected_ids: set[int]) -> bool:
        """Have somebody give up blocks; False where nobody can.

        The last one that runs does not give way as long as there are images, which hold blocks that nobody else needs.
        """
        victim = self._preemption.pick_victim(replica, protected_ids)
        if victim is None or len(replica.running) == 1:
            if replica.swapped:
                self._drop_swapped(replica, replica.swapped[-1])
                return True
            if victim is None:
                return False
        self._preempt(replica, victim)
        return True

    def _preempt(self, replica: Replica, victim: Sequence) -> None:
        preemption = self._preemption.compare_costs(replica, victim)
        if preemption.choice is PreemptionMethod.SWAP and not replica.swap_out(victim):
            preemption = replace(preemption, choice=PreemptionMethod.RECOMPUTE)
        victim.num_preemptions += 1
        victim.last_preemption = preemption
        self._preempted.append(victim)
        self._preemption.record_choice(replica, preemption.choice)
        self._totals.preemptions += 1
        self._totals.swaps += preemption.choice is PreemptionMethod.SWAP
        self._waiting.release_all(victim, self.now)
        replica.leave(victim, Phase.PREEMPTED)
        if not victim.num_in_flight:
            self.finish_preemption(replica, victim)

    def requeue(self, sequence: Sequence) -> None:
        """A sequence has lost its blocks: it waits for any replica, with all its tokens."""
        sequence.replica = None
        self._waiting.add(sequence, self.now)

    def finish_preemption(self, replica: Replica, sequence: Sequence) -> None:
        """A preempted sequence is named by no step any more: it waits here with its image, or in the queue."""
        if sequence.swapped_kv is not None:
            replica.keep_swapped(sequence)
        else:
            self.requeue(sequence)

    def recompute(self, replica: Replica, sequence: Sequence) -> None:
        """A copy that a sequence needed has failed."""
        if sequence.phase is Phase.SWAPPING_IN:
            self._waiting.release_all(sequence, self.now)
            replica.leave(sequence, Phase.PREEMPTED)
        self.requeue(sequence)

    def drain(self, replica: Replica) -> None:
        """Have all sequences leave a replica, and wait for another one."""
        for sequence in list(replica.swapped):
            self._drop_swapped(replica, sequence)
        for sequence in replica.pending_free.values():
            if sequence.swapped_kv is not None:
                replica.drop_swapped(sequence)
        for sequence in list(replica.running):
            self._waiting.release_all(sequence, self.now)
            replica.leave(sequence, Phase.PREEMPTED)
            if not sequence.num_in_flight:
                self.finish_preemption(replica, sequence)

    # Who comes in.

    def _admit(self, replica: Replica, step: StepBuilder) -> None:
        """Let those who go first come in, as long as all that they know fits beside what those who run still need."""
        self._placement.measure(replica)
        num_prefix_waits = 0
        while (
            step.budget
            and num_prefix_waits < MAX_PREFIX_WAITS
            and (head := self._waiting.head(replica, self.now)) is not None
        ):
            has_place = len(replica.running) < self.max_sequences(replica)
            if not has_place and not head.is_one_of_beams:
                return
            at: Replica | None = None
            if head.swapped_kv is not None:
                if head.swapped_kv.num_swapping:
                    return
                if has_place and self._has_room(replica, head, replica.num_needed_to_resume(head)):
                    replica.resume(head)
                    at = replica
            elif (offer := self._choose(replica, head)) is not None:
                if offer.leader is not None:
                    self._waiting.remove(head)
                    self._waiting.wait_for_prefix(*offer.leader, head)
                    num_prefix_waits += 1
                    continue
                at = offer.replica
                self._enter(at, head, offer.hit)
            if at is None:
                if step.scheduled or not self._clear_deadlock(replica, head):
                    return
                continue
            if at is not replica:
                self._placement.note_placed(at)
            elif self._may_be_computed(head) and (num_tokens := step.num_prefill_tokens(head)):
                self._plan(replica, step, head, num_tokens)
            self._placement.note_admitted(at, head)

    def _choose(self, replica: Replica, head: Sequence) -> PlacementOffer | None:
        """Where a queued sequence goes, if there is room for it on the replica that asks."""
        if self._waiting.quarantine.is_suspected(head):
            return self._offer(head, self._placement.for_isolated_run(replica))
        own = self._offer(head, replica)
        if own is None or not self._placement.has_choice:
            return own
        num_output = max(1.0, self._waiting.admission.expected_output(head.request) - head.num_output)
        return self._placement.best(own, head, num_output, partial(self._offer, head))

    def _offer(self, sequence: Sequence, replica: Replica) -> PlacementOffer | None:
        """What a replica has for a sequence; None where there is no room. A suspect follows nobody."""
        if len(replica.running) >= self.max_sequences(replica):
            return None
        hit = replica.match(sequence)
        leader = replica.leader_of(sequence, hit)
        if leader is not None and not self._waiting.quarantine.is_suspected(sequence):
            return PlacementOffer(replica, hit, leader)
        if not self._has_room(replica, sequence, replica.num_needed(sequence, hit)):
            return None
        return PlacementOffer(replica, hit, None)

    def _may_be_computed(self, sequence: Sequence) -> bool:
        """Whether one who came in may be in the step that lets it in."""
        return sequence.phase is Phase.RUNNING and not self._waiting.quarantine.is_suspected(sequence)

    def _has_room(self, replica: Replica, sequence: Sequence, num_needed: int) -> bool:
        reserve = 0 if sequence.is_one_of_beams else self.reserve(replica)
        return num_needed + reserve <= replica.device.pool.num_available

    def _clear_deadlock(self, replica: Replica, head: Sequence) -> bool:
        """Make room for who comes next, where nobody can go on and nothing is on its way: False where somebody can.

        In its way are what images keep on the device, and beams that wait for beams of theirs in the queue.
        """
        if (
            replica.in_flight
            or replica.num_pending_free
            or any(s.is_plannable(STOP_STRING_LEAD) for s in replica.running)
        ):
            return False
        if others := [s for s in replica.swapped if s is not head]:
            self._drop_swapped(replica, others[-1])
        elif beams := [s for s in replica.running if s.request.beam is not None and s.request is not head.request]:
            self._preempt(replica, beams[-1])
        else:
            return False
        return True

    def _drop_swapped(self, replica: Replica, sequence: Sequence) -> None:
        replica.drop_swapped(sequence)
        self.requeue(sequence)

    def _enter(self, replica: Replica, sequence: Sequence, hit: Hit) -> None:
        self._waiting.remove(sequence)
        if not any(
            s is not sequence and s.phase in (Phase.QUEUED, Phase.WAITING_FOR_PREFIX) for s in sequence.siblings
        ):
            self._waiting.admission.leave(sequence.request)
        sequence.replica = replica
        replica.admit(sequence, self._with_partial(replica, sequence, hit))
        self._totals.cache_queries += len(sequence.tokens)
        self._totals.cache_hits += sequence.num_computed
        size = replica.shape.block_size
        from_host = min(len(hit.host_ids) * size, max(0, sequence.num_computed - len(hit.device_ids) * size))
        self._totals.host_hits += from_host
        if sequence.num_cached is None:
            sequence.num_cached = min(sequence.num_computed, len(sequence.request.prompt))
            self._waiting.policy.charge(sequence, len(sequence.request.prompt) - sequence.num_cached)

    def _with_partial(self, replica: Replica, sequence: Sequence, hit: Hit) -> Hit:
        """A hit, with the last block of the prompt if a sibling has it: it is copied, since both go on in it."""
        num_prompt, size = len(sequence.request.prompt), replica.shape.block_size
        if sequence.num_output or num_prompt % size == 0 or hit.num_full != num_prompt // size:
            return hit
        for sibling in sequence.siblings:
            if sibling.phase is Phase.RUNNING and sibling.replica is replica and sibling.num_committed >= num_prompt:
                return replace(hit, partial_id=sibling.block_ids[num_prompt // size])
        return hit

    def capacity(self, replica: Replica) -> float:
        """Tokens a second that a replica computes when it is busy; 0 where nothing was measured yet.

        What it did last says little after a quiet spell: then as many would decode as have a place, and as fit beside
        each other if they are like those who run.
        """
        measured = replica.costs.tokens_per_second
        if not measured:
            return 0.0
        held = sum(len(s.block_ids) for s in replica.running)
        fitting = replica.shape.num_blocks * len(replica.running) // held if held else self.max_sequences(replica)
        width = max(1, min(self.max_sequences(replica), fitting))
        return max(measured, width / replica.costs.step_seconds(0, width))

    def first_place(self, replica: Replica) -> float:
        """Seconds until the first of those who run ends, where they leave no place to others; else 0."""
        if len(replica.running) < self.max_sequences(replica) and not replica.swapped:
            return 0.0
        num_left = min((s.request.max_tokens - s.num_output for s in replica.running), default=0)
        return num_left * replica.costs.step_seconds(0, len(replica.running))

    def reserve(self, replica: Replica) -> int:
        """Blocks that newcomers leave to those who run, for tokens that these know and for their next few."""
        if not replica.running:
            return 0
        low = self._preemption.low_watermark(replica, len(replica.running) + 1)
        return self._placement.load(replica).num_blocks + max(low, replica.shape.num_blocks // 100)

    def _wants_backups(self, replica: Replica) -> bool:
        """Whether blocks that are about to be given up had better be kept on the host."""
        if not self._preemption.may_swap(replica) or not replica.is_short_of_free_blocks:
            return False
        return replica.costs.swap_seconds(1, 1) < replica.costs.recompute_seconds(replica.shape.block_size)

    def may_fork(self, replica: Replica) -> bool:
        """Whether a replica has room for a fork of one of its sequences."""
        self._placement.measure(replica)
        has_place = len(replica.running) < self.max_sequences(replica)
        return has_place and replica.device.pool.num_available > self.reserve(replica)

    def max_sequences(self, replica: Replica) -> int:
        """How many sequences a step of a replica may hold."""
        return min(self._limits.max_sequences, replica.shape.max_sequences)

    def _count_slots(self, replica: Replica) -> None:
        """Add up how full the blocks in use are. Only a table's last block may be partly filled."""
        size = replica.shape.block_size
        self._totals.slots += (replica.shape.num_blocks - replica.device.pool.num_available) * size
        owners = (*replica.running, *replica.pending_free.values())
        self._totals.slots_unfilled += sum(len(s.block_ids) * size - s.num_computed for s in owners)


def _first_block(part: ScheduledSequence) -> int:
    return part.sequence.block_ids[0]
