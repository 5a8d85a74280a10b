"""The scheduler of one model: requests go in, steps go out to its replicas, results come back as events."""

from collections.abc import Iterable
from collections.abc import Sequence as Seq
from dataclasses import replace
from functools import partial

from scheduler_svc.core.admission import Admission, AdmissionRefusal, Rates, Sharing, refuse_unpaid
from scheduler_svc.core.beam_search import BeamGroup, refuse_wide
from scheduler_svc.core.beams import BeamSearches
from scheduler_svc.core.budgets import Budget, Budgets, Charge
from scheduler_svc.core.committer import Committer, prompt_logprobs_events
from scheduler_svc.core.events import Event, FailedEvent, Failure
from scheduler_svc.core.limits import MAX_STEPS_IN_FLIGHT, SchedulerLimits
from scheduler_svc.core.output_lengths import OutputLengths
from scheduler_svc.core.planning import indivisible
from scheduler_svc.core.planning.admitter import Admitter
from scheduler_svc.core.planning.capacity import Capacity
from scheduler_svc.core.planning.fair_preemption import FairPreemption
from scheduler_svc.core.planning.forks import Forks
from scheduler_svc.core.planning.isolated_runs import IsolatedRuns
from scheduler_svc.core.planning.memory_reclaim import MemoryReclaimer
from scheduler_svc.core.planning.new_request_reserve import NewRequestReserve
from scheduler_svc.core.planning.preemptor import Preemptor
from scheduler_svc.core.planning.prompt_turns import PromptTurns
from scheduler_svc.core.planning.running import RunningPlanner
from scheduler_svc.core.planning.slot_wait import SlotWait
from scheduler_svc.core.planning.step_builder import StepBuilder
from scheduler_svc.core.policy import POLICIES
from scheduler_svc.core.policy.account_gate import refuse_beyond_account
from scheduler_svc.core.policy.poison import IsolatingPlacement, IsolatingQueue, PoisonTracker
from scheduler_svc.core.policy.preemption import PreemptionPolicy
from scheduler_svc.core.replica import Replica
from scheduler_svc.core.request import Phase, Request, RestoredSequence, Sequence
from scheduler_svc.core.request_table import RequestTable
from scheduler_svc.core.result_checks import refuse_combination, refuse_kind
from scheduler_svc.core.sequence_ids import SequenceIds
from scheduler_svc.core.step import StepOutcome, StepPlan, first_block
from scheduler_svc.core.totals import Totals


class Scheduler:
    """Requests of one model, and the replicas that they run on. All replicas share one queue.

    The driver (`engine.py`) calls `schedule(replica, now)`, sends the plan, and calls `commit(replica, outcome, now)`
    with each outcome in order. No call blocks, and none fails because blocks run out. `now` is the driver's clock, in
    seconds.
    """

    def __init__(self, limits: SchedulerLimits, budgets: Budgets | None = None) -> None:
        """The cores of a driver share its `budgets`."""
        self.limits = limits
        self.budgets = budgets if budgets is not None else Budgets()
        self.totals = Totals()
        self.replicas: list[Replica] = []
        # How many tokens a sequence may have: what the model knows and every replica's blocks hold. Without replicas,
        # as it was when the last one left; 0 before the first.
        self.context_length = 0
        self._block_size: int | None = None  # that block hashes are made for
        policy = (limits.make_policy or POLICIES[limits.policy])(limits.policy_settings)
        sharing = Sharing.BY_TENANT if limits.policy == "fair" else Sharing.BY_ARRIVAL
        preemption = PreemptionPolicy(policy, limits.preemption)
        lengths, self.poison = OutputLengths(), PoisonTracker()
        self.waiting = IsolatingQueue(
            policy,
            Admission(limits.queue, sharing, lengths),
            self.poison,
            self.replicas,
            short_prompts_first=limits.policy_settings.short_prompts_first,
        )
        self.placement = IsolatingPlacement(self.replicas, self.poison)
        for_new_requests = NewRequestReserve(self.waiting)
        self.capacity = Capacity(limits, self.placement, preemption, for_new_requests)
        searches: dict[str, BeamGroup] = {}
        ids = SequenceIds()
        self._preemptor = Preemptor(preemption, self.waiting, searches, self.totals)
        self._reclaimer = MemoryReclaimer(self._preemptor, self.waiting)
        by_tenant = sharing is Sharing.BY_TENANT
        turns = PromptTurns(self.waiting, shares_by_tenant=by_tenant)
        forks = Forks(searches, self.waiting, ids)
        self._running = RunningPlanner(
            limits, preemption, self._preemptor, turns, forks, for_new_requests, self.waiting
        )
        self.slot_wait = SlotWait(self.replicas, self.waiting, self.capacity, lengths, shares_by_tenant=by_tenant)
        self._fair_preemption = FairPreemption(
            self.replicas, self.waiting, self.capacity, preemption, self._preemptor, shares_by_tenant=by_tenant
        )
        self._admitter = Admitter(self.waiting, self.placement, self.capacity, self._preemptor, turns, self.totals)
        self._isolated_runs = IsolatedRuns(self.poison, self.waiting, self._preemptor)
        self._requests = RequestTable(self.replicas, self.waiting, self._isolated_runs, self.budgets, searches, ids)
        self._committer = Committer(self._requests, self.waiting, BeamSearches(self._requests), self.totals)

    # A step.

    def schedule(self, replica: Replica, now: float) -> StepPlan | None:
        """The replica's next step; None if there is nothing to do, or MAX_STEPS_IN_FLIGHT steps are in flight.

        There is no prefill and no decode step. Each sequence has known tokens, and a step computes some of those that
        are not computed yet, within the budgets of tokens, sequences and blocks. Sequences with one token to compute go
        first, since they must not wait for prompts; then come chunks of prompts; with the rest of the budget, waiting
        sequences are admitted, also to other replicas (see `take_placed`). A waiting sequence whose first token is due
        before that of a prompt which runs may be admitted before that one goes on.
        """
        self.waiting.now = now
        is_idle = not (replica.has_work or self.num_queued)
        if is_idle or len(replica.steps_in_flight) == MAX_STEPS_IN_FLIGHT or self._isolated_runs.must_wait(replica):
            return None
        num_sequences_freed = self._preemptor.num_sequences_freed
        plan = self._plan_step(replica)
        while plan is None and num_sequences_freed < self._preemptor.num_sequences_freed:
            num_sequences_freed = self._preemptor.num_sequences_freed  # nothing fitted, but preemption has freed blocks
            plan = self._plan_step(replica)
        return plan

    def _plan_step(self, replica: Replica) -> StepPlan | None:
        step = StepBuilder(replica, self.limits)
        self._reclaimer.reclaim(replica)
        if self._preemptor.limit_accounts(replica):
            for other in self.replicas:
                self.placement.note_placed(other)  # which may have room where this one has none
        if not self._isolated_runs.is_due(replica):
            self._fair_preemption.take_waiting(replica)
            head = self._fair_preemption.make_way(replica)
            indivisible.begin_with_due(step)
            self._running.add_decodes(step)
            self._running.add_prompt_chunks(step, head, partial(self._admitter.admit_before, step))
            indivisible.add_fitting(step)
            self._admitter.admit(step)
        if not step.scheduled:
            self._isolated_runs.add_next(step)
        return self._start(step)

    def _start(self, step: StepBuilder) -> StepPlan | None:
        """Puts a step in flight, with all that the worker must do or be sent besides."""
        replica = step.replica
        if step.scheduled and self.capacity.wants_backups(replica):
            replica.kv.back_up()
        awaits_copies = len(replica.kv.swaps) > 0 and not replica.steps_in_flight
        if not step.scheduled and not replica.has_pending_updates and not awaits_copies:
            return None
        # Sequences that share a prefix are neighbours, for the sake of the worker's caches.
        step.scheduled.sort(key=first_block)
        replica.num_steps += 1
        plan = StepPlan(replica.num_steps, replica.finished_ids, step.new_sequences, step.scheduled)
        plan.preempted.extend(self._preemptor.take_preempted())
        replica.start_step(plan)
        self._isolated_runs.note_step(replica, plan)
        self.totals.computed_tokens += step.num_tokens
        self._count_kv_slots(replica)
        return plan

    def _count_kv_slots(self, replica: Replica) -> None:
        """Counts how full the blocks in use are. Only a table's last block may be partly filled."""
        size = replica.shape.block_size
        self.totals.kv_slots += (replica.shape.num_blocks - replica.kv.num_available) * size
        owners = (*replica.running, *replica.indivisible, *replica.isolated, *replica.pending_free.values())
        self.totals.unfilled_kv_slots += sum(len(s.block_ids) * size - s.num_computed for s in owners)

    def take_placed(self) -> list[Replica]:
        """Replicas to which steps of others admitted sequences since the last call.

        The driver asks them for a step. When anything else changes the queue, it asks all replicas.
        """
        return self.placement.take_placed()

    def commit(self, replica: Replica, outcome: StepOutcome, now: float) -> list[Event]:
        """Takes in the outcome of the oldest step in flight; returns what the driver passes on.

        Tokens are appended, full blocks enter the prefix cache, sequences end. Blocks of sequences that left are freed
        once no step in flight names them. The outcome is valid: `step_responses.py` has compared it with the step and
        with the swaps in progress. Raises ValueError, before anything is changed, if it is another step's.
        """
        self.waiting.now = now
        _check(replica, outcome)
        plan = replica.finish_step(outcome.memory_pressure)
        events = prompt_logprobs_events(plan, outcome) if outcome.prompt_logprobs else []
        has_losses = self.poison.has_losses
        # By tenant and weight, which may differ between its keys: one of the sequences, and the new tokens of all.
        served: dict[tuple[str, float], tuple[Sequence, int]] = {}
        for part, result in zip(plan.scheduled, outcome.results, strict=True):
            sequence, num_new = part.sequence, 0
            sequence.num_steps_in_flight -= 1
            sequence.num_extra -= part.max_extra_tokens
            sequence.num_promised -= part.samples
            if sequence.phase is not Phase.ENDED:
                num_new = self._committer.commit(replica, part, result, events)
                if has_losses and (num_new or (part.samples and sequence.request.beam is None)):
                    self._isolated_runs.clear(sequence, replica)
                if num_new:
                    payer = sequence.request.tenant, sequence.request.weight
                    served[payer] = (sequence, num_new + (served[payer][1] if payer in served else 0))
            part.settle(num_new)
            is_free = sequence.phase is not Phase.RUNNING and replica.free_if_idle(sequence)
            if is_free and sequence.phase is Phase.PREEMPTED:
                self._preemptor.finish(replica, sequence)
        for sequence, num_tokens in served.values():
            self.waiting.policy.charge(sequence, num_tokens)
        for done in outcome.swaps:
            for sequence in replica.finish_swap(done):
                self._preemptor.requeue(replica, sequence)
        if outcome.busy_seconds is not None:
            replica.costs.observe_plan(plan, outcome.busy_seconds)
        return events

    # Requests.

    @property
    def num_queued(self) -> int:
        """Sequences that wait for a replica, or for room on theirs."""
        return len(self.waiting) + self.num_swapped

    @property
    def num_running(self) -> int:
        """Sequences that run on some replica."""
        return sum(replica.num_running for replica in self.replicas)

    @property
    def num_swapped(self) -> int:
        """Sequences that were preempted and have KV, on the host or kept on the device."""
        return sum(len(replica.swapped) for replica in self.replicas)

    @property
    def num_on_host(self) -> int:
        """Of these, the sequences with blocks in host memory."""
        waiting = (sequence.swapped_kv for replica in self.replicas for sequence in replica.swapped)
        return sum(kv is not None and bool(kv.host_ids) for kv in waiting)

    def is_live(self, key: str) -> bool:
        """Whether a request with this key has sequences that have not ended."""
        return key in self._requests

    @property
    def keys(self) -> Iterable[str]:
        """Keys of the live requests."""
        return self._requests.keys

    def sequences(self, key: str) -> list[Sequence]:
        """The sequences of a live request; none if there is no such request."""
        return self._requests.sequences(key)

    def rates(self, now: float) -> Rates:
        """What all replicas do together, as measured within the last second."""
        return self.capacity.rates(self.replicas, now)

    def check(self, request: Request, now: float, *, is_restored: bool = False) -> FailedEvent | None:
        """Why `submit` would reject a request now, or None. Changes nothing.

        With `is_restored` the request was accepted before, and bounds of the queue do not matter.
        """
        return self._check(request, now, is_restored=is_restored)

    def _check(
        self, request: Request, now: float, *, is_restored: bool, num_output: int | None = None
    ) -> FailedEvent | None:
        if request.key in self._requests:
            return FailedEvent(request, Failure.KEY_IN_USE, "a request with this id is running")
        if not request.prompt or request.n < 1 or request.max_tokens < 1 or not request.weight > 0:
            return FailedEvent(request, Failure.INVALID, "prompt, n, max_tokens and weight must be above 0")
        if request.beam is not None and request.beam.width < request.n:
            return FailedEvent(request, Failure.INVALID, "a search must be at least as wide as n")
        if (conflict := refuse_combination(request)) is not None:
            return FailedEvent(request, Failure.INVALID, conflict)
        refusal = self._refuse_unfit(request, num_output)
        if refusal is None and not is_restored:
            admission, slot_seconds = self.waiting.admission, self.slot_wait.seconds
            refusal = admission.check(
                request, now, self.context_length, self.rates(now), slot_seconds, self._budget_seconds(request, now)
            )
        if refusal is None:
            return None
        return FailedEvent(request, refusal.failure, refusal.message, refusal.retry_after)

    def _budget_seconds(self, request: Request, now: float) -> float:
        """Seconds until the account of a new request can pay for it at the earliest, as far as is known."""
        budget, limits = self.budgets.find(request.limits), request.limits
        if budget is None or budget.tokens_per_minute != limits.tokens_per_minute:  # the limit has changed
            return 0.0
        charge = Charge(budget, limits.cached_token_factor, len(request.prompt), request.search_tokens)
        return charge.seconds_until_start(request.max_tokens, now)

    def submit(self, request: Request, now: float, restored: Seq[RestoredSequence] = ()) -> FailedEvent | None:
        """Queues a request, or returns why it is rejected.

        `restored` is given for a request that was accepted before: one for each of its `n` sequences, or one without
        tokens for a beam search, which starts over. Sequences that have not ended continue after their tokens. If all
        have ended, the request is not live.
        """
        self.waiting.now = now
        lengths = [len(known.token_ids) for known in restored if not known.ended]
        num_output = max(lengths, default=0) if restored else None
        if (rejected := self._check(request, now, is_restored=bool(restored), num_output=num_output)) is not None:
            return rejected
        sequences = self._requests.add(request, restored)
        if not sequences:
            return None
        for sequence in sequences:
            sequence.fit_context(self.context_length)
        first, *siblings = sequences
        self.waiting.add(first)
        for sibling in siblings:
            self.waiting.wait_for_prefix(first, len(request.prompt), sibling)
        if not restored:
            self.totals.prompt_tokens += len(request.prompt)
        return None

    def cancel(self, key: str, reason: Failure = Failure.CANCELLED, message: str = "cancelled") -> FailedEvent | None:
        """Ends all of a request's sequences; None if the key is not live."""
        return self._requests.cancel(key, reason, message)

    def expire(self, now: float) -> list[FailedEvent]:
        """Ends the requests whose deadline has passed."""
        late = self._requests.take_late(now)
        return self._requests.cancel_all(late, Failure.DEADLINE_EXCEEDED, "the deadline passed")

    def expire_unpaid(self, budget: Budget, now: float) -> list[FailedEvent]:
        """Ends the requests of an account that cannot pay for their prompts before their deadlines."""
        events: list[FailedEvent] = []
        for request, charge in self._requests.unpaid(budget):
            refusal = refuse_unpaid(request, now, charge.seconds_until_start(request.max_tokens, now))
            if refusal is not None:
                ended = self._requests.cancel_all([request.key], refusal.failure, refusal.message)
                events += [replace(event, retry_after=refusal.retry_after) for event in ended]
        return events

    def finish(self, key: str, index: int, num_tokens: int) -> None:
        """Ends one sequence at a stop string: only its first `num_tokens` output tokens count."""
        sequence = self._requests.find(key, index)
        if sequence is not None and sequence.request.ends_anywhere:
            self.waiting.admission.observe_end(sequence.request, num_tokens)
            self._requests.end(sequence)
            del sequence.tokens[len(sequence.request.prompt) + num_tokens :]

    def acknowledge(self, key: str, index: int, num_tokens: int) -> None:
        """The gateway has searched `num_tokens` output tokens of a sequence for stop strings."""
        sequence = self._requests.find(key, index)
        if sequence is not None:
            sequence.num_acknowledged = max(sequence.num_acknowledged, num_tokens)

    def lift_stop_string_lead(self, key: str) -> None:
        """Lets a request's sequences run on although no gateway searches them for stop strings any more."""
        for sequence in self._requests.sequences(key):
            sequence.num_acknowledged = sequence.request.max_tokens

    # Replicas.

    def add_replica(self, replica: Replica) -> list[FailedEvent]:
        """Uses a replica. It has the model of those that are there, and their block size.

        Returns the requests that fail, since they are too large for it.
        """
        self.replicas.append(replica)
        self._replicas_changed()
        before, self._block_size = self._block_size, replica.shape.block_size
        self._drain_retired()
        if before not in (None, self._block_size):
            self._requests.forget_hashes()
        events: list[FailedEvent] = []
        for key in list(self.keys):
            sequences = self.sequences(key)
            num_output = max(sequence.num_output for sequence in sequences if sequence.phase is not Phase.ENDED)
            if (refusal := self._refuse_unfit(sequences[0].request, num_output)) is not None:
                events += self._requests.cancel_all([key], refusal.failure, refusal.message)
        return events

    def retire(self, replica: Replica) -> list[FailedEvent]:
        """Gives a replica no new sequences. Returns the requests that no other replica can run.

        Its sequences are queued with their committed tokens as soon as there is a replica that is not retired; until
        then they continue there.
        """
        replica.is_retired = True
        self.capacity.forget_rates()
        self._drain_retired()
        return self._cancel_unsupported()

    def supersede(self) -> bool:
        """Retired replicas admit what is queued, since no other replica may come: another version replaces this one.

        Returns whether that is new. Does nothing while a replica is not retired.
        """
        last = [replica for replica in self.replicas if not replica.is_last]
        if not last or not all(replica.is_retired for replica in self.replicas):
            return False
        for replica in last:
            replica.is_last = True
        self.capacity.forget_rates()
        return True

    def remove_replica(self, replica: Replica, *, may_have_crashed: bool = True) -> list[FailedEvent]:
        """A worker is lost, with its KV memory: its sequences are queued with their committed tokens.

        Returns the requests that fail: one that crashes workers, and those that no other replica can run. If the
        worker cannot have crashed, none of its sequences is suspected.
        """
        self.replicas.remove(replica)
        self.placement.forget(replica)
        self._replicas_changed()
        is_crash = may_have_crashed and not replica.is_retired  # a worker that was to end did not crash
        plans = replica.steps_in_flight if is_crash else ()
        parts = [part.sequence for plan in plans for part in plan.scheduled]
        computed = dict.fromkeys(sequence for sequence in parts if sequence.phase is not Phase.ENDED)
        failed_key = self._isolated_runs.record_loss(computed, self.replicas)
        self._preemptor.requeue_lost(replica.abandon())
        for key in dict.fromkeys(sequence.request.key for sequence in computed):
            self._isolated_runs.isolate_queued(self.sequences(key))
        message = "workers were lost again and again while they computed this request, the last one to it alone"
        failed_keys = [failed_key] if failed_key is not None else []
        return self._requests.cancel_all(failed_keys, Failure.QUARANTINED, message) + self._cancel_unsupported()

    def _replicas_changed(self) -> None:
        if self.replicas:
            self.context_length = min(replica.shape.max_length for replica in self.replicas)
            self._requests.fit_context(self.context_length)
        self.capacity.forget_rates()

    def _drain_retired(self) -> None:
        if not all(replica.is_retired for replica in self.replicas):
            for replica in self.replicas:
                replica.is_last = False
            for replica in self.replicas:
                if replica.is_retired:
                    self._preemptor.requeue_all(replica)

    def _refuse_unfit(self, request: Request, num_output: int | None = None) -> AdmissionRefusal | None:
        """Why a request can run on none of the replicas; None if it can, or if there are none.

        `num_output` is given for a request that was accepted before: the most output tokens of its sequences. The
        context may have become smaller since; it ends there, as long as there is room for a token.
        """
        length = request.max_length
        if num_output is not None and request.ends_anywhere:
            length = min(length, len(request.prompt) + num_output + 1)
        return (
            self.waiting.admission.check_size(request, length, self.context_length)
            or refuse_kind(request, self.replicas)
            or self._refuse_wide(request)
            or refuse_beyond_account(request, self.replicas)
        )

    def _refuse_wide(self, request: Request) -> AdmissionRefusal | None:
        wide = (refuse_wide(request, replica.shape, self.capacity.max_sequences(replica)) for replica in self.replicas)
        return next((refusal for refusal in wide if refusal is not None), None)

    def _cancel_unsupported(self) -> list[FailedEvent]:
        """Ends the requests whose kind of result no replica computes any more, unless there are no replicas."""
        events: list[FailedEvent] = []
        for key in list(self.keys):
            refusal = refuse_kind(self.sequences(key)[0].request, self.replicas)
            if refusal is not None:
                events += self._requests.cancel_all([key], refusal.failure, refusal.message)
        return events


def _check(replica: Replica, outcome: StepOutcome) -> None:
    plan = replica.steps_in_flight[0]
    if len(outcome.results) != len(plan.scheduled):
        raise ValueError(f"step {plan.step_id} has {len(plan.scheduled)} sequences, not {len(outcome.results)}")
