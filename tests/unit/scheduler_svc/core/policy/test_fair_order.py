"""`fair` against a plain account of its rule that looks at everything each time.

A tenant that enters or leaves a class can change the counter at which the next one enters it. So the account updates
tenants in the order of the rule: those that rise by the time at which they do, all others as they were first known.
"""

from dataclasses import dataclass, field

from hypothesis import example, given, settings
from hypothesis import strategies as st

from scheduler_svc.core.policy import FairPolicy, PolicySettings
from scheduler_svc.core.policy.fair_class import CREDIT_TOKENS
from scheduler_svc.core.request import FIRST_TOKEN_FACTOR, Request, Sequence

AGEING, HORIZON = 10.0, 15.0
LAST = 79.0  # classes are forgotten after eight times AGEING, which the account does not know


@dataclass
class Account:
    """The rule of `fair`, without any structure that makes it fast."""

    waiting: list[Sequence] = field(default_factory=list)
    tenants: list[str] = field(default_factory=list)
    classes: set[int] = field(default_factory=set)
    served: dict[str, float] = field(default_factory=dict)
    offsets: dict[tuple[int, str], float] = field(default_factory=dict)
    turns: dict[int, set[str]] = field(default_factory=dict)
    min_counters: dict[int, float] = field(default_factory=dict)
    largest_min_counters: dict[int, float] = field(default_factory=dict)
    rises: dict[tuple[int, str], tuple[float, int]] = field(default_factory=dict)  # when, and when that was noted
    num_noted: int = 0

    def add(self, sequence: Sequence, now: float) -> None:
        priority, tenant = sequence.request.priority, sequence.request.tenant
        if priority not in self.classes:
            self.classes.add(priority)
            for other in self.tenants:
                if any(s.request.tenant == other for s in self.waiting):
                    self.update_turns(other, now, min(self.classes))
        self.know(tenant)
        self.waiting.append(sequence)
        self.update_turns(tenant, now, priority)

    def remove(self, sequence: Sequence, now: float) -> None:
        self.waiting.remove(sequence)
        self.update_turns(sequence.request.tenant, now, sequence.request.priority)

    def charge(self, sequence: Sequence, num_tokens: int) -> None:
        tenant = sequence.request.tenant
        self.know(tenant)
        self.served[tenant] = self.served.get(tenant, 0.0) + num_tokens / sequence.request.weight

    def first(self, now: float) -> list[Sequence]:
        """The sequences that may be first: of tenants with the same counter, each."""
        turns = self.next_of_tenants(now)
        return [sequence for sequence, counter in turns.items() if counter == min(turns.values())]

    def next_of_tenants(self, now: float) -> dict[Sequence, float]:
        """The next sequence of each tenant of the highest class, and the tenant's counter there."""
        if not self.waiting:
            return {}
        top = max(s.request.priority for s in self.waiting)
        risen = [(when, tenant) for (each, tenant), when in self.rises.items() if each == top and when[0] <= now]
        for _, tenant in sorted(risen):
            self.update_turns(tenant, now, top, top)
        self.min_counter(top)
        return {self.candidate(t, top, now): self.counter(t, top) for t in self.turns[top]}

    def know(self, tenant: str) -> None:
        if tenant not in self.tenants:
            self.tenants.append(tenant)

    def update_turns(self, tenant: str, now: float, lowest: int, highest: int = 2**31) -> None:
        for each in [c for c in self.classes if lowest <= c <= highest]:
            turns = self.turns.setdefault(each, set())
            least = self.min_counter(each)
            self.rises.pop((each, tenant), None)
            if not self.runnable(tenant, each, now):
                turns.discard(tenant)
                if lower := self.rising(tenant, each):
                    self.num_noted += 1
                    self.rises[each, tenant] = (min(when for when, _ in lower), self.num_noted)
            elif tenant not in turns:
                floor = self.largest_min_counters[each] - CREDIT_TOKENS
                lifted = max(self.counter(tenant, each), floor) if (each, tenant) in self.offsets else least
                self.offsets[each, tenant] = lifted - self.served.get(tenant, 0.0)
                turns.add(tenant)

    def min_counter(self, each: int) -> float:
        counters = [self.counter(tenant, each) for tenant in self.turns.get(each, ())]
        least = self.min_counters[each] = min(counters, default=self.min_counters.get(each, 0.0))
        self.largest_min_counters[each] = max(self.largest_min_counters.get(each, 0.0), least)
        return self.min_counters[each]

    def counter(self, tenant: str, each: int) -> float:
        return self.served.get(tenant, 0.0) + self.offsets.get((each, tenant), 0.0)

    def runnable(self, tenant: str, each: int, now: float) -> list[Sequence]:
        """A tenant's own of a class, and of each class below the oldest, if it has waited long enough."""
        own = [s for s in self.waiting if (s.request.tenant, s.request.priority) == (tenant, each)]
        return own + [oldest for when, oldest in self.rising(tenant, each) if when <= now]

    def rising(self, tenant: str, each: int) -> list[tuple[float, Sequence]]:
        """The oldest sequence of a tenant in each class below, and when it rises to this one."""
        mine = [s for s in self.waiting if s.request.tenant == tenant]
        found = []
        for lower in {s.request.priority for s in mine if s.request.priority < each}:
            oldest = min(
                (s for s in mine if s.request.priority == lower), key=lambda s: (s.request.arrived_at, s.arrival)
            )
            steps = len([c for c in self.classes if lower < c <= each])
            found.append((oldest.request.arrived_at + steps * AGEING, oldest))
        return found

    def candidate(self, tenant: str, each: int, now: float) -> Sequence:
        """Of its own class the one that is due first; between classes the lengths of prompts do not matter."""
        able = self.runnable(tenant, each, now)
        own = [s for s in able if s.request.priority == each]
        risen = [s for s in able if s.request.priority != each]
        return min([*([min(own, key=urgency)] if own else []), *risen], key=urgency_without_prompt)


def urgency(sequence: Sequence) -> tuple[float, float, int]:
    return due(sequence, FIRST_TOKEN_FACTOR * sequence.prompt_seconds)


def urgency_without_prompt(sequence: Sequence) -> tuple[float, float, int]:
    return due(sequence, 0.0)


def due(sequence: Sequence, prompt_seconds: float) -> tuple[float, float, int]:
    request = sequence.request
    at = request.arrived_at + prompt_seconds + HORIZON
    return (min(at, at if request.deadline is None else request.deadline), request.arrived_at, sequence.arrival)


REQUESTS = st.tuples(
    st.sampled_from("abc"),
    st.sampled_from([-7, 0, 1, 2**31 - 1]),
    st.sampled_from([0.5, 1.0, 2.0]),
    st.none() | st.integers(0, 40),
    st.sampled_from([0.0, 0.5, 3.0]),
)
OPERATIONS = st.lists(
    st.one_of(
        st.tuples(st.just("come"), REQUESTS),
        st.tuples(st.just("come"), REQUESTS),
        st.tuples(st.just("take"), st.integers(0, 30)),
        st.tuples(st.just("leave"), st.integers(0, 30)),
        st.tuples(st.just("return"), st.integers(0, 30)),
        st.tuples(st.just("serve"), st.integers(0, 30)),
        st.tuples(st.just("pass"), st.integers(1, 12)),
    ),
    max_size=60,
)


@settings(max_examples=300)
@given(OPERATIONS)
@example([("come", ("a", 0, 1.0, None, 0.0)), ("serve", 0), ("come", ("b", 0, 1.0, None, 0.0))])
def test_order_is_that_of_the_account(operations: list[tuple[str, object]]) -> None:
    policy, account = FairPolicy(PolicySettings(AGEING, HORIZON)), Account()
    sequences: list[Sequence] = []
    now = 0.0
    for operation, value in operations:
        if isinstance(value, tuple):
            tenant, priority, weight, time_left, prompt_seconds = value
            deadline = None if time_left is None else now + time_left
            request = Request(
                "", [1], 1, 1, priority=priority, tenant=tenant, weight=weight, arrived_at=now, deadline=deadline
            )
            number = len(sequences)
            sequences.append(Sequence(number, request, 0, number, [1], prompt_seconds=prompt_seconds))
            policy.add(sequences[-1], now)
            account.add(sequences[-1], now)
        elif operation == "pass":
            assert isinstance(value, int)
            now = min(LAST, now + value)
        elif sequences:
            assert isinstance(value, int)
            sequence = sequences[value % len(sequences)]
            if operation == "serve":
                policy.charge(sequence, value)
                account.charge(sequence, value)
            elif operation == "return" and sequence not in account.waiting:
                policy.add(sequence, now)
                account.add(sequence, now)
            elif operation == "leave" and sequence in account.waiting:
                policy.remove(sequence)
                account.remove(sequence, now)
        may_go = account.first(now)
        first = policy.first(now)
        assert first in may_go if may_go else first is None
        assert policy.first(now) is first, "it goes first until something changes"
        assert len(policy) == len(account.waiting)
        counters, turns = account.next_of_tenants(now), list(policy.turns(now))
        assert turns[:1] == ([] if first is None else [first])
        assert set(turns) == counters.keys()
        assert [counters[sequence] for sequence in turns] == sorted(counters.values())
        if operation == "take" and first is not None:
            assert isinstance(value, int)
            policy.remove(first)
            account.remove(first, now)
            policy.charge(first, value)
            account.charge(first, value)
