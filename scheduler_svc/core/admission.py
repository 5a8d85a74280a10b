"""Admission to the queue: limits in all and by tenant, and no request whose deadline cannot be met."""

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum, auto

from scheduler_svc.core.events import Failure
from scheduler_svc.core.output_lengths import OutputLengths
from scheduler_svc.core.request import Request

_LEAST_RETRY = 1.0  # seconds; a rejected request is not repeated at once
_MOST_RETRY = 300.0  # seconds; predictions beyond that mean nothing
_TENANT_SHARE = 8  # a tenant may have this many times as much waiting as is free


class Sharing(Enum):
    """Which waiting requests are served before a new one."""

    BY_ARRIVAL = auto()  # all
    BY_TENANT = auto()  # of each other tenant as many tokens as of its own, by weight


@dataclass(frozen=True, slots=True)
class AdmissionLimits:
    """The most requests and tokens that may wait. A request counts with prompt and max_tokens of each sequence."""

    max_requests: int = 16384
    max_tokens: int = 2**31
    max_tenant_requests: int = 2**31
    max_tenant_tokens: int = 2**31

    def __post_init__(self) -> None:
        for name in self.__slots__:
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1")


@dataclass(frozen=True, slots=True)
class Rates:
    """What all replicas do together, as measured; 0 if nothing is known, and then nothing is predicted."""

    tokens_per_second: float  # prefill and decode of all replicas
    prefill_seconds_per_token: float  # of one request
    decode_seconds_per_token: float  # of one request, in a step with the others that run


@dataclass(frozen=True, slots=True)
class AdmissionRefusal:
    """Why a request is rejected. `retry_after` is in seconds, None if a later try would be rejected, too."""

    failure: Failure
    message: str
    retry_after: float | None = None


@dataclass(slots=True)
class _QueueLoad:
    """What waits, of one tenant or in all."""

    num_requests: int = 0
    num_tokens: int = 0
    expected: float = 0.0  # tokens, with outputs of the usual length
    weight: float = 1.0

    def add(self, sign: int, num_tokens: int, expected: float) -> None:
        self.num_requests += sign
        self.num_tokens += sign * num_tokens
        self.expected += sign * expected


class Admission:
    """Counts queued requests and rejects those beyond the limits.

    O(1); predictions by tenant are O(tenants with queued requests).
    """

    def __init__(self, limits: AdmissionLimits, sharing: Sharing, lengths: OutputLengths | None = None) -> None:
        self._limits = limits
        self._lengths = lengths or OutputLengths()
        self._sharing = sharing
        self._total = _QueueLoad()
        self._tenants: dict[str, _QueueLoad] = {}
        self._num_of_account: Counter[str] = Counter()  # requests that wait
        self._waiting: dict[str, tuple[Request, float]] = {}  # by key, with expected tokens

    @property
    def num_requests(self) -> int:
        """Requests that wait."""
        return self._total.num_requests

    def num_requests_of(self, tenant: str) -> int:
        """The same of one tenant."""
        return self._tenants[tenant].num_requests if tenant in self._tenants else 0

    @property
    def num_tokens(self) -> int:
        """The most tokens that waiting requests may have."""
        return self._total.num_tokens

    def check(
        self,
        request: Request,
        now: float,
        context_length: int,
        rates: Rates,
        slot_seconds: Callable[[Request], float],
        budget_seconds: float = 0.0,
    ) -> AdmissionRefusal | None:
        """Why a request may not wait, or None.

        `context_length` is 0 if there was no replica yet. `slot_seconds` predicts when a slot is there for a request.
        Its account cannot pay for it for `budget_seconds`.
        """
        return (
            self.check_size(request, request.max_length, context_length)
            or _refuse_costly(request)
            or self._check_account(request, rates)
            or self._check_room(request, rates)
            or self._check_deadline(request, now, rates, slot_seconds, budget_seconds)
        )

    def enter(self, request: Request) -> None:
        """A request waits. A preempted one counts, too, and is not rejected. Does nothing if it waits already."""
        if request.key in self._waiting:
            return
        expected = self.expected_tokens(request)
        self._waiting[request.key] = (request, expected)
        tenant = self._tenants.setdefault(request.tenant, _QueueLoad())
        tenant.weight = request.weight
        for load in (self._total, tenant):
            load.add(1, num_tokens(request), expected)
        self._num_of_account[request.limits.account] += 1

    def leave(self, request: Request) -> None:
        """A request waits no more. Does nothing if it did not wait."""
        if request.key not in self._waiting:
            return
        request, expected = self._waiting.pop(request.key)
        tenant = self._tenants[request.tenant]
        for load in (self._total, tenant):
            load.add(-1, num_tokens(request), expected)
        if not tenant.num_requests:
            del self._tenants[request.tenant]
        self._num_of_account[request.limits.account] -= 1
        if not self._num_of_account[request.limits.account]:
            del self._num_of_account[request.limits.account]

    def observe_end(self, request: Request, num_output: int) -> None:
        """A sequence ended by itself with `num_output` output tokens: update the usual length."""
        self._lengths.observe(request, num_output)

    def expected_output(self, request: Request) -> float:
        """The expected output tokens of each of a request's sequences."""
        return self._lengths.expected(request)

    def expected_tokens(self, request: Request) -> float:
        """The tokens that a request is expected to compute: its prompt once, and its outputs."""
        return len(request.prompt) + _num_sequences(request) * self.expected_output(request)

    def predicted_wait(self, request: Request, rates: Rates, slot_seconds: float = 0.0) -> float | None:
        """Seconds from now until a request would run, whether it waits already or not; None if unknown.

        `slot_seconds` are those until a slot is there for its tenant.
        """
        if not rates.tokens_per_second:
            return None
        return slot_seconds + self._tokens_ahead(request) / rates.tokens_per_second

    def _tokens_ahead(self, request: Request) -> float:
        if self._sharing is Sharing.BY_ARRIVAL:
            return self._total.expected - self._waiting.get(request.key, (request, 0.0))[1]
        own = self._tenants.get(request.tenant, _QueueLoad())
        ahead = own.expected - self._waiting.get(request.key, (request, 0.0))[1]
        # Until it runs, each other tenant is served by its weight as much as its own, the request itself included.
        share = (ahead + self.expected_tokens(request)) / request.weight
        others = (load for name, load in self._tenants.items() if name != request.tenant)
        return ahead + sum(min(load.expected, share * load.weight) for load in others)

    def check_size(self, request: Request, length: int, context_length: int) -> AdmissionRefusal | None:
        """Why a request of which a sequence needs room for `length` tokens is too long ever to run, or None."""
        if context_length and length > context_length:
            message = f"prompt and max_tokens exceed the context of {context_length} tokens"
            return AdmissionRefusal(Failure.CONTEXT_LENGTH_EXCEEDED, message)
        most = min(self._limits.max_tokens, self._limits.max_tenant_tokens)
        if num_tokens(request) > most:
            return AdmissionRefusal(
                Failure.TOO_MANY_TOKENS,
                f"prompt and max_tokens, of all its sequences, exceed the {most} tokens that may wait",
            )
        return None

    def _check_account(self, request: Request, rates: Rates) -> AdmissionRefusal | None:
        limits = request.limits
        num_waiting = self._num_of_account[limits.account]
        if limits.max_queued is None or num_waiting < limits.max_queued:
            return None
        message = f"{num_waiting} requests of this account wait, and max_queued of its API keys is {limits.max_queued}"
        tenant = self._tenants.get(request.tenant, _QueueLoad())
        # While one request of the tenant is served, those of other tenants are, too.
        wait = min(tenant.expected / max(1, tenant.num_requests) * len(self._tenants), self._total.expected)
        return AdmissionRefusal(Failure.TENANT_OVER_QUOTA, message, _retry_after(wait, rates))

    def _check_room(self, request: Request, rates: Rates) -> AdmissionRefusal | None:
        limits = self._limits
        refusal = self._check_tenant(request, rates, limits.max_tenant_requests, limits.max_tenant_tokens)
        if refusal is not None:
            return refusal
        excess = _excess(self._total, limits.max_requests, limits.max_tokens, request)
        if excess:
            message = f"{self._total.num_requests} requests wait, with {self._total.num_tokens} tokens"
            return AdmissionRefusal(Failure.UNAVAILABLE, message, _retry_after(excess, rates))
        if self._sharing is Sharing.BY_ARRIVAL or request.tenant not in self._tenants:
            return None
        # What is free shrinks as tenants fill the queue, so some of it is left however many do.
        num_free = limits.max_requests - self._total.num_requests
        num_free_tokens = limits.max_tokens - self._total.num_tokens
        return self._check_tenant(request, rates, _TENANT_SHARE * num_free, _TENANT_SHARE * num_free_tokens)

    def _check_tenant(
        self, request: Request, rates: Rates, max_requests: int, max_tokens: int
    ) -> AdmissionRefusal | None:
        tenant = self._tenants.get(request.tenant, _QueueLoad())
        excess = _excess(tenant, max_requests, max_tokens, request)
        if not excess:
            return None
        # While one tenant's queue shrinks by so much, other tenants are served, too.
        wait = excess * max(1, len(self._tenants)) if self._sharing is Sharing.BY_TENANT else self._total.expected
        message = f"{tenant.num_requests} requests of this tenant wait, with {tenant.num_tokens} tokens"
        return AdmissionRefusal(
            Failure.TENANT_OVER_QUOTA, message, _retry_after(min(wait, self._total.expected), rates)
        )

    def _check_deadline(
        self,
        request: Request,
        now: float,
        rates: Rates,
        slot_seconds: Callable[[Request], float],
        budget_seconds: float,
    ) -> AdmissionRefusal | None:
        if request.deadline is None:
            return None
        wait = self.predicted_wait(request, rates, slot_seconds(request))
        num_output = request.least_output
        own = len(request.prompt) * rates.prefill_seconds_per_token + num_output * rates.decode_seconds_per_token
        refusal = None if wait is None else _refuse_late(request, now, wait, own)
        return refusal or refuse_unpaid(request, now, budget_seconds, own)


def _refuse_late(request: Request, now: float, wait: float, own: float, cause: str = "") -> AdmissionRefusal | None:
    """Why a request that waits for `wait` seconds, and then runs for `own`, cannot meet its deadline, or None."""
    if request.deadline is None:
        return None
    left = request.deadline - now
    if wait + own <= left:
        return None
    message = f"predicted to wait {wait:.1f} s{cause} and to run at least {own:.1f} s, with {max(0.0, left):.1f} s left"
    return AdmissionRefusal(Failure.DEADLINE_INFEASIBLE, message, _clamped(wait + own - left) if own <= left else None)


def refuse_unpaid(request: Request, now: float, seconds: float, own: float = 0.0) -> AdmissionRefusal | None:
    """Why a request that its account cannot pay for `seconds` long cannot meet its deadline, or None."""
    cause = f" for the tokens_per_minute of the key, {request.limits.tokens_per_minute},"
    return _refuse_late(request, now, seconds, own, cause) if seconds else None


def _refuse_costly(request: Request) -> AdmissionRefusal | None:
    """Why a request can never be paid from its account's tokens, or None."""
    most, search_tokens = request.limits.tokens_per_minute, request.search_tokens
    num_first = 1 if search_tokens is None else search_tokens  # tokens that are needed together with the prompt
    num_prompt = len(request.prompt)
    if most is None or num_prompt + num_first <= most:
        return None
    limit = f"more than the tokens_per_minute of the key, {most}"
    if search_tokens and num_prompt < most:
        message = f"the prompt has {num_prompt} tokens, and its beams may have {search_tokens}: {limit}"
        return AdmissionRefusal(Failure.SEARCH_TOO_WIDE, message)
    what = f"the prompt has {num_prompt} tokens" + (" and needs one for its output" if num_prompt == most else "")
    return AdmissionRefusal(Failure.PROMPT_TOO_COSTLY, f"{what}: {limit}")


def num_tokens(request: Request) -> int:
    """The most tokens that a request's sequences may have in all."""
    return _num_sequences(request) * request.max_length


def _num_sequences(request: Request) -> int:
    """How many sequences of a request run at the same time."""
    return request.n if request.beam is None else request.beam.width


def _excess(load: _QueueLoad, max_requests: int, max_tokens: int, request: Request) -> float:
    """Expected tokens that must be computed before a request may be queued with a load; 0 if it may now."""
    too_many = max(0, load.num_requests + 1 - max_requests) / max(1, load.num_requests)
    too_large = max(0, load.num_tokens + num_tokens(request) - max_tokens) / max(1, load.num_tokens)
    return max(too_many, too_large) * load.expected


def _retry_after(expected: float, rates: Rates) -> float:
    return _clamped(expected / rates.tokens_per_second if rates.tokens_per_second else _LEAST_RETRY)


def _clamped(seconds: float) -> float:
    return min(_MOST_RETRY, max(_LEAST_RETRY, seconds))
