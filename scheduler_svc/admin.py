"""quire.admin.v1.AdminService: why a request waits, and calls for operators. Served on a separate port."""

from collections.abc import Iterable, Mapping
from itertools import islice
from typing import Any, Protocol, TypeAlias

import grpc

from quire.admin.v1 import admin_pb2 as admin_v1
from quire.admin.v1.admin_pb2_grpc import AdminServiceServicer, add_AdminServiceServicer_to_server
from scheduler_svc.core.explain import Explanation, SequenceExplanation, SequenceStatus, Summary
from scheduler_svc.core.kv.cache_reset import CacheReset
from scheduler_svc.core.request import PreemptionMethod, PreemptionRecord
from scheduler_svc.core.step import MemoryPressure
from scheduler_svc.model_versions import WorkerName
from scheduler_svc.worker_profiles import ProfileAnswer, WorkerProfiles
from svc_common.durations import to_duration
from svc_common.errors import QuireError, Reason
from svc_common.identity import Identity
from svc_common.inner_ports import create_inner_server
from svc_common.keys import DEFAULT_TENANT_NAME, request_key
from svc_common.server import HealthReporter, bind, enable_reflection

DEFAULT_LIMIT = 100
MAX_LIMIT = 1_000

_SERVICE = admin_v1.DESCRIPTOR.services_by_name["AdminService"].full_name

_Context: TypeAlias = "grpc.aio.ServicerContext[Any, Any]"
_OfModel: TypeAlias = admin_v1.ResetPrefixCacheRequest | admin_v1.StartProfileRequest | admin_v1.StopProfileRequest

_STATES = {
    SequenceStatus.QUEUED: admin_v1.SEQUENCE_STATE_QUEUED,
    SequenceStatus.HELD_BACK: admin_v1.SEQUENCE_STATE_HELD_BACK,
    SequenceStatus.WAITING_FOR_PREFIX: admin_v1.SEQUENCE_STATE_WAITING_FOR_PREFIX,
    SequenceStatus.PREEMPTED: admin_v1.SEQUENCE_STATE_PREEMPTED,
    SequenceStatus.SWAPPED: admin_v1.SEQUENCE_STATE_SWAPPED,
    SequenceStatus.SWAPPING_IN: admin_v1.SEQUENCE_STATE_SWAPPING_IN,
    SequenceStatus.PAUSED: admin_v1.SEQUENCE_STATE_PAUSED,
    SequenceStatus.WAITING_FOR_TOKENS: admin_v1.SEQUENCE_STATE_WAITING_FOR_TOKENS,
    SequenceStatus.RUNNING: admin_v1.SEQUENCE_STATE_RUNNING,
    SequenceStatus.ENDED: admin_v1.SEQUENCE_STATE_ENDED,
}
_PRESSURES = {
    MemoryPressure.HIGH: admin_v1.MEMORY_PRESSURE_HIGH,
    MemoryPressure.CRITICAL: admin_v1.MEMORY_PRESSURE_CRITICAL,
}
_RETURNS = {
    PreemptionMethod.SWAP: admin_v1.RETURN_SWAP,
    PreemptionMethod.RECOMPUTE: admin_v1.RETURN_RECOMPUTE,
    PreemptionMethod.KEEP: admin_v1.RETURN_KEEP,
}


class AdminEngine(Protocol):
    """What the admin service needs of an engine."""

    def explain(self, key: str) -> Explanation | None:
        """The state of a request; None where no live one has this key."""

    def summaries(self, tenant: str | None) -> Iterable[Summary]:
        """A summary of each live request, of one tenant or of all, oldest first; computed lazily."""

    def num_live(self, tenant: str | None) -> int: ...

    def worker_names(self, model: str | None) -> list[WorkerName]:
        """The workers, of one model or of all."""

    def workers_short_of_memory(self, model: str | None) -> Iterable[tuple[WorkerName, MemoryPressure]]:
        """The workers whose memory is short, of one model or of all."""

    @property
    def set_apart(self) -> Mapping[str, str]:
        """Why workers are not used until they are restarted, by address."""

    def reset_prefix_caches(self, model: str | None) -> Iterable[tuple[WorkerName, CacheReset]]:
        """Frees the cached blocks of each worker, of one model or of all."""


class AdminServicer(AdminServiceServicer):
    """Answers from the engine, between its steps. Raises NOT_LEADER while there is none."""

    def __init__(self, profiles: WorkerProfiles | None = None) -> None:
        self._profiles = profiles or WorkerProfiles()
        self._engine: AdminEngine | None = None
        self._why_not = ""

    def lead(self, engine: AdminEngine) -> None:
        self._engine = engine

    def resign(self, why: str) -> None:
        """Answers NOT_LEADER with this reason, until it leads again."""
        self._engine = None
        self._why_not = f"; it resigned: {why}"

    @property
    def _leading(self) -> AdminEngine:
        if self._engine is None:
            raise QuireError(Reason.NOT_LEADER, f"this scheduler does not lead{self._why_not}")
        return self._engine

    async def Explain(  # noqa: N802
        self, request: admin_v1.ExplainRequest, context: _Context
    ) -> admin_v1.ExplainResponse:
        """One request. Raises QuireError."""
        field = request.WhichOneof("request")
        explanation = self._leading.explain(_key(request))
        if explanation is None:
            raise QuireError(Reason.NOT_FOUND, "no such request is live", field=field)
        return explanation_to_proto(explanation, self._leading.workers_short_of_memory(explanation.model))

    async def ListRequests(  # noqa: N802
        self, request: admin_v1.ListRequestsRequest, context: _Context
    ) -> admin_v1.ListRequestsResponse:
        """The oldest requests. Raises QuireError."""
        limit = request.limit if request.HasField("limit") else DEFAULT_LIMIT
        if not 1 <= limit <= MAX_LIMIT:
            raise QuireError(Reason.INVALID_FIELD, f"must be between 1 and {MAX_LIMIT}", field="limit")
        tenant = request.tenant if request.HasField("tenant") else None
        summaries = self._leading.summaries(tenant)
        return admin_v1.ListRequestsResponse(
            requests=[_summary_to_proto(summary) for summary in islice(summaries, limit)],
            num_live=self._leading.num_live(tenant),
            workers_short_of_memory=map(_memory_to_proto, self._leading.workers_short_of_memory(None)),
            workers_set_apart=[
                admin_v1.WorkerSetApart(worker=worker, why=why) for worker, why in self._leading.set_apart.items()
            ],
        )

    async def ResetPrefixCache(  # noqa: N802
        self, request: admin_v1.ResetPrefixCacheRequest, context: _Context
    ) -> admin_v1.ResetPrefixCacheResponse:
        """Frees cached blocks. Raises QuireError."""
        self._workers(request)
        resets = self._leading.reset_prefix_caches(_model(request))
        return admin_v1.ResetPrefixCacheResponse(workers=[_reset_to_proto(*reset) for reset in resets])

    async def StartProfile(  # noqa: N802
        self, request: admin_v1.StartProfileRequest, context: _Context
    ) -> admin_v1.StartProfileResponse:
        """Starts profiles. Raises QuireError."""
        answers = await self._profiles.start(self._workers(request))
        return admin_v1.StartProfileResponse(workers=map(_profile_to_proto, answers))

    async def StopProfile(  # noqa: N802
        self, request: admin_v1.StopProfileRequest, context: _Context
    ) -> admin_v1.StopProfileResponse:
        """Ends profiles. Raises QuireError."""
        answers = await self._profiles.stop(self._workers(request))
        return admin_v1.StopProfileResponse(workers=map(_profile_to_proto, answers))

    def _workers(self, request: _OfModel) -> list[WorkerName]:
        """The workers that a call is for. Raises QuireError where a model has none."""
        model = _model(request)
        workers = self._leading.worker_names(model)
        if model is not None and not workers:
            raise QuireError(Reason.MODEL_NOT_FOUND, "no worker serves this model", field="model")
        return workers


def admin_server(
    identity: Identity, servicer: AdminServicer, host: str, port: int
) -> tuple[grpc.aio.Server, HealthReporter, int]:
    """A server of the admin service, bound and not started, with its health and its port. Raises CannotListen."""
    server = create_inner_server(identity)
    add_AdminServiceServicer_to_server(servicer, server)
    health = HealthReporter(server, [_SERVICE])
    enable_reflection(server, [_SERVICE])
    return server, health, bind(server, host, port, identity.server_credentials())


def explanation_to_proto(
    explanation: Explanation, short_of_memory: Iterable[tuple[WorkerName, MemoryPressure]]
) -> admin_v1.ExplainResponse:
    """The state of a request, in the public contract. `short_of_memory` are workers of its model."""
    return admin_v1.ExplainResponse(
        key=explanation.key,
        tenant=explanation.tenant,
        policy=explanation.policy,
        priority=explanation.priority,
        effective_priority=explanation.effective_priority,
        tenant_debt=explanation.tenant_debt,
        age=to_duration(explanation.age),
        time_left=None if explanation.time_left is None else to_duration(explanation.time_left),
        num_prompt_tokens=explanation.num_prompt,
        max_tokens=explanation.max_tokens,
        num_waiting=explanation.num_waiting,
        sequences=map(_sequence_to_proto, explanation.sequences),
        model=explanation.model,
        workers_short_of_memory=map(_memory_to_proto, short_of_memory),
    )


def _sequence_to_proto(sequence: SequenceExplanation) -> admin_v1.SequenceExplanation:
    return admin_v1.SequenceExplanation(
        index=sequence.index,
        state=_STATES[sequence.status],
        num_ahead=sequence.num_ahead,
        awaits_key=sequence.awaits_key,
        num_known_tokens=sequence.num_known,
        num_computed_tokens=sequence.num_computed,
        num_generated_tokens=sequence.num_generated,
        num_device_blocks=sequence.num_device_blocks,
        num_host_blocks=sequence.num_host_blocks,
        num_missing_blocks=sequence.num_missing_blocks,
        num_preemptions=sequence.num_preemptions,
        last_preemption=_preemption_to_proto(sequence.last_preemption) if sequence.last_preemption else None,
        predicted_start=None if sequence.predicted_start is None else to_duration(sequence.predicted_start),
    )


def _preemption_to_proto(preemption: PreemptionRecord) -> admin_v1.Preemption:
    return admin_v1.Preemption(
        choice=_RETURNS[preemption.method],
        swap_estimate=to_duration(preemption.swap_seconds),
        recompute_estimate=to_duration(preemption.recompute_seconds),
    )


def _summary_to_proto(summary: Summary) -> admin_v1.RequestSummary:
    return admin_v1.RequestSummary(
        key=summary.key,
        tenant=summary.tenant,
        priority=summary.priority,
        state=_STATES[summary.status],
        age=to_duration(summary.age),
        num_prompt_tokens=summary.num_prompt,
        num_generated_tokens=summary.num_generated,
        model=summary.model,
    )


def _memory_to_proto(short: tuple[WorkerName, MemoryPressure]) -> admin_v1.WorkerMemory:
    worker, pressure = short
    return admin_v1.WorkerMemory(worker=worker.address, model=worker.model, pressure=_PRESSURES[pressure])


def _reset_to_proto(worker: WorkerName, reset: CacheReset) -> admin_v1.WorkerCacheReset:
    return admin_v1.WorkerCacheReset(
        worker=worker.address,
        model=worker.model,
        num_freed_device_blocks=reset.num_freed_device,
        num_freed_host_blocks=reset.num_freed_host,
        num_kept_device_blocks=reset.num_kept_device,
        num_kept_host_blocks=reset.num_kept_host,
    )


def _profile_to_proto(answer: ProfileAnswer) -> admin_v1.WorkerProfile:
    worker = answer.worker
    return admin_v1.WorkerProfile(worker=worker.address, model=worker.model, path=answer.path, problem=answer.problem)


def _model(request: _OfModel) -> str | None:
    return request.model if request.HasField("model") else None


def _key(request: admin_v1.ExplainRequest) -> str:
    match request.WhichOneof("request"):
        case "name":
            name = request.name
            tenant = name.tenant if name.HasField("tenant") else DEFAULT_TENANT_NAME
            return request_key(tenant, name.request_id, name.prompt)
        case "key":
            return request.key
    raise QuireError(Reason.INVALID_FIELD, "must have a request_id or a key", field="request")
