"""The gateway without its protocols: admits calls, builds their requests, and runs them."""

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import replace
from enum import Enum
from typing import Any, TypeVar

from gateway_svc import request_errors
from gateway_svc.change_signal import ChangeSignal
from gateway_svc.classifications import UnvalidatedClassifications
from gateway_svc.client_call import Call, counted_call, limit_priority, set_caller
from gateway_svc.embedding_validation import validate_classifications, validate_embeddings
from gateway_svc.embeddings import UnvalidatedEmbeddings
from gateway_svc.field_paths import FieldPath
from gateway_svc.loop_yield import LoopYield
from gateway_svc.metrics import GatewayMetrics
from gateway_svc.model_catalog import CatalogModel, ModelCatalog
from gateway_svc.rendering import Rendering
from gateway_svc.request_errors import RETRY_AFTER_SECONDS
from gateway_svc.request_group import RequestGroup, SubscribedGroup, ValueGroup
from gateway_svc.resume_position import ResumePosition
from gateway_svc.retention import NONE as NOT_RECORDED
from gateway_svc.retention import Retention, RetentionRules
from gateway_svc.running_request import GenerateCall, RunningRequest
from gateway_svc.running_value import RunningValue
from gateway_svc.score_validation import validate_scores
from gateway_svc.scores import UnvalidatedScores, ValidatedScores
from gateway_svc.session import MemoryPressure, SchedulerSession
from gateway_svc.tenant import Tenant
from gateway_svc.tracing import GenerationSpan
from gateway_svc.unvalidated_request import Prompt, UnvalidatedRequest
from gateway_svc.validated_request import ModelInfo, ValidatedRequest
from gateway_svc.validated_value import ValidatedValue
from quire.scheduler.v1 import scheduler_pb2
from svc_common.errors import QuireError, Reason
from svc_common.keys import request_key

G = TypeVar("G", bound=SubscribedGroup[Any])
M = TypeVar("M", RunningRequest, RunningValue)
P = TypeVar("P", ValidatedRequest, ValidatedValue)
V = TypeVar("V", UnvalidatedEmbeddings, UnvalidatedClassifications, UnvalidatedScores)


class _Admission(Enum):
    OPEN = "open"
    DRAINING = "draining"


class RequestManager:
    """Runs the calls of both protocols over one session."""

    def __init__(
        self, catalog: ModelCatalog, session: SchedulerSession, metrics: GatewayMetrics, retention: RetentionRules
    ) -> None:
        self.catalog = catalog
        self._retention = retention
        self.metrics = metrics
        self._session = session
        self._admission = _Admission.OPEN
        self._failure: QuireError | None = None  # why no call runs any more
        self._groups: set[SubscribedGroup[Any]] = set()
        self._idle = asyncio.Event()
        self._idle.set()

    @property
    def is_ready(self) -> bool:
        """Whether a request for at least one of the models would be accepted now."""
        return self._admission is _Admission.OPEN and bool(self._session.models)

    @property
    def is_durable(self) -> bool:
        """Whether a request that is accepted now survives its scheduler."""
        return not self._session.is_store_degraded

    @property
    def memory_pressure(self) -> MemoryPressure:
        """How short memory is at the worker of the ready models where it is shortest."""
        return self._session.memory_pressure

    @property
    def num_workers_set_apart(self) -> int:
        """Workers that get no steps until they are restarted."""
        return self._session.num_workers_set_apart

    def ready_models(self, tenant: Tenant) -> list[tuple[CatalogModel, ModelInfo]]:
        """The models that are ready, of those that a key may use. Raises QuireError where none at all is ready."""
        ready = self._session.models
        if not ready:
            raise request_errors.no_model_ready()
        return [
            (model, ready[model.name]) for model in self.catalog if model.name in ready and tenant.may_use(model.names)
        ]

    def model_info(self, model: CatalogModel) -> ModelInfo:
        """The scheduler's description of a model. Raises QuireError where it is not ready."""
        if (info := self._session.models.get(model.name)) is None:
            raise request_errors.model_not_ready(model.name)
        return info

    def admit(self) -> None:
        """Raises QuireError while the gateway drains, and after `give_up`."""
        self._check()
        if self._admission is _Admission.DRAINING:
            raise _draining()

    async def validate(
        self,
        call: Call,
        model: CatalogModel,
        unvalidated: UnvalidatedRequest,
        field_path: FieldPath,
        generated_id: str,
    ) -> ValidatedRequest:
        """Validates the prompt of a call with one: as `validate_prompts`."""
        prompts = [(unvalidated.prompt, field_path)]
        (one,) = await self.validate_prompts(call, model, unvalidated, prompts, generated_id)
        return one

    async def validate_prompts(
        self,
        call: Call,
        model: CatalogModel,
        unvalidated: UnvalidatedRequest,
        prompts: Sequence[tuple[Prompt | None, FieldPath]],
        generated_id: str,
    ) -> list[ValidatedRequest]:
        """Validates the prompts of a call, which replace that of `unvalidated`; fields are spelled by the paths beside
        them. `generated_id` names the requests where their client did not.

        Raises QuireError.
        """
        field_path = prompts[0][1]
        self.admit()
        info = self.model_info(model)
        limited = replace(unvalidated, priority=limit_priority(unvalidated.priority, call.tenant, field_path))
        retention = self._retention.resolve(
            unvalidated.retention,
            is_named=unvalidated.request_id is not None,
            limit=call.tenant.retention,
            field_path=field_path,
        )
        validated = await model.validator.generations(limited, prompts, info, generated_id, call.tenant.name)
        return [replace(one, retention=retention) for one in validated]

    async def validate_embeddings(
        self, call: Call, model: CatalogModel, unvalidated: UnvalidatedEmbeddings, request_id: str
    ) -> list[ValidatedValue]:
        """Validates the inputs of a call for embeddings. Raises QuireError."""
        info = self._admit_to(model)
        limited, retention = self._limit(unvalidated, call.tenant)
        return await validate_embeddings(
            limited, model.tokenizer, info, request_id=request_id, retention=retention, tenant=call.tenant.name
        )

    async def validate_classifications(
        self, call: Call, model: CatalogModel, unvalidated: UnvalidatedClassifications, request_id: str
    ) -> list[ValidatedValue]:
        """Validates the inputs of a call for classifications. Raises QuireError."""
        info = self._admit_to(model)
        limited, retention = self._limit(unvalidated, call.tenant)
        return await validate_classifications(
            limited,
            model.tokenizer,
            info,
            model.labels,
            request_id=request_id,
            retention=retention,
            tenant=call.tenant.name,
        )

    async def validate_scores(
        self, call: Call, model: CatalogModel, unvalidated: UnvalidatedScores, request_id: str
    ) -> ValidatedScores:
        """Validates the pairs of a call for scores. Raises QuireError."""
        info = self._admit_to(model)
        limited, retention = self._limit(unvalidated, call.tenant)
        return await validate_scores(
            limited,
            model.tokenizer,
            info,
            model.pairs,
            model.labels,
            request_id=request_id,
            retention=retention,
            tenant=call.tenant.name,
            body=call.body,
        )

    @asynccontextmanager
    async def run(
        self,
        call: Call,
        generations: Sequence[ValidatedRequest],
        resume_positions: Sequence[Mapping[int, ResumePosition]] = (),
    ) -> AsyncIterator[RequestGroup]:
        """Runs the requests of one call, or joins those that run under their names, until the block ends.

        `resume_positions` are the client's positions in the sequences of each request, by index. Raises QuireError.
        """
        self.admit()
        self._session.records.check_protocol(max((one.session_protocol for one in generations), default=1))
        part_of, signal = counted_call(generations, call.tenant), ChangeSignal()

        def request(prompt_index: int, generation: ValidatedRequest) -> RunningRequest:
            positions = resume_positions[prompt_index] if resume_positions else {}
            generate_call, span = self._generate_call(call, part_of, prompt_index, generation, positions)
            return self._running(call, generate_call, span, signal)

        with self._until_end(RequestGroup(signal)) as group:
            await self._submit(call, group, generations, request)
            yield group

    @asynccontextmanager
    async def run_values(self, call: Call, values: Sequence[ValidatedValue]) -> AsyncIterator[ValueGroup]:
        """Runs the requests of a call for values until the block ends. Raises QuireError."""
        self.admit()
        self._session.records.check_protocol(max(one.session_protocol for one in values))
        part_of = counted_call(values, call.tenant)
        signal = ChangeSignal()
        span = GenerationSpan.of_values(values, call.operation, call.parent)
        # A trace has the first and the last of its prompts in the scheduler and the worker: not thousands of spans, and
        # yet the time from when its first prompt waits until its last one is computed.
        traced = {0: span.traceparent, len(values) - 1: span.traceparent}
        metrics = self.metrics.of_model(values[0].model)

        def request(prompt_index: int, value: ValidatedValue) -> RunningValue:
            submit = self._submit_of_value(call, part_of, prompt_index, value)
            submit.traceparent = traced.get(prompt_index, "")
            return RunningValue(value, submit, metrics, signal)

        with self._until_end(ValueGroup(signal, values, call.tenant.name, span)) as group:
            await self._submit(call, group, values, request)
            yield group

    @contextmanager
    def resume(
        self, call: Call, request_id: str, resume_positions: Mapping[int, ResumePosition]
    ) -> Iterator[RequestGroup]:
        """Continues a tenant's request until the block ends. Raises QuireError."""
        self.admit()
        generate_call = GenerateCall(
            request_key(call.tenant.name, request_id),
            call.tenant,
            request_id,
            resume_positions=resume_positions,
            chunk_per_token=call.chunk_per_token,
        )
        span, signal = GenerationSpan(call.operation.value, request_id, call.parent), ChangeSignal()
        with self._until_end(RequestGroup(signal)) as group:
            group.start(self._running(call, generate_call, span, signal), self._session, call.deadline)
            call.release_body()
            yield group

    def cancel(self, tenant: Tenant, request_id: str) -> None:
        """Cancels a tenant's request, whichever gateway reads it. Raises QuireError."""
        self._session.cancel(request_key(tenant.name, request_id))

    async def look_up(self, tenant: Tenant, request_id: str) -> scheduler_pb2.Record:
        """A tenant's request as it is now, live or ended. Raises QuireError, REQUEST_UNKNOWN where there is none, or
        the key may not use its model.
        """
        record = await self._session.records.look_up(request_key(tenant.name, request_id))
        if not self.catalog.is_open_to(tenant, record.attached.render_options.model):
            raise request_errors.unknown()
        return record

    def end_at_stops(
        self, tenant: Tenant, request_id: str, submission_id: str, stop_matches: Mapping[int, int]
    ) -> None:
        """Ends a tenant's request where stop strings were found in its record. Without effect while another gateway
        reads the request, which finds them itself."""
        self._session.finish(request_key(tenant.name, request_id), submission_id, stop_matches)

    async def delete(self, tenant: Tenant, request_id: str) -> None:
        """Cancels a tenant's request, and removes its record. Raises QuireError, as `look_up` does."""
        await self._session.records.delete(request_key(tenant.name, request_id))

    async def drain(self, grace: float) -> None:
        """Rejects new calls, and waits `grace` seconds for those that run; the others then fail with DRAINING."""
        self._admission = _Admission.DRAINING
        try:
            async with asyncio.timeout(grace):
                await self._idle.wait()
        except TimeoutError:
            self.give_up(_draining())

    def give_up(self, error: QuireError) -> None:
        """Fails the calls that run, and all later ones."""
        self._failure = self._failure or error
        for group in list(self._groups):
            group.give_up(error)

    def _check(self) -> None:
        """Raises the QuireError of `give_up`, if it was called."""
        if self._failure is not None:
            raise self._failure

    def _admit_to(self, model: CatalogModel) -> ModelInfo:
        """Raises QuireError while the gateway drains, and where the model is not ready."""
        self.admit()
        return self.model_info(model)

    def _limit(self, unvalidated: V, tenant: Tenant) -> tuple[V, Retention | None]:
        """A call for values with the priority that its key allows, and how long its records are kept: by default there
        are none. Nobody can read them, and after a failure the call's gateway submits its prompts again.
        """
        field_path = unvalidated.field_path
        limited = replace(unvalidated, priority=limit_priority(unvalidated.priority, tenant, field_path))
        asked = NOT_RECORDED if unvalidated.retention is None else unvalidated.retention
        return limited, self._retention.resolve(asked, is_named=False, limit=tenant.retention, field_path=field_path)

    async def _submit(
        self, call: Call, group: SubscribedGroup[M], prompts: Sequence[P], request: Callable[[int, P], M]
    ) -> None:
        """Starts the requests of a call's prompts, which `request` makes of their indices and them. Other tasks run in
        between. Raises QuireError."""
        loop_yield = LoopYield()
        for prompt_index, prompt in enumerate(prompts):
            await loop_yield.before_prompt(len(prompt.prompt_token_ids))
            self._check()
            group.start(request(prompt_index, prompt), self._session, call.deadline)
        call.release_body()

    def _running(
        self, call: Call, generate_call: GenerateCall, span: GenerationSpan, signal: ChangeSignal
    ) -> RunningRequest:
        return RunningRequest(
            generate_call,
            catalog=self.catalog,
            metrics=self.metrics,
            span=span,
            arrival_time=call.arrival_time,
            signal=signal,
        )

    @contextmanager
    def _until_end(self, group: G) -> Iterator[G]:
        """Runs the requests of a group until the block ends."""
        with group:
            self._groups.add(group)
            self._idle.clear()
            try:
                yield group
            finally:
                self._groups.discard(group)
                if not self._groups:
                    self._idle.set()

    def _generate_call(
        self,
        call: Call,
        part_of: scheduler_pb2.CountedCall | None,
        prompt_index: int,
        generation: ValidatedRequest,
        resume_positions: Mapping[int, ResumePosition],
    ) -> tuple[GenerateCall, GenerationSpan]:
        span = GenerationSpan.of(generation, call.operation, call.parent)
        model = self.catalog.get(generation.model)
        assert model is not None, "it was validated for a model of the catalog"
        rendering = Rendering.of(generation, model.tokenizer.vocabulary)
        submit = generation.to_proto(rendering.to_proto())
        key = request_key(call.tenant.name, generation.request_id, prompt_index)
        set_caller(submit, call.tenant, key, part_of, generation.cache_salt)
        submit.tokenizer_fingerprint = model.tokenizer_fingerprint
        submit.traceparent = span.traceparent
        submit.is_resumption = any(not start.is_beginning for start in resume_positions.values())
        generate_call = GenerateCall(
            submit.key,
            call.tenant,
            generation.request_id,
            submit,
            rendering,
            resume_positions,
            call.chunk_per_token,
            generation.field_path,
        )
        return generate_call, span

    def _submit_of_value(
        self, call: Call, part_of: scheduler_pb2.CountedCall | None, prompt_index: int, value: ValidatedValue
    ) -> scheduler_pb2.Submit:
        submit = value.to_proto()
        set_caller(submit, call.tenant, request_key(call.tenant.name, value.request_id, prompt_index), part_of)
        submit.tokenizer_fingerprint = self.catalog.fingerprints[value.model]
        return submit


def _draining() -> QuireError:
    return QuireError(Reason.DRAINING, "the gateway is shutting down", retry_after=RETRY_AFTER_SECONDS)
