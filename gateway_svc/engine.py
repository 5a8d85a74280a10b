"""What both protocols share: admits calls, resolves what they ask for, and has it run."""

import asyncio
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from enum import Enum

from opentelemetry.context import Context

from gateway_svc.auth import Tenant
from gateway_svc.draft import Draft
from gateway_svc.fields import Spelling
from gateway_svc.generation import Generation, ModelFacts
from gateway_svc.metrics import GatewayMetrics
from gateway_svc.running import RequestGroup, RunningRequest
from gateway_svc.session import SchedulerSession
from gateway_svc.tokenizer import ModelTokenizer
from gateway_svc.tracing import GenerationSpan, Operation
from gateway_svc.validation import Validator
from svc_common.errors import QuireError, Reason
from svc_common.keys import cache_salt, request_key

_RETRY_AFTER_SECONDS = 1.0


@dataclass(frozen=True, slots=True)
class Call:
    """One call of a client. `deadline` and `called_at` are on the monotonic clock, in seconds."""

    tenant: Tenant
    operation: Operation
    deadline: float | None = None
    parent: Context | None = None
    called_at: float = field(default_factory=time.monotonic)


class _Admission(Enum):
    OPEN = "open"
    DRAINING = "draining"


class Engine:
    """The gateway without its protocols."""

    def __init__(self, tokenizer: ModelTokenizer, session: SchedulerSession, metrics: GatewayMetrics) -> None:
        self.tokenizer = tokenizer
        self.validator = Validator(tokenizer)
        self.metrics = metrics
        self._session = session
        self._admission = _Admission.OPEN
        self._groups: set[RequestGroup] = set()
        self._idle = asyncio.Event()
        self._idle.set()

    @property
    def is_ready(self) -> bool:
        """Whether a request that came now would be taken."""
        return self._admission is _Admission.OPEN and self._session.model is not None

    @property
    def model(self) -> ModelFacts:
        """The model that is served. Raises QuireError where none is ready."""
        if self._session.model is None:
            raise QuireError(Reason.MODEL_NOT_READY, "the model is not ready", retry_after=_RETRY_AFTER_SECONDS)
        return self._session.model

    def admit(self) -> None:
        """Refuses new work while draining."""
        if self._admission is _Admission.DRAINING:
            raise QuireError(Reason.DRAINING, "the gateway is shutting down", retry_after=_RETRY_AFTER_SECONDS)

    async def resolve(self, draft: Draft, spell: Spelling, own_id: str) -> Generation:
        """Validates one prompt of a call; `own_id` is for a request that its client did not name.

        Raises QuireError.
        """
        self.admit()
        return await self.validator.generation(draft, self.model, spell, own_id)

    @contextmanager
    def run(self, call: Call, generations: Sequence[Generation]) -> Iterator[RequestGroup]:
        """Has the requests of one call run while the block lasts. Raises QuireError."""
        self.admit()
        wake = asyncio.Event()
        requests = [self._prepare(call, place, one, wake) for place, one in enumerate(generations)]
        with RequestGroup(requests, wake) as group:
            self._groups.add(group)
            self._idle.clear()
            self.metrics.in_flight.inc(len(requests))
            try:
                for request in requests:
                    request.start(call.deadline)
                yield group
            finally:
                self.metrics.in_flight.dec(len(requests))
                self._groups.discard(group)
                if not self._groups:
                    self._idle.set()

    def cancel(self, tenant: Tenant, request_id: str) -> None:
        """Ends a tenant's request, on whichever gateway it is. Raises QuireError."""
        self._session.cancel(request_key(tenant.name, request_id))

    async def drain(self, grace: float) -> None:
        """Takes no more work, and waits `grace` seconds for what runs; what is left then fails as DRAINING."""
        self._admission = _Admission.DRAINING
        try:
            async with asyncio.timeout(grace):
                await self._idle.wait()
        except TimeoutError:
            for request in [request for group in self._groups for request in group.requests]:
                request.give_up(
                    QuireError(Reason.DRAINING, "the gateway is shutting down", retry_after=_RETRY_AFTER_SECONDS)
                )

    def _prepare(self, call: Call, place: int, generation: Generation, wake: asyncio.Event) -> RunningRequest:
        span = GenerationSpan(generation, call.operation, call.parent)
        submit = generation.to_proto()
        submit.key = request_key(call.tenant.name, generation.request_id, place)
        submit.tenant = call.tenant.name
        submit.weight = call.tenant.weight
        submit.cache_salt = cache_salt(call.tenant.name)
        submit.traceparent = span.traceparent
        return RunningRequest(
            generation,
            submit,
            session=self._session,
            vocabulary=self.tokenizer.vocabulary,
            metrics=self.metrics,
            span=span,
            called_at=call.called_at,
            wake=wake,
        )
