"""What runs next. One queue stands above all replicas; computed tokens catch up with known tokens."""

import heapq
from collections.abc import Iterable
from collections.abc import Sequence as Seq
from dataclasses import dataclass

from scheduler_svc.core.plan import (
    Drawn,
    Event,
    FailedEvent,
    Failure,
    Introduction,
    MaxTokens,
    Scheduled,
    StepPlan,
    StopToken,
    TokensEvent,
)
from scheduler_svc.core.replica import Replica
from scheduler_svc.core.sequence import Phase, Request, Sequence

STOP_LEAD = 64  # tokens that a sequence with stop strings may run ahead of the gateway's search
MAX_LOSSES = 3  # workers that a sequence may see lost without a token between, before it is taken for the cause
DEPTH = 2  # steps in flight per replica: one runs while the next is made


@dataclass(frozen=True, slots=True)
class Limits:
    """What one step may hold, where that is less than its worker holds, and what may wait for it."""

    max_step_tokens: int = 2**31
    max_sequences: int = 2**31
    max_queued: int = 16384  # sequences that wait; one more is refused


@dataclass(slots=True)
class Totals:
    """Counts since the start, for the operator."""

    preemptions: int = 0
    prompt_tokens: int = 0
    generation_tokens: int = 0
    cache_queries: int = 0  # tokens looked up in the prefix index
    cache_hits: int = 0  # and found there
    slots: int = 0  # token places in blocks in use, summed over steps
    slots_unfilled: int = 0  # those of them without a token


class Scheduler:
    """Requests, their sequences, and the replicas that these run on.

    A driver calls `schedule(replica)`, sends the plan, and calls `commit(replica, results)` with its results, in
    order, with at most DEPTH plans outstanding. Nothing here waits, and nothing here fails for want of room.
    """

    def __init__(self, limits: Limits) -> None:
        self.limits = limits
        self.totals = Totals()
        self.replicas: list[Replica] = []
        self._requests: dict[str, list[Sequence]] = {}
        self._siblings: dict[str, list[Sequence]] = {}  # by key, those that wait for their first to compute the prompt
        self._queue: list[tuple[tuple[int, int, int], Sequence]] = []  # a heap; ended sequences are skipped
        self._model: tuple[bytes, int] | None = None  # fingerprint and block size that hashes are made for
        self._homes: dict[int, Replica] = {}  # where a running or preempted sequence lives, by sequence id
        self._num_queued = 0
        self._num_sequences = 0
        self._num_requests = 0

    # Requests come and go.

    @property
    def num_queued(self) -> int:
        """Sequences that wait for a replica."""
        return self._num_queued

    @property
    def num_running(self) -> int:
        """Sequences that run on some replica."""
        return sum(len(replica.running) for replica in self.replicas)

    def is_live(self, key: str) -> bool:
        """Whether a request with this key has sequences that have not ended."""
        return key in self._requests

    @property
    def keys(self) -> Iterable[str]:
        """Keys of the requests that are live."""
        return self._requests.keys()

    @property
    def context_length(self) -> int:
        """How many tokens a sequence may have: what the model knows and every replica's blocks hold. 0: no replica."""
        shapes = [replica.shape for replica in self.replicas]
        return min((min(s.context_length, s.num_blocks * s.block_size) for s in shapes), default=0)

    @property
    def _context_text(self) -> str:
        return f"prompt and max_tokens exceed the context of {self.context_length} tokens"

    def submit(self, request: Request) -> FailedEvent | None:
        """Queue a request, or say why not."""
        if request.key in self._requests:
            return FailedEvent(request, Failure.KEY_IN_USE, "a request with this id is running")
        if not request.prompt or request.n < 1 or request.max_tokens < 1:
            return FailedEvent(request, Failure.INVALID, "prompt, n and max_tokens must be at least 1")
        if self.replicas and len(request.prompt) + request.max_tokens > self.context_length:
            return FailedEvent(request, Failure.CONTEXT_LENGTH_EXCEEDED, self._context_text)
        if self._num_queued + request.n > self.limits.max_queued:
            return FailedEvent(request, Failure.UNAVAILABLE, "too many requests wait")
        sequences = [
            Sequence(self._num_sequences + index, request, index, self._num_requests, request.prompt)
            for index in range(request.n)
        ]
        self._num_sequences += request.n
        self._num_requests += 1
        self._requests[request.key] = sequences
        self._num_queued += request.n
        self._push(sequences[0])
        if request.n > 1:
            # The others take up its prompt from the prefix cache instead of computing it once more each.
            self._siblings[request.key] = sequences[1:]
        self.totals.prompt_tokens += len(request.prompt)
        return None

    def cancel(self, key: str, reason: Failure = Failure.CANCELLED, message: str = "cancelled") -> FailedEvent | None:
        """End all of a request's sequences; None where the key is not live."""
        sequences = self._requests.get(key)
        if sequences is None:
            return None
        self._siblings.pop(key, None)
        for sequence in sequences:
            self._end(sequence)
        return FailedEvent(sequences[0].request, reason, message)

    def expire(self, now: float) -> list[FailedEvent]:
        """End the requests whose deadline has passed."""
        late = [key for key, (first, *_) in self._requests.items() if (first.request.deadline or now) < now]
        return self._cancel_all(late, Failure.DEADLINE_EXCEEDED, "the deadline passed")

    def finish(self, key: str, index: int, num_tokens: int) -> None:
        """End one sequence by the gateway's verdict: only its first `num_tokens` output tokens count."""
        sequence = self._find(key, index)
        if sequence is not None:
            del sequence.tokens[len(sequence.request.prompt) + num_tokens :]
            self._end(sequence)

    def acknowledge(self, key: str, index: int, num_tokens: int) -> None:
        """Note how far the gateway has searched a sequence for stop strings."""
        sequence = self._find(key, index)
        if sequence is not None:
            sequence.num_acknowledged = max(sequence.num_acknowledged, num_tokens)

    def lift_stop_lead(self, key: str) -> None:
        """Let a request's sequences run on although nobody searches them for stop strings any more."""
        for sequence in self._requests.get(key, ()):
            sequence.num_acknowledged = sequence.request.max_tokens

    # Replicas come and go.

    def add_replica(self, replica: Replica) -> list[FailedEvent]:
        """Let a replica take work. Returns the requests that cannot go on: made for another model, or too large now."""
        self.replicas.append(replica)
        before, self._model = self._model, (replica.shape.fingerprint, replica.shape.block_size)
        if before not in (None, self._model):
            return self._cancel_all(list(self.keys), Failure.UNAVAILABLE, "the model was replaced")
        stuck = [
            key
            for key, (first, *_) in self._requests.items()
            if len(first.request.prompt) + first.request.max_tokens > self.context_length
        ]
        return self._cancel_all(stuck, Failure.CONTEXT_LENGTH_EXCEEDED, self._context_text)

    def remove_replica(self, replica: Replica) -> list[FailedEvent]:
        """A worker is gone, and what it held: its sequences queue again with the tokens that were committed.

        Returns the requests that are not tried again, since worker after worker was lost while it computed them.
        """
        lost = {part.sequence.request.key for plan in replica.in_flight for part in plan.scheduled}
        self.replicas.remove(replica)
        replica.in_flight.clear()
        for sequence in [*replica.running, *replica.leaving.values()]:
            sequence.num_in_flight = sequence.num_promised = 0
            sequence.forget_blocks()
            if sequence.phase is not Phase.ENDED:
                sequence.num_losses += sequence.request.key in lost
                self._requeue(sequence)
        suspects = {s.request.key for s in replica.running if s.num_losses >= MAX_LOSSES and s.phase is not Phase.ENDED}
        message = "workers were lost again and again while they computed this request"
        return self._cancel_all(sorted(suspects), Failure.INTERNAL, message)

    # A step.

    def schedule(self, replica: Replica) -> StepPlan | None:
        """Make the replica's next step; None where there is nothing to do, or DEPTH steps are in flight.

        There is no prefill and no decode: each sequence has known tokens, and a step computes some of those that are
        not computed yet, within the budgets of tokens, sequences and blocks. Running sequences go first, by their
        order; when blocks run out, the last of them gives up its own. What room is left admits from the queue.
        """
        if len(replica.in_flight) == DEPTH:
            return None
        scheduled: list[Scheduled] = []
        budget = min(self.limits.max_step_tokens, replica.shape.max_step_tokens)
        short = False
        for sequence in list(replica.running):
            if budget == 0:
                break
            if sequence.phase is not Phase.RUNNING or not sequence.is_plannable(STOP_LEAD):
                continue
            num_tokens = min(sequence.num_uncomputed, budget)
            num_missing = replica.num_blocks_for(sequence.num_computed + num_tokens) - len(sequence.block_ids)
            if num_missing > 0 and (short or not self._make_room(replica, sequence, num_missing)):
                short = True  # those behind it take no block before it has its own
                continue
            scheduled.append(self._plan(replica, sequence, num_tokens, len(sequence.block_ids)))
            budget -= num_tokens
        introductions: list[Introduction] = []
        while budget and not short and (newcomer := self._admit_next(replica)) is not None:
            introductions.append(Introduction(newcomer, list(newcomer.tokens)))
            scheduled.append(self._plan(replica, newcomer, min(newcomer.num_uncomputed, budget), num_told=0))
            budget -= scheduled[-1].num_tokens
        if not scheduled and not replica.departed_ids:
            return None
        replica.num_steps += 1
        plan = StepPlan(replica.num_steps, replica.departed_ids, introductions, scheduled)
        replica.departed_ids = []
        replica.in_flight.append(plan)
        self._count_slots(replica)
        return plan

    def commit(self, replica: Replica, results: Seq[Drawn]) -> list[Event]:
        """Take in the results of the oldest step in flight, in its order; returns what is new to tell."""
        plan = replica.in_flight.pop(0)
        if len(results) != len(plan.scheduled):
            raise ValueError(f"step {plan.step_id} has {len(plan.scheduled)} sequences, not {len(results)}")
        events: list[Event] = []
        for part, result in zip(plan.scheduled, results, strict=True):
            sequence = part.sequence
            sequence.num_in_flight -= 1
            if part.draws:
                sequence.num_promised -= 1
            if sequence.phase is not Phase.ENDED:
                events += self._commit_part(replica, part, result)
            if replica.settle(sequence) and sequence.phase is Phase.PREEMPTED:
                self._requeue(sequence)
        return events

    def _commit_part(self, replica: Replica, part: Scheduled, result: Drawn) -> list[Event]:
        sequence, request = part.sequence, part.sequence.request
        if result.failure is not None or len(result.token_ids) != part.draws:
            failed = self.cancel(request.key, Failure.INTERNAL, "the worker could not compute this request")
            return [failed] if failed is not None else []
        sequence.num_committed = part.start + part.num_tokens
        if not part.draws:
            replica.publish(sequence)
            return []
        offset = sequence.num_output
        sequence.append(result.token_ids)
        sequence.num_losses = 0
        replica.publish(sequence)
        for sibling in self._siblings.pop(request.key, ()):
            self._push(sibling)
        self.totals.generation_tokens += len(result.token_ids)
        end: StopToken | MaxTokens | None = None
        last = sequence.tokens[-1]
        if last in request.stop_token_ids and sequence.num_output > request.min_tokens:
            end = StopToken(last)
        elif sequence.num_output >= request.max_tokens:
            end = MaxTokens()
        if end is not None:
            self._end(sequence)
        return [TokensEvent(sequence, offset, list(result.token_ids), result.logprobs, end)]

    # How it is done.

    def _find(self, key: str, index: int) -> Sequence | None:
        sequences = self._requests.get(key, [])
        if index >= len(sequences) or sequences[index].phase is Phase.ENDED:
            return None
        return sequences[index]

    def _cancel_all(self, keys: Iterable[str], reason: Failure, message: str) -> list[FailedEvent]:
        return [event for key in keys if (event := self.cancel(key, reason, message)) is not None]

    def _push(self, sequence: Sequence) -> None:
        heapq.heappush(self._queue, (sequence.order, sequence))

    def _requeue(self, sequence: Sequence) -> None:
        self._homes.pop(sequence.id)
        sequence.move(Phase.QUEUED)
        self._num_queued += 1
        self._push(sequence)

    def _end(self, sequence: Sequence) -> None:
        if sequence.phase is Phase.ENDED:
            return
        home = self._homes.pop(sequence.id, None)
        if sequence.phase is Phase.RUNNING:
            assert home is not None
            home.leave(sequence, Phase.ENDED)
        else:
            self._num_queued -= sequence.phase is Phase.QUEUED
            sequence.move(Phase.ENDED)
        key = sequence.request.key
        if all(s.phase is Phase.ENDED for s in self._requests[key]):
            del self._requests[key]
        if len(self._queue) > 2 * self._num_queued + 64:  # mostly sequences that ended while they waited
            self._queue = [entry for entry in self._queue if entry[1].phase is Phase.QUEUED]
            heapq.heapify(self._queue)

    def _plan(self, replica: Replica, sequence: Sequence, num_tokens: int, num_told: int) -> Scheduled:
        """Add a sequence to a step. The worker knows the first `num_told` blocks of its table."""
        start = sequence.num_computed
        num_missing = replica.num_blocks_for(start + num_tokens) - len(sequence.block_ids)
        store_start = max(start, sequence.num_published * replica.shape.block_size)
        if num_missing > 0:
            replica.allocate(sequence, num_missing)
        draws = start + num_tokens == sequence.num_known
        sequence.num_computed += num_tokens
        sequence.num_promised += draws
        sequence.num_in_flight += 1
        return Scheduled(sequence, start, num_tokens, sequence.block_ids[num_told:], store_start, draws)

    def _make_room(self, replica: Replica, sequence: Sequence, count: int) -> bool:
        """See that `count` blocks are available, preempting from the end of the order; False: not in this step."""
        while count > replica.pool.num_available:
            if count <= replica.pool.num_available + replica.num_arriving:
                return False  # enough is on its way: one need takes one victim
            victim = replica.running[-1]
            self._preempt(replica, victim)
            if victim is sequence:
                return False
        return True

    def _preempt(self, replica: Replica, victim: Sequence) -> None:
        self.totals.preemptions += 1
        replica.leave(victim, Phase.PREEMPTED)
        if not victim.num_in_flight:
            self._requeue(victim)

    def _admit_next(self, replica: Replica) -> Sequence | None:
        """Admit the head of the queue if all that it knows fits beside what those who run still need."""
        while self._queue and self._queue[0][1].phase is not Phase.QUEUED:
            heapq.heappop(self._queue)
        max_sequences = min(self.limits.max_sequences, replica.shape.max_sequences)
        if not self._queue or len(replica.running) >= max_sequences:
            return None
        sequence = self._queue[0][1]
        hit = replica.match(sequence)
        num_revived = sum(replica.pool.is_cached(block_id) for block_id in hit)
        num_needed = replica.num_blocks_for(len(sequence.tokens)) - len(hit)
        reserve = replica.num_owed + (replica.shape.num_blocks // 100 if replica.running else 0)
        if num_needed + num_revived + reserve > replica.pool.num_available:
            return None
        heapq.heappop(self._queue)
        self._num_queued -= 1
        self._homes[sequence.id] = replica
        replica.admit(sequence, hit)
        self.totals.cache_queries += len(sequence.tokens)
        self.totals.cache_hits += sequence.num_computed
        if sequence.num_cached is None:
            sequence.num_cached = sequence.num_computed
        return sequence

    def _count_slots(self, replica: Replica) -> None:
        """Add up how full the blocks in use are. Only a table's last block may be partly filled."""
        size = replica.shape.block_size
        self.totals.slots += replica.pool.counts.used * size
        owners = (*replica.running, *replica.leaving.values())
        self.totals.slots_unfilled += sum(len(s.block_ids) * size - s.num_computed for s in owners)
