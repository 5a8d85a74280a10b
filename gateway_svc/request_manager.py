"""What both protocols share: admits calls, resolves what they ask for, and has it run."""

import asyncio
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from enum import Enum

from opentelemetry.context import Context

from gateway_svc.auth import Tenant
from gateway_svc.field_paths import FieldPath
from gateway_svc.metrics import GatewayMetrics
from gateway_svc.rendering import Rendering
from gateway_svc.request_errors import RETRY_AFTER_SECONDS
from gateway_svc.request_group import RequestGroup
from gateway_svc.running_request import GenerateCall, RunningRequest
from gateway_svc.sequence_output import ResumePosition
from gateway_svc.session import SchedulerSession
from gateway_svc.tokenizer import ModelTokenizer
from gateway_svc.tracing import GenerationSpan, Operation
from gateway_svc.unvalidated_request import GenerationDefaults, UnvalidatedRequest
from gateway_svc.validated_request import ModelInfo, ValidatedRequest
from gateway_svc.validation import Validator
from svc_common.errors import QuireError, Reason
from svc_common.keys import cache_salt, request_key


@dataclass(frozen=True, slots=True)
class Call:
    """One call of a client. `deadline` and `arrival_time` are on the monotonic clock, in seconds."""

    tenant: Tenant
    operation: Operation
    deadline: float | None = None
    parent: Context | None = None
    arrival_time: float = field(default_factory=time.monotonic)


class _Admission(Enum):
    OPEN = "open"
    DRAINING = "draining"


class RequestManager:
    """The gateway without its protocols."""

    def __init__(
        self,
        tokenizer: ModelTokenizer,
        session: SchedulerSession,
        metrics: GatewayMetrics,
        defaults: GenerationDefaults | None = None,
    ) -> None:
        self.tokenizer = tokenizer
        self.validator = Validator(tokenizer, defaults)
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
    def is_durable(self) -> bool:
        """Whether a request that came now would outlive its scheduler."""
        return not self._session.is_store_degraded

    @property
    def model(self) -> ModelInfo:
        """The model that is served. Raises QuireError where none is ready."""
        if self._session.model is None:
            raise QuireError(Reason.MODEL_NOT_READY, "the model is not ready", retry_after=RETRY_AFTER_SECONDS)
        return self._session.model

    def admit(self) -> None:
        """Refuses new work while draining."""
        if self._admission is _Admission.DRAINING:
            raise _draining()

    async def validate(
        self, unvalidated: UnvalidatedRequest, field_path: FieldPath, generated_id: str
    ) -> ValidatedRequest:
        """Validates one prompt of a call; `generated_id` is for a request that its client did not name.

        Raises QuireError.
        """
        self.admit()
        return await self.validator.generation(unvalidated, self.model, field_path, generated_id)

    @contextmanager
    def run(
        self,
        call: Call,
        generations: Sequence[ValidatedRequest],
        resume_positions: Sequence[Mapping[int, ResumePosition]] = (),
    ) -> Iterator[RequestGroup]:
        """Has the requests of one call run, or joins those that run under its names, while the block lasts.

        `resume_positions` says of each, by index, how far the client has its sequences. Raises QuireError.
        """
        self.admit()
        with self._run_group(
            call,
            [
                self._generate_call(
                    call, prompt_index, generation, resume_positions[prompt_index] if resume_positions else {}
                )
                for prompt_index, generation in enumerate(generations)
            ],
        ) as group:
            yield group

    @contextmanager
    def resume(
        self, call: Call, request_id: str, resume_positions: Mapping[int, ResumePosition]
    ) -> Iterator[RequestGroup]:
        """Goes on with a tenant's request while the block lasts. Raises QuireError."""
        self.admit()
        name = call.tenant.name
        generate_call = GenerateCall(request_key(name, request_id), name, request_id, resume_positions=resume_positions)
        with self._run_group(
            call, [(generate_call, GenerationSpan(call.operation.value, request_id, call.parent))]
        ) as group:
            yield group

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
                request.give_up(_draining())

    @contextmanager
    def _run_group(self, call: Call, calls: Sequence[tuple[GenerateCall, GenerationSpan]]) -> Iterator[RequestGroup]:
        wake = asyncio.Event()
        requests = [
            RunningRequest(
                generate_call,
                session=self._session,
                vocabulary=self.tokenizer.vocabulary,
                metrics=self.metrics,
                span=span,
                arrival_time=call.arrival_time,
                wake=wake,
            )
            for generate_call, span in calls
        ]
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

    def _generate_call(
        self,
        call: Call,
        prompt_index: int,
        generation: ValidatedRequest,
        resume_positions: Mapping[int, ResumePosition],
    ) -> tuple[GenerateCall, GenerationSpan]:
        span = GenerationSpan.of(generation, call.operation, call.parent)
        rendering = Rendering.of(generation, self.tokenizer.vocabulary)
        submit = generation.to_proto(rendering.to_proto())
        submit.key = request_key(call.tenant.name, generation.request_id, prompt_index)
        submit.tenant = call.tenant.name
        submit.weight = call.tenant.weight
        submit.cache_salt = cache_salt(call.tenant.name)
        submit.traceparent = span.traceparent
        submit.is_resumption = any(not start.is_beginning for start in resume_positions.values())
        generate_call = GenerateCall(
            submit.key,
            call.tenant.name,
            generation.request_id,
            submit,
            rendering,
            resume_positions,
            field_path=generation.field_path,
        )
        return generate_call, span


def _draining() -> QuireError:
    return QuireError(Reason.DRAINING, "the gateway is shutting down", retry_after=RETRY_AFTER_SECONDS)
