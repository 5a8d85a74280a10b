"""Holds back sequences of accounts that are at a limit of what runs, so that they do not delay other accounts."""

from collections.abc import Iterable
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from itertools import chain

from scheduler_svc.core.account_limits import AccountLimits
from scheduler_svc.core.admission import AdmissionRefusal
from scheduler_svc.core.events import Failure
from scheduler_svc.core.lazy_heap import LazyHeap
from scheduler_svc.core.policy.order import Policy
from scheduler_svc.core.replica import Replica
from scheduler_svc.core.replica_shape import ReplicaShape
from scheduler_svc.core.request import Phase, Request, Sequence

MAX_QUEUED = 256  # sequences of a limited account in the policy's queue; each may have to be taken out of it again

_Order = tuple[float, ...]


@dataclass(slots=True, eq=False)
class _Account:
    """`num_slots` and `num_blocks` are what its running sequences use, as last measured, and what was admitted since.

    Of its sequences that wait, `queued` are in the policy's queue, the last one in their order first; `held` are not;
    `swapped` wait on replicas, as last measured, of a search one.
    """

    limits: AccountLimits
    stated_at: float
    num_requests: int = 0
    num_slots: int = 0
    num_blocks: int = 0
    queued: LazyHeap[Sequence, _Order] = field(default_factory=LazyHeap)
    held: LazyHeap[Sequence, _Order] = field(default_factory=LazyHeap)
    swapped: list[Sequence] = field(default_factory=list)

    @property
    def is_limited(self) -> bool:
        limits = self.limits
        return any(limit is not None for limit in (limits.max_running, limits.max_kv_blocks, limits.tokens_per_minute))

    @property
    def max_queued(self) -> int:
        """How many sequences may be in the policy's queue: not many more than may be admitted."""
        most = self.limits.max_running
        return MAX_QUEUED if most is None else min(MAX_QUEUED, max(0, most - self.num_slots))

    @property
    def is_over(self) -> bool:
        """Whether its sequences use more blocks than they may. One alone may always run."""
        most = self.limits.max_kv_blocks
        return most is not None and self.num_blocks > most and self.num_slots > 1

    def holds_one_before(self, sequence: Sequence) -> bool:
        """Whether one that is before this sequence in their order is held back."""
        first = self.held.first()
        return first is not None and first[0] < sequence.order


class AccountGate:
    """Puts sequences into the policy's queue, as far as the limits of their accounts may let them run.

    Sequences of one account are held back and queued by priority, then by arrival. While one is held back, those after
    it are, too: small requests would take what a large one waits for. The time for which one is held back does not
    count as waiting. A sequence uses one slot, and the blocks that its known tokens take; a beam search uses as many
    slots as it is wide, and the most blocks that its beams may take.
    """

    def __init__(self, policy: Policy, replicas: Iterable[Replica] = ()) -> None:
        """`replicas` is the owner's own list, which grows and shrinks."""
        self._policy = policy
        self._replicas = replicas
        self._accounts: dict[str, _Account] = {}  # of live requests
        self._limited: dict[str, _Account] = {}  # those that have or had a limit of what runs

    def __len__(self) -> int:
        """Sequences that are held back."""
        return sum(len(account.held) for account in self._limited.values())

    @property
    def has_limits(self) -> bool:
        """Whether any live account has a limit of what runs."""
        return bool(self._limited)

    # Requests.

    def add_request(self, request: Request) -> None:
        """A request is live. The limits of the latest one apply to its account."""
        limits = request.limits
        if not limits.account:
            return
        account = self._accounts.get(limits.account)
        if account is None:
            account = self._accounts[limits.account] = _Account(limits, request.arrived_at)
        if request.arrived_at >= account.stated_at:
            account.limits, account.stated_at = limits, request.arrived_at
        account.num_requests += 1
        is_limited = account.is_limited or limits.tokens_per_minute is not None  # it may be an earlier request
        if is_limited and limits.account not in self._limited:
            self._limited[limits.account] = account
            self.measure()

    def remove_request(self, request: Request) -> None:
        """A request has ended, with all its sequences."""
        name = request.limits.account
        account = self._accounts.get(name)
        if account is None:
            return
        account.num_requests -= 1
        if not account.num_requests:
            del self._accounts[name]
            self._limited.pop(name, None)

    # The queue.

    def add(self, sequence: Sequence, now: float) -> None:
        """Queues a sequence, or holds it back, or another one of its account in its place."""
        account = self._account(sequence)
        if account is None:
            self._policy.add(sequence, now)
            return
        if account.holds_one_before(sequence):
            self._hold(account, sequence, now)
        else:
            self._queue_or_hold(account, sequence, now, account.max_queued)

    def remove(self, sequence: Sequence) -> None:
        """Takes a sequence out of the queue. Does nothing if it is not queued."""
        account = self._account(sequence)
        if account is not None:
            account.queued.discard(sequence)
            account.held.discard(sequence)
        self._policy.remove(sequence)

    def first(self, now: float, shape: ReplicaShape) -> Sequence | None:
        """The sequence to admit next; those of accounts without room or tokens that are before it are held back."""
        while (first := self._policy.first(now)) is not None and not self.may_go(first, shape):
            self._hold(self._limited[first.request.limits.account], first, now)
        return first

    def release(self, now: float) -> bool:
        """Queues held sequences for which their accounts have room. Whether there were any."""
        shape = next((replica.shape for replica in self._replicas), None)
        if not len(self) or shape is None:
            return False
        num_released = sum(self._release(account, shape, now) for account in self._limited.values())
        return num_released > 0

    def _release(self, account: _Account, shape: ReplicaShape, now: float) -> int:
        """Queues the held sequences of an account for which it has room; returns how many."""
        num_released = 0
        while (best := account.held.first()) is not None and self.may_run(best[1], shape):
            account.held.discard(best[1])
            # With a charge one at a time: each could be paid, and not all of them.
            max_queued = account.max_queued if best[1].charge is None else min(1, account.max_queued)
            if not self._queue_or_hold(account, best[1], now, max_queued):
                break
            num_released += 1
        return num_released

    def may_go(self, sequence: Sequence, shape: ReplicaShape) -> bool:
        """Whether a sequence of the queue may be admitted, as far as its account goes."""
        account = self._account(sequence)
        return (account is None or not account.holds_one_before(sequence)) and self.may_run(sequence, shape)

    def holds(self, sequence: Sequence) -> bool:
        """Whether a sequence is held back."""
        account = self._account(sequence)
        return account is not None and sequence in account.held

    def num_ahead(self, sequence: Sequence) -> int | None:
        """How many sequences of its account are admitted before one that is held back; None if it is not."""
        account = self._account(sequence)
        if account is None or sequence not in account.held:
            return None
        return len(account.queued) + sum(other.order < sequence.order for other in account.held)

    def _account(self, sequence: Sequence) -> _Account | None:
        return self._limited.get(sequence.request.limits.account) if self._limited else None

    def _queue_or_hold(self, account: _Account, sequence: Sequence, now: float, max_queued: int) -> bool:
        """Queues a sequence, in the place of a later one where the queue has as many as it may; else holds it back."""
        if len(account.queued) >= max_queued:
            last = account.queued.first()
            if last is None or last[1].order < sequence.order:
                self._hold(account, sequence, now)
                return False
            self._hold(account, last[1], now)
        sequence.start_waiting(now)
        account.queued.put(sequence, tuple(-part for part in sequence.order))
        self._policy.add(sequence, now)
        return True

    def _hold(self, account: _Account, sequence: Sequence, now: float) -> None:
        account.queued.discard(sequence)
        self._policy.remove(sequence)
        account.held.put(sequence, sequence.order)
        sequence.stop_waiting(now)

    # Limits.

    def measure(self) -> None:
        """Measures what the running sequences of limited accounts use, and finds the swapped ones.

        O(sequences on replicas), if there are limits.
        """
        if not self._limited:
            return
        for account in self._limited.values():
            account.num_slots = account.num_blocks = 0
            account.swapped = []
        searches = set[str]()
        for replica in self._replicas:
            for sequence in chain(replica.running, replica.indivisible, replica.isolated):
                if sequence.request.key not in searches:
                    self._count(sequence, replica.shape)
                if sequence.request.beam is not None:
                    searches.add(sequence.request.key)  # its other beams are counted with the first
            for sequence in replica.swapped:
                swapped_of = self._account(sequence)
                if swapped_of is not None and sequence is sequence.unit[0]:
                    swapped_of.swapped.append(sequence)

    def may_run(self, sequence: Sequence, shape: ReplicaShape) -> bool:
        """Whether the account of a sequence that waits has tokens and room for it.

        It always has room if nothing else of it runs. A swapped sequence that is before this one in their order counts
        as running: else those after it would take the room that it waits for.
        """
        if not sequence.can_pay:
            sequence.note_shortfall()
            return False
        account = self._account(sequence)
        if account is None:
            return True
        limits, num_slots, num_blocks = account.limits, account.num_slots, account.num_blocks
        for other in account.swapped:
            if other.order < sequence.order:
                num_slots += other.request.num_slots
                num_blocks += _num_blocks(other, shape)
        if not num_slots:
            return True
        if limits.max_running is not None and num_slots + sequence.request.num_slots > limits.max_running:
            return False
        return limits.max_kv_blocks is None or num_blocks + _num_blocks(sequence, shape) <= limits.max_kv_blocks

    def note_admitted(self, sequence: Sequence, shape: ReplicaShape, now: float) -> None:
        """A sequence runs since the last measurement. The next one of its account may be paid, too."""
        self._count(sequence, shape)
        account = self._account(sequence) if sequence.charge is not None else None
        if account is not None:
            self._release(account, shape, now)

    def _count(self, sequence: Sequence, shape: ReplicaShape) -> None:
        account = self._account(sequence)
        if account is not None:
            account.num_slots += sequence.request.num_slots
            account.num_blocks += _num_blocks(sequence, shape)
            if account.swapped:
                account.swapped = [other for other in account.swapped if other.order != sequence.order]

    def take_excess(self, replica: Replica) -> list[Sequence]:
        """The running sequences of a replica that must be preempted, so that no account uses too many blocks.

        No beams: a search reserves the most blocks that it may use.
        """
        if not any(account.is_over for account in self._limited.values()):
            return []
        excess = []
        for sequence in reversed(replica.running):
            account = self._account(sequence)
            is_able = sequence.phase is Phase.RUNNING and sequence.request.beam is None
            if account is not None and account.is_over and is_able:
                account.num_slots -= sequence.request.num_slots
                account.num_blocks -= _num_blocks(sequence, replica.shape)
                excess.append(sequence)
        return excess


def refuse_beyond_account(request: Request, replicas: Seq[Replica]) -> AdmissionRefusal | None:
    """Why a request can never run within the limits of its account, or None. Without a replica any can."""
    limits, beam = request.limits, request.beam
    if beam is not None and limits.max_running is not None and beam.width > limits.max_running:
        message = f"the search is wider than max_running of the API key, which is {limits.max_running}"
        return AdmissionRefusal(Failure.SEARCH_TOO_WIDE, message)
    if limits.max_kv_blocks is None or not replicas or all(each.shape.is_without_kv(request) for each in replicas):
        return None
    size = replicas[0].shape.block_size
    num_blocks = request.max_blocks(size)
    if num_blocks <= limits.max_kv_blocks:
        return None
    limit = f"KV blocks of {size} tokens, and max_kv_blocks of the API key is {limits.max_kv_blocks}"
    num_output = 0 if request.returns_value else 1
    num_of_prompt = -(-(len(request.prompt) + num_output) // size)
    if num_of_prompt > limits.max_kv_blocks:
        what = "the prompt and the first token of its output take" if num_output else "the prompt takes"
        return AdmissionRefusal(Failure.PROMPT_TOO_COSTLY, f"{what} {num_of_prompt} {limit}")
    message = f"prompt and max_tokens take up to {num_blocks} {limit}"
    return AdmissionRefusal(Failure.TOO_MANY_TOKENS if beam is None else Failure.SEARCH_TOO_WIDE, message)


def _num_blocks(sequence: Sequence, shape: ReplicaShape) -> int:
    """The blocks of a sequence once all its known tokens are computed."""
    request = sequence.request
    if shape.is_without_kv(request):
        return 0
    if request.beam is not None:
        return request.max_blocks(shape.block_size)
    return max(len(sequence.block_ids), shape.num_blocks_for(sequence.num_known + sequence.num_extra))
