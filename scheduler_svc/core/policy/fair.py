"""Fair shares by the token: classes of priority, tenants in turn, earliest deadline first within a tenant."""

from bisect import bisect_left, bisect_right, insort
from collections.abc import Iterator
from heapq import heapify, heappop, heapreplace
from operator import attrgetter

from scheduler_svc.core.policy.fair_class import FairClass
from scheduler_svc.core.policy.order import OrderKey, PolicySettings, arrival_order
from scheduler_svc.core.policy.tenants import TenantQueues, Urgency
from scheduler_svc.core.request import Sequence

MAX_CLASSES = 16  # classes in use; beyond that a new priority counts as the next lower class in use, or the lowest
_IDLE_AGEINGS = 8  # times ageing_seconds without requests, after which classes and tenants are no longer in use
_MIN_WEIGHT = 1e-6
_PRIORITY = attrgetter("priority")


class FairPolicy:
    """The highest class with queued requests is first; in it, the tenant that has received least; then deadlines.

    *Classes.* A request rises by one class in use for each ageing_seconds that it waits, up to the highest class with
    queued requests, and counts there as one of that class. So after at most (MAX_CLASSES - 1) × ageing_seconds it is in
    the highest class. Time in which it runs does not count; a preempted one goes on from what it had waited before.

    *Tenants.* Each has a virtual token counter (Sheng et al., "Fairness in Serving Large Language Models", OSDI 2024):
    tokens received, over the weight of the request. The tenant with the smallest counter in the class is first; of
    equal ones the one that was charged longest ago. A
    tenant that enters a class starts at the smallest counter there, or at its own if that is larger. So a long queue of
    one tenant delays no other tenant of its class: a single request waits for one turn of each of them.

    *Within a tenant* the request that is due first is first: at its deadline, or deadline_horizon after its first token
    is due. So a short prompt does not wait for a long one that came shortly before. In the highest class a request is
    admitted before all of its tenant that arrive after it is due, deadlines left aside. Of the requests that rose from
    one class, the oldest is first. Between requests of different classes the lengths of prompts do not matter.

    All methods but `position` take O(log n) amortized for each class in use.
    """

    def __init__(self, settings: PolicySettings | None = None) -> None:
        settings = settings or PolicySettings()
        self._ageing_seconds = settings.ageing_seconds
        self._horizon = settings.deadline_horizon
        self._waiting: dict[Sequence, FairClass] = {}  # with the class of its own priority
        self._classes: list[FairClass] = []  # in use, from the lowest
        self._tenants: dict[str, TenantQueues] = {}
        self._max_tenants = 64  # above which those are forgotten that are idle, or do not wait and have no debt
        self._now = 0.0
        self._swept_at = 0.0
        self._num_charges = 0

    def __len__(self) -> int:
        return len(self._waiting)

    def add(self, sequence: Sequence, now: float) -> None:
        if sequence in self._waiting:
            raise AssertionError(f"sequence {sequence.id} is queued already")
        self._now = max(self._now, now)
        self._retire_classes()
        sequence.start_waiting(self._now)
        own = self._class_for(sequence.request.priority)
        own.num_waiting += 1
        own.used_at = self._now
        tenant = self._tenant(sequence.request.tenant)
        self._waiting[sequence] = own
        tenant.add(own.priority, sequence, self._urgency(sequence))
        for other in self._classes[own.rank :]:
            if tenant not in other:
                self._update_turn(tenant, other)

    def remove(self, sequence: Sequence) -> None:
        own = self._waiting.pop(sequence, None)
        if own is None:
            return
        own.num_waiting -= 1
        tenant = self._tenants[sequence.request.tenant]
        tenant.remove(own.priority, sequence)
        tenant.used_at = self._now
        for other in self._classes[own.rank :]:
            self._update_turn(tenant, other)

    def first(self, now: float) -> Sequence | None:
        top = self._top_at(now)
        if top is None:
            return None
        tenant = top.next()
        assert tenant is not None, "a class in which sequences wait has no turn to give"
        return self._candidate(tenant, top)

    def turns(self, now: float) -> Iterator[Sequence]:
        """Of each tenant in the highest class, the sequence to admit next, in the order of the tenants' turns."""
        top = self._top_at(now)
        return (self._candidate(tenant, top) for tenant in top.turns()) if top is not None else iter(())

    def charge(self, sequence: Sequence, num_tokens: int) -> None:
        request = sequence.request
        tenant = self._tenant(request.tenant)
        tenant.served += num_tokens / max(request.weight, _MIN_WEIGHT)
        self._num_charges += 1
        tenant.charged_at = self._num_charges
        tenant.used_at = self._now

    def preemption_key(self, sequence: Sequence) -> OrderKey:
        """A sequence counts in its effective class, also while it runs."""
        own = self._effective_class(sequence)
        if own is None:
            return (-sequence.request.priority, 0.0, *arrival_order(sequence))
        return (-own.priority, own.debt(self._tenant(sequence.request.tenant)), *arrival_order(sequence))

    def effective_priority(self, sequence: Sequence, now: float) -> int:
        self._now = max(self._now, now)
        effective = self._effective_class(sequence)
        return effective.priority if effective is not None else sequence.request.priority

    def outranks(self, waiting: Sequence, running: Sequence, now: float) -> bool:
        """One of a higher priority, unless the running one has risen by waiting to a higher class, or to the same one
        and has the earlier turn there.
        """
        if waiting.request.priority <= running.request.priority:
            return False
        ranks = self.effective_priority(waiting, now), self.effective_priority(running, now)
        return ranks[0] > ranks[1] or (ranks[0] == ranks[1] and self._is_before(waiting, running))

    def _is_before(self, sequence: Sequence, other: Sequence) -> bool:
        """Whether a queued sequence is admitted before another one that counts in the same class."""
        one, two, at = sequence.request.tenant, other.request.tenant, self._effective_class(sequence)
        if one == two or at is None:
            return self._is_due_before(sequence, other)
        return at.counter(self._tenant(one)) < at.counter(self._tenant(two))

    def debt(self, tenant: str, priority: int | None = None) -> float:
        known = self._tenants.get(tenant)
        if known is None:
            return 0.0
        return max((each.debt(known) for each in self._classes if priority in (None, each.priority)), default=0.0)

    def position(self, sequence: Sequence, now: float) -> int:
        """Assumes that each sequence is charged its uncomputed tokens when it is admitted."""
        if sequence not in self._waiting:
            raise KeyError(sequence.id)
        self._now = max(self._now, now)
        effective = {other: self._effective_class(other) for other in self._waiting}
        mine = effective[sequence]
        assert mine is not None
        num_ahead = 0
        peers: dict[str, list[Sequence]] = {}
        for other, level in effective.items():
            if level is mine:
                peers.setdefault(other.request.tenant, []).append(other)
            elif level is not None and level.rank > mine.rank:
                num_ahead += 1
        return num_ahead + self._turns_of(peers, mine).index(sequence)

    # Order.

    def _urgency(self, sequence: Sequence) -> Urgency:
        return self._due(sequence, sequence.first_token_due)

    def _urgency_without_prompt(self, sequence: Sequence) -> Urgency:
        return self._due(sequence, sequence.request.arrived_at)

    def _is_due_before(self, one: Sequence, other: Sequence) -> bool:
        """Of sequences of a tenant one or both of which have risen to a class. Their prompts do not matter: of those of
        a lower class only the oldest is compared, and a long one must not hold back those after it.
        """
        return self._urgency_without_prompt(one) < self._urgency_without_prompt(other)

    def _due(self, sequence: Sequence, first_token_due: float) -> Urgency:
        return (sequence.request.due_by(first_token_due + self._horizon), *arrival_order(sequence))

    def _rises_at(self, sequence: Sequence, num_classes: int) -> float:
        return sequence.ages_from + num_classes * self._ageing_seconds

    def _candidate(self, tenant: TenantQueues, top: FairClass) -> Sequence:
        """The sequence of a tenant with a turn: the most urgent of the class and of those that rose to it."""
        best = tenant.most_urgent(top.priority)
        for priority, oldest in tenant.oldest_below(top.priority):
            if self._rises_at(oldest, top.rank - self._rank(priority)) <= self._now and (
                best is None or self._is_due_before(oldest, best)
            ):
                best = oldest
        assert best is not None, "a tenant has a turn but no sequence"
        return best

    def _top_at(self, now: float) -> FairClass | None:
        """The highest class with queued sequences, in which all that have risen to it by now have their turns."""
        self._now = max(self._now, now)
        top = self._top()
        if top is not None:
            while (due := top.not_eligible.first()) is not None and due[0] <= self._now:
                self._update_turn(due[1], top)
        return top

    def _update_turn(self, tenant: TenantQueues, at: FairClass) -> None:
        """Gives a tenant a turn in a class if one of its sequences is eligible there, else notes when one will be."""
        eligible_at = self._eligible_at(tenant, at)
        if eligible_at is None or eligible_at <= self._now:
            at.not_eligible.discard(tenant)
        else:
            at.not_eligible.put(tenant, eligible_at)
        if eligible_at is not None and eligible_at <= self._now:
            at.enter(tenant)
        else:
            at.leave(tenant)

    def _eligible_at(self, tenant: TenantQueues, at: FairClass) -> float | None:
        """When the first sequence of a tenant counts in a class; now if one does; None if none will."""
        if tenant.waits_in(at.priority):
            return self._now
        below = tenant.oldest_below(at.priority)
        return min((self._rises_at(oldest, at.rank - self._rank(priority)) for priority, oldest in below), default=None)

    def _effective_class(self, sequence: Sequence) -> FairClass | None:
        """The class in which a sequence counts now; None if its own is not in use, and it has not risen to another."""
        classes, priority = self._classes, sequence.request.priority
        if len(classes) == 1 and classes[0].priority == priority:
            return classes[0]
        top = self._top() or (classes[-1] if classes else None)
        if top is None:
            return None
        own = self._waiting.get(sequence) or self._class_of(priority)
        rank = own.rank if own is not None else bisect_left(classes, priority, key=_PRIORITY) - 1
        risen = min(rank + int(sequence.seconds_waited(self._now) / self._ageing_seconds), top.rank)
        return classes[risen] if risen > rank else own

    def _turns_of(self, queues: dict[str, list[Sequence]], at: FairClass) -> list[Sequence]:
        """The queued sequences of a class, by tenant, in the order of their turns."""

        def urgency(sequence: Sequence) -> Urgency:
            return (self._urgency if self._waiting[sequence] is at else self._urgency_without_prompt)(sequence)

        left = {name: sorted(queue, key=urgency, reverse=True) for name, queue in queues.items()}
        turns = [(at.turn(self._tenants[name]), name) for name in left]
        heapify(turns)
        order: list[Sequence] = []
        while turns:
            (counter, _, entered), name = turns[0]
            sequence = left[name].pop()
            order.append(sequence)
            if left[name]:
                counter += max(1, sequence.num_uncomputed) / max(sequence.request.weight, _MIN_WEIGHT)
                heapreplace(turns, ((counter, self._num_charges + len(order), entered), name))
            else:
                heappop(turns)
        return order

    # Classes and tenants.

    def _top(self) -> FairClass | None:
        return next((each for each in reversed(self._classes) if each.num_waiting), None)

    def _rank(self, priority: int) -> int:
        return bisect_left(self._classes, priority, key=_PRIORITY)

    def _nearest(self, priority: int) -> FairClass:
        return self._classes[max(0, bisect_right(self._classes, priority, key=_PRIORITY) - 1)]

    def _class_of(self, priority: int) -> FairClass | None:
        """The class of a priority; None if it is not in use."""
        nearest = self._nearest(priority)
        return nearest if nearest.priority == priority or len(self._classes) == MAX_CLASSES else None

    def _class_for(self, priority: int) -> FairClass:
        known = self._class_of(priority) if self._classes else None
        if known is not None:
            return known
        new = FairClass(priority)
        insort(self._classes, new, key=_PRIORITY)
        self._renumber_classes()
        return new

    def _retire_classes(self) -> None:
        """Forgets classes without requests, so that no request has to rise through them."""
        if self._now < self._swept_at + self._ageing_seconds:
            return
        self._swept_at = self._now
        kept = [each for each in self._classes if each.num_waiting or not self._is_idle(each.used_at)]
        if len(kept) < len(self._classes):
            self._classes = kept
            self._renumber_classes()

    def _is_idle(self, used_at: float) -> bool:
        return used_at < self._now - _IDLE_AGEINGS * self._ageing_seconds

    def _renumber_classes(self) -> None:
        """The classes have changed, and with them when requests rise. O(tenants × classes), and rare."""
        for rank, each in enumerate(self._classes):
            each.rank = rank
        for tenant in self._tenants.values():
            if tenant.waits:
                for each in self._classes:
                    self._update_turn(tenant, each)

    def _tenant(self, name: str) -> TenantQueues:
        known = self._tenants.get(name)
        if known is not None:
            return known
        if len(self._tenants) >= self._max_tenants:
            self._forget_tenants()
        tenant = self._tenants[name] = TenantQueues(name)
        return tenant

    def _forget_tenants(self) -> None:
        """Forgets idle tenants, also with debt: where each comes once, the smallest counter never reaches theirs."""
        for tenant in list(self._tenants.values()):
            if tenant.waits:
                continue
            if self._is_idle(tenant.used_at) or all(each.owes_nothing(tenant) for each in self._classes):
                for each in self._classes:
                    each.forget(tenant)
                del self._tenants[tenant.name]
        self._max_tenants = max(64, 2 * len(self._tenants))
