"""Requests, their sequences, and what came of the steps that these were in. One queue stands above all replicas."""

from collections.abc import Iterable
from collections.abc import Sequence as Seq

from scheduler_svc.core.admission import Admission, AdmissionRefusal, Rates, Sharing
from scheduler_svc.core.beam_group import BeamGroup, BeamStep, refuse_wide
from scheduler_svc.core.costs import count_pairs
from scheduler_svc.core.limits import SchedulerLimits, Totals
from scheduler_svc.core.placement import Placement
from scheduler_svc.core.plan import (
    Event,
    FailedEvent,
    Failure,
    MaxTokens,
    SampledSequence,
    ScheduledSequence,
    StepOutcome,
    StepPlan,
    StopToken,
    TokensEvent,
)
from scheduler_svc.core.planner import Planner
from scheduler_svc.core.policies import POLICIES
from scheduler_svc.core.policies.lazy_heap import LazyHeap
from scheduler_svc.core.replica import Replica
from scheduler_svc.core.sequence import Phase, Request, RestoredSequence, Sequence
from scheduler_svc.core.waiting import WaitingSequences


class Scheduler:
    """Requests, their sequences, and the replicas that these run on.

    A driver calls `schedule(replica, now)`, sends the plan, and calls `commit(replica, outcome, now)` with what came of
    it, in order. Nothing here waits, and nothing here fails for want of room. `now` is the driver's clock, in seconds.
    """

    def __init__(self, limits: SchedulerLimits) -> None:
        self.limits = limits
        self.totals = Totals()
        self.replicas: list[Replica] = []
        sharing = Sharing.BY_TENANT if limits.policy == "fair" else Sharing.BY_ARRIVAL
        make_policy = limits.make_policy or POLICIES[limits.policy]
        self.waiting = WaitingSequences(make_policy(limits.policy_settings), Admission(limits.queue, sharing))
        self.placement = Placement(self.replicas)
        self.planner = Planner(limits, self.totals, self.waiting, self.placement)
        self._requests: dict[str, list[Sequence]] = {}
        self._searches: dict[str, BeamGroup] = {}  # by key, of requests with beams
        self._deadlines: LazyHeap[str, float] = LazyHeap()  # keys of live requests
        self._model: tuple[bytes, int] | None = None  # fingerprint and block size that hashes are made for
        # How many tokens a sequence may have: what the model knows and every replica's blocks hold. As it was when the
        # last replica left, where none is there; 0 before the first.
        self.context_length = 0
        self._rates = Rates(0.0, 0.0, 0.0)
        self._rates_until = 0.0
        self._num_sequences = 0
        self._num_requests = 0

    # Requests come and go.

    @property
    def num_queued(self) -> int:
        """Sequences that wait for a replica."""
        return len(self.waiting) + self.num_swapped

    @property
    def num_running(self) -> int:
        """Sequences that run on some replica."""
        return sum(len(replica.running) for replica in self.replicas)

    @property
    def num_swapped(self) -> int:
        """Sequences that wait with an image."""
        return sum(len(replica.swapped) for replica in self.replicas)

    def is_live(self, key: str) -> bool:
        """Whether a request with this key has sequences that have not ended."""
        return key in self._requests

    @property
    def keys(self) -> Iterable[str]:
        """Keys of the requests that are live."""
        return self._requests.keys()

    def sequences(self, key: str) -> list[Sequence]:
        """The sequences of a live request; none where there is no such request."""
        return self._requests.get(key, [])

    def rates(self, now: float) -> Rates:
        """What all replicas do together, as measured within the last second."""
        if now >= self._rates_until:
            replicas = [replica for replica in self.replicas if not replica.is_retired]
            costs = [replica.costs for replica in replicas]
            self._rates = Rates(
                tokens_per_second=sum(self.planner.capacity(replica) for replica in replicas),
                prefill_seconds_per_token=min((cost.recompute_seconds(1) for cost in costs), default=0.0),
                decode_seconds_per_token=min((cost.step_seconds(0, 1) for cost in costs), default=0.0),
                first_place_seconds=min((self.planner.first_place(replica) for replica in replicas), default=0.0),
            )
            self._rates_until = now + 1.0
        return self._rates

    def check(self, request: Request, now: float, *, is_restored: bool = False) -> FailedEvent | None:
        """Say why `submit` would not take a request now; None: it would. Nothing changes by that.

        With `is_restored` it is one that was accepted before, and would be taken however many wait.
        """
        if request.key in self._requests:
            return FailedEvent(request, Failure.KEY_IN_USE, "a request with this id is running")
        if not request.prompt or request.n < 1 or request.max_tokens < 1 or not request.weight > 0:
            return FailedEvent(request, Failure.INVALID, "prompt, n, max_tokens and weight must be above 0")
        if request.beam is not None and request.beam.width < request.n:
            return FailedEvent(request, Failure.INVALID, "a search must be at least as wide as n")
        admission = self.waiting.admission
        if is_restored:
            refusal = admission.check_size(request, self.context_length)
        else:
            refusal = admission.check(request, now, self.context_length, self.rates(now))
        refusal = refusal or self._refuse_wide(request)
        if refusal is None:
            return None
        return FailedEvent(request, refusal.failure, refusal.message, refusal.retry_after)

    def submit(self, request: Request, now: float, restored: Seq[RestoredSequence] = ()) -> FailedEvent | None:
        """Queue a request, or say why not.

        With `restored` it is one that was accepted before: there is one for each of its `n` sequences, or one without
        tokens for a search, which begins anew. Those that are not `ended` go on behind the tokens given; where all are,
        nothing is live.
        """
        self.planner.now = now
        if (refused := self.check(request, now, is_restored=bool(restored))) is not None:
            return refused
        sequences = [
            Sequence(self._next_id(), request, index, self._num_requests, request.prompt)
            for index in range(request.n if request.beam is None else 1)
        ]
        self._num_requests += 1
        for sequence, known in zip(sequences, restored, strict=True) if restored else ():
            sequence.restore(known)
        for sequence in sequences:
            sequence.siblings = sequences
        if all(sequence.phase is Phase.ENDED for sequence in sequences):
            return None
        first, *siblings = (sequence for sequence in sequences if sequence.phase is not Phase.ENDED)
        if request.beam is not None:
            self._searches[request.key] = BeamGroup(request, request.beam, first)
        self._requests[request.key] = sequences
        self.waiting.add(first, now)
        for sibling in siblings:
            self.waiting.wait_for_prefix(first, len(request.prompt), sibling)
        if request.deadline is not None:
            self._deadlines.put(request.key, request.deadline)
        if not restored:
            self.totals.prompt_tokens += len(request.prompt)
        return None

    def cancel(self, key: str, reason: Failure = Failure.CANCELLED, message: str = "cancelled") -> FailedEvent | None:
        """End all of a request's sequences; None where the key is not live."""
        sequences = self._requests.get(key)
        if sequences is None:
            return None
        for sequence in reversed(sequences):  # the first last: the others may wait for it
            self._end(sequence)
        return FailedEvent(sequences[0].request, reason, message)

    def expire(self, now: float) -> list[FailedEvent]:
        """End the requests whose deadline has passed."""
        late = []
        while (first := self._deadlines.first()) is not None and first[0] < now:
            late.append(first[1])
            self._deadlines.discard(first[1])
        return self._cancel_all(late, Failure.DEADLINE_EXCEEDED, "the deadline passed")

    def finish(self, key: str, index: int, num_tokens: int) -> None:
        """End one sequence by the gateway's verdict: only its first `num_tokens` output tokens count."""
        sequence = self._find(key, index)
        if sequence is not None and sequence.request.beam is None:
            self.waiting.admission.observe_end(sequence.request, num_tokens)
            self._end(sequence)
            del sequence.tokens[len(sequence.request.prompt) + num_tokens :]

    def acknowledge(self, key: str, index: int, num_tokens: int) -> None:
        """Note how far the gateway has searched a sequence for stop strings."""
        sequence = self._find(key, index)
        if sequence is not None:
            sequence.num_acknowledged = max(sequence.num_acknowledged, num_tokens)

    def lift_stop_string_lead(self, key: str) -> None:
        """Let a request's sequences run on although nobody searches them for stop strings any more."""
        for sequence in self._requests.get(key, ()):
            sequence.num_acknowledged = sequence.request.max_tokens

    # Replicas come and go.

    def add_replica(self, replica: Replica) -> list[FailedEvent]:
        """Let a replica take work. Returns the requests that cannot go on: made for another model, or too large now."""
        self.replicas.append(replica)
        self._replicas_changed()
        before, self._model = self._model, (replica.shape.fingerprint, replica.shape.block_size)
        if before not in (None, self._model):
            return self._cancel_all(list(self.keys), Failure.UNAVAILABLE, "the model was replaced")
        events: list[FailedEvent] = []
        for key in list(self.keys):
            request = self._requests[key][0].request
            refusal = self.waiting.admission.check_size(request, self.context_length) or self._refuse_wide(request)
            if refusal is not None:
                events += self._cancel_all([key], refusal.failure, refusal.message)
        self._hand_over()
        return events

    def retire(self, replica: Replica) -> None:
        """Give a replica nothing more. Its sequences leave it as soon as there is one that is not retired, and queue
        with their committed tokens; until then they run on there.
        """
        replica.is_retired = True
        self._rates_until = 0.0
        self._hand_over()

    def _hand_over(self) -> None:
        if not all(replica.is_retired for replica in self.replicas):
            for replica in self.replicas:
                if replica.is_retired:
                    self.planner.drain(replica)

    def remove_replica(self, replica: Replica) -> list[FailedEvent]:
        """A worker is gone, and what it held: its sequences queue again with the tokens that were committed.

        Returns the request that is not tried again, if worker after worker was lost while it computed it, the last one
        to it alone.
        """
        plans = () if replica.is_retired else replica.in_flight  # one that was to end anyway says nothing about these
        parts = [part.sequence for plan in plans for part in plan.scheduled]
        in_flight = dict.fromkeys(sequence for sequence in parts if sequence.phase is not Phase.ENDED)
        failed_key = self.waiting.quarantine.record_loss(in_flight)
        self.replicas.remove(replica)
        self.placement.forget(replica)
        self._replicas_changed()
        replica.in_flight.clear()
        for sequence in [*replica.running, *replica.pending_free.values(), *replica.swapped]:
            sequence.num_in_flight = sequence.num_promised = sequence.num_extra = 0
            sequence.swapped_kv = None
            sequence.forget_blocks()
            if sequence.phase is not Phase.ENDED:
                self.planner.requeue(sequence)
                self.waiting.release_all(sequence, self.planner.now)
        for key in dict.fromkeys(sequence.request.key for sequence in in_flight):
            self.waiting.isolate_suspected(self.sequences(key), self.planner.now)
        message = "workers were lost again and again while they computed this request, the last one to it alone"
        return self._cancel_all([failed_key] if failed_key is not None else [], Failure.QUARANTINED, message)

    def _replicas_changed(self) -> None:
        if self.replicas:
            shapes = (replica.shape for replica in self.replicas)
            self.context_length = min(min(s.context_length, s.num_blocks * s.block_size) for s in shapes)
        self._rates_until = 0.0

    # A step.

    def schedule(self, replica: Replica, now: float) -> StepPlan | None:
        """The replica's next step; None where there is nothing to do, or enough steps are in flight.

        It may let sequences in on other replicas, too: `take_placed` tells of these.
        """
        return self.planner.schedule(replica, now)

    def take_placed(self) -> list[Replica]:
        """Replicas that were given sequences while steps of others were made, since this was asked last.

        They are to be asked for a step. Whatever else changes who waits, the driver asks all of them.
        """
        return self.placement.take_placed()

    def commit(self, replica: Replica, outcome: StepOutcome, now: float) -> list[Event]:
        """Take in what came of the oldest step in flight; returns what is new to tell.

        Raises ValueError where the outcome is not that step's, before anything is changed.
        """
        self.planner.now = now
        self._check(replica, outcome)
        plan = replica.finish_step()
        events: list[Event] = []
        served: dict[str, tuple[Sequence, int]] = {}  # by tenant, any one of its sequences and the tokens of all
        num_prefill = num_decodes = 0
        num_pairs = 0.0
        for part, result in zip(plan.scheduled, outcome.results, strict=True):
            sequence = part.sequence
            sequence.num_in_flight -= 1
            sequence.num_extra -= part.max_extra_tokens
            if part.samples:
                sequence.num_promised -= 1
            if part.num_tokens == 1 and part.samples:
                num_decodes += 1
            else:
                num_prefill += part.num_tokens
                num_pairs += count_pairs(part.start, part.num_tokens)
            if sequence.phase is not Phase.ENDED:
                num_new = self._commit_part(replica, part, result, events)
                if part.samples:
                    tenant = sequence.request.tenant
                    served[tenant] = (sequence, served[tenant][1] + num_new if tenant in served else num_new)
            if (
                sequence.phase is not Phase.RUNNING
                and replica.free_if_idle(sequence)
                and sequence.phase is Phase.PREEMPTED
            ):
                self.planner.finish_preemption(replica, sequence)
        for sequence, num_tokens in served.values():
            self.waiting.policy.charge(sequence, num_tokens)
        for done in outcome.swaps:
            for sequence in replica.finish_swap(done):
                self.planner.recompute(replica, sequence)
        if outcome.busy_seconds is not None and plan.scheduled:
            replica.costs.observe_step(num_prefill, num_decodes, outcome.busy_seconds, num_pairs)
        return events

    def _check(self, replica: Replica, outcome: StepOutcome) -> None:
        plan = replica.in_flight[0]
        if len(outcome.results) != len(plan.scheduled):
            raise ValueError(f"step {plan.step_id} has {len(plan.scheduled)} sequences, not {len(outcome.results)}")
        swaps = [(done.step_id, done.direction) for done in outcome.swaps]
        if len(set(swaps)) < len(swaps) or not all(replica.swaps.is_in_progress(*swap) for swap in swaps):
            raise ValueError(f"step {plan.step_id} is answered with copies that are not under way")

    def _commit_part(
        self, replica: Replica, part: ScheduledSequence, result: SampledSequence, events: list[Event]
    ) -> int:
        """Take in what a sequence's part of a step returned; how many tokens are new."""
        sequence, request = part.sequence, part.sequence.request
        num_new = len(result.token_ids)
        if result.failure is not None or (num_new != part.samples and not _may_return(replica, part, num_new)):
            self._fail(request, events)
            return 0
        is_beam = request.beam is not None
        offset = sequence.num_output
        sequence.num_committed += part.num_tokens
        if (
            num_new != part.samples
        ):  # one token was planned for: what is beyond it was computed too, and nothing without it
            sequence.num_computed += num_new - part.samples
            sequence.num_committed += num_new - part.samples
        if part.samples and self.waiting.quarantine.has_losses:
            self.waiting.quarantine.clear(sequence)
        tokens: Seq[int] = () if is_beam else result.token_ids
        if len(tokens) > 1:
            tokens = tokens[: _num_until_end(request, offset, tokens)]
            sequence.num_committed -= num_new - len(tokens)  # what is behind an end is not published
        if tokens:
            sequence.append(tokens)
        if sequence.phase is Phase.RUNNING:
            replica.publish(sequence)
        self.waiting.release_ready(sequence, self.planner.now)
        if is_beam and part.samples:
            self._commit_beam(sequence, result, events)
            return 1
        if not tokens:
            return 0
        num_output = offset + len(tokens)
        self.totals.generation_tokens += len(tokens)
        end: StopToken | MaxTokens | None = None
        if tokens[-1] in request.stop_token_ids and num_output > request.min_tokens:
            end = StopToken(tokens[-1])
        elif num_output >= request.max_tokens:
            end = MaxTokens()
        if end is not None:
            self.waiting.admission.observe_end(request, num_output)
            self._end(sequence)
        events.append(TokensEvent(sequence, offset, tokens, result.logprobs[: len(tokens)], end))
        return len(tokens)

    def _fail(self, request: Request, events: list[Event]) -> None:
        failed = self.cancel(request.key, Failure.INTERNAL, "the worker could not compute this request")
        if failed is not None:
            events.append(failed)

    # Beams.

    def _refuse_wide(self, request: Request) -> AdmissionRefusal | None:
        wide = (refuse_wide(request, replica.shape, self.planner.max_sequences(replica)) for replica in self.replicas)
        return next((refusal for refusal in wide if refusal is not None), None)

    def _commit_beam(self, sequence: Sequence, result: SampledSequence, events: list[Event]) -> None:
        """Keep what may follow a beam; once all beams of its search have that, they advance."""
        request = sequence.request
        if not result.logprobs:
            self._fail(request, events)
            return
        group = self._searches[request.key]
        group.take(sequence, result)
        if not group.is_complete:
            return
        for step in group.advance():
            self._go_on(step)
        if group.is_over:
            found = group.events()
            if len(found) < request.n:  # the worker told of too few candidates
                self._fail(request, events)
                return
            self.totals.generation_tokens += sum(len(event.token_ids) for event in found)
            events.extend(found)
            for one in list(sequence.siblings):
                self._end(one)

    def _go_on(self, step: BeamStep) -> None:
        """Continue one beam as its search has decided: in none, one or several ways."""
        sequence, tokens = step.sequence, step.next_tokens
        if not tokens:
            self._end(sequence)
            sequence.siblings.remove(sequence)
            return
        replica = sequence.replica
        for token in tokens[1:]:
            child = Sequence(self._next_id(), sequence.request, 0, sequence.arrival, [*sequence.tokens, token])
            child.num_cached = sequence.num_cached
            child.siblings = sequence.siblings
            child.siblings.append(child)
            step.add_child(child)
            if replica is not None and sequence.phase is Phase.RUNNING and self.planner.may_fork(replica):
                child.replica = replica
                replica.fork(sequence, child)
            else:
                self.waiting.add(child, self.planner.now)
        sequence.append(tokens[:1])
        if replica is not None and sequence.phase is Phase.RUNNING:
            self.waiting.release_all(sequence, self.planner.now)
            replica.rename(sequence, self._next_id())

    def _next_id(self) -> int:
        self._num_sequences += 1
        return self._num_sequences - 1

    # Who waits.

    def _find(self, key: str, index: int) -> Sequence | None:
        sequences = self._requests.get(key, [])
        if index >= len(sequences) or sequences[index].phase is Phase.ENDED:
            return None
        return sequences[index]

    def _cancel_all(self, keys: Iterable[str], reason: Failure, message: str) -> list[FailedEvent]:
        return [event for key in keys if (event := self.cancel(key, reason, message)) is not None]

    def _end(self, sequence: Sequence) -> None:
        if sequence.phase is Phase.ENDED:
            return
        replica, sequence.replica = sequence.replica, None
        if sequence.phase in (Phase.RUNNING, Phase.SWAPPING_IN):
            assert replica is not None
            replica.leave(sequence, Phase.ENDED)
        else:
            if sequence.phase is Phase.QUEUED:
                self.waiting.remove(sequence)
            elif sequence.phase is Phase.WAITING_FOR_PREFIX:
                self.waiting.prefix_waiters.remove(sequence)
            elif sequence.swapped_kv is not None:
                assert replica is not None
                replica.drop_swapped(sequence)
            sequence.set_phase(Phase.ENDED)
        self.waiting.release_all(sequence, self.planner.now)
        self.waiting.quarantine.clear(sequence)
        key = sequence.request.key
        if all(s.phase is Phase.ENDED for s in sequence.siblings):
            self.waiting.admission.leave(sequence.request)
            del self._requests[key]
            self._searches.pop(key, None)
            self._deadlines.discard(key)


def _may_return(replica: Replica, part: ScheduledSequence, num_tokens: int) -> bool:
    """Whether a step may return so many tokens for a sequence: one where it samples, unless the worker speculates."""
    if not part.samples:
        return num_tokens == 0
    may_be_none = replica.shape.max_new_tokens > 1 and part.num_tokens == 1 and part.sequence.request.beam is None
    return 1 - may_be_none <= num_tokens <= 1 + part.max_extra_tokens


def _num_until_end(request: Request, num_output: int, token_ids: Seq[int]) -> int:
    """How many of these tokens count: up to the first that ends the sequence. `num_output` tokens came before."""
    for place, token in enumerate(token_ids, 1):
        if token in request.stop_token_ids and num_output + place > request.min_tokens:
            return place
    return len(token_ids)
