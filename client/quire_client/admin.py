"""Client of a scheduler's admin service: why live requests wait, resets of the prefix cache, profiles of workers."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, fields
from enum import StrEnum
from pathlib import Path
from typing import TypeVar

from google.protobuf.duration_pb2 import Duration

from quire.admin.v1 import admin_pb2 as pb
from quire.admin.v1.admin_pb2_grpc import AdminServiceStub
from quire_client.connection import Closeable, check_address, timeout_of
from quire_client.deployment_credentials import admin_channel, admin_metadata
from quire_client.errors import closed_errors, quire_errors
from quire_client.fields import assign

DEFAULT_ADMIN_ADDRESS = "127.0.0.1:50062"


class SequenceState(StrEnum):
    QUEUED = "queued"
    WAITING_FOR_PREFIX = "waiting for prefix"
    SWAPPING_IN = "swapping in"
    RUNNING = "running"
    PAUSED = "paused"
    WAITING_FOR_TOKENS = "waiting for tokens"
    SWAPPED = "swapped"
    PREEMPTED = "preempted"
    ENDED = "ended"
    HELD_BACK = "held back"
    OTHER = "other"
    """A state that this version of the client does not know."""


class PreemptionMethod(StrEnum):
    """How a preempted sequence is resumed."""

    SWAP = "swap"
    RECOMPUTE = "recompute"
    KEEP = "keep"
    OTHER = "other"
    """A method that this version of the client does not know."""


@dataclass(frozen=True, slots=True)
class Preemption:
    """The last preemption of a sequence: the method, and both estimates in seconds."""

    choice: PreemptionMethod
    swap_seconds: float
    recompute_seconds: float

    @classmethod
    def from_proto(cls, message: pb.Preemption) -> "Preemption":
        return cls(
            choice=_PREEMPTION_METHODS.get(message.choice, PreemptionMethod.OTHER),
            swap_seconds=_seconds(message.swap_estimate),
            recompute_seconds=_seconds(message.recompute_estimate),
        )


@dataclass(frozen=True, slots=True)
class SequenceExplanation:
    """One sequence of a request.

    `num_ahead` sequences are ahead of it, None where it does not wait; `awaits_key` is the request whose blocks it
    waits for. `num_missing_blocks` are those that it needs and that the device does not have now. `predicted_start` is
    in seconds from now, None where it runs or there is no prediction.
    """

    index: int
    state: SequenceState
    num_ahead: int | None
    awaits_key: str | None
    num_known_tokens: int
    num_computed_tokens: int
    num_generated_tokens: int
    num_device_blocks: int
    num_host_blocks: int
    num_missing_blocks: int
    num_preemptions: int
    last_preemption: Preemption | None
    predicted_start: float | None

    @classmethod
    def from_proto(cls, message: pb.SequenceExplanation) -> "SequenceExplanation":
        return cls(
            index=message.index,
            state=_STATES.get(message.state, SequenceState.OTHER),
            num_ahead=message.num_ahead if message.HasField("num_ahead") else None,
            awaits_key=message.awaits_key if message.HasField("awaits_key") else None,
            num_known_tokens=message.num_known_tokens,
            num_computed_tokens=message.num_computed_tokens,
            num_generated_tokens=message.num_generated_tokens,
            num_device_blocks=message.num_device_blocks,
            num_host_blocks=message.num_host_blocks,
            num_missing_blocks=message.num_missing_blocks,
            num_preemptions=message.num_preemptions,
            last_preemption=(
                Preemption.from_proto(message.last_preemption) if message.HasField("last_preemption") else None
            ),
            predicted_start=_seconds(message.predicted_start) if message.HasField("predicted_start") else None,
        )


class MemoryPressure(StrEnum):
    """How short the memory of a worker's machine or container is."""

    HIGH = "high"
    CRITICAL = "critical"
    OTHER = "other"
    """A state that this version of the client does not know."""


@dataclass(frozen=True, slots=True)
class WorkerMemory:
    """A worker whose memory is short, by its address."""

    worker: str
    model: str
    pressure: MemoryPressure

    @classmethod
    def from_proto(cls, message: pb.WorkerMemory) -> "WorkerMemory":
        return cls(message.worker, message.model, _PRESSURES.get(message.pressure, MemoryPressure.OTHER))


@dataclass(frozen=True, slots=True)
class WorkerSetApart:
    """A worker, by its address, that gets no steps until it is restarted, and the reason."""

    worker: str
    why: str

    @classmethod
    def from_proto(cls, message: pb.WorkerSetApart) -> "WorkerSetApart":
        return cls(message.worker, message.why)


@dataclass(frozen=True, slots=True)
class Explanation:
    """The state of a live request. `age` and `time_left`, until its deadline, are in seconds.

    `priority` is the submitted class, `effective_priority` the current one. `tenant_debt` is the service of its tenant,
    in tokens over its weight, beyond that of the least served tenant that waits in its class, or waited there last.
    `workers_short_of_memory` are those of its model.
    """

    key: str
    tenant: str
    policy: str
    priority: int
    effective_priority: int
    tenant_debt: float
    age: float
    time_left: float | None
    num_prompt_tokens: int
    max_tokens: int
    num_waiting: int
    sequences: tuple[SequenceExplanation, ...]
    model: str = ""
    """Empty from a scheduler of an earlier release."""
    workers_short_of_memory: tuple[WorkerMemory, ...] = ()

    @classmethod
    def from_proto(cls, message: pb.ExplainResponse) -> "Explanation":
        return cls(
            key=message.key,
            tenant=message.tenant,
            policy=message.policy,
            priority=message.priority,
            effective_priority=message.effective_priority,
            tenant_debt=message.tenant_debt,
            age=_seconds(message.age),
            time_left=_seconds(message.time_left) if message.HasField("time_left") else None,
            num_prompt_tokens=message.num_prompt_tokens,
            max_tokens=message.max_tokens,
            num_waiting=message.num_waiting,
            sequences=tuple(map(SequenceExplanation.from_proto, message.sequences)),
            model=message.model,
            workers_short_of_memory=tuple(map(WorkerMemory.from_proto, message.workers_short_of_memory)),
        )


@dataclass(frozen=True, slots=True)
class RequestSummary:
    """A live request in a list; `state` is that of its furthest sequence, `age` is in seconds."""

    key: str
    tenant: str
    priority: int
    state: SequenceState
    age: float
    num_prompt_tokens: int
    num_generated_tokens: int
    model: str = ""
    """Empty from a scheduler of an earlier release."""

    @classmethod
    def from_proto(cls, message: pb.RequestSummary) -> "RequestSummary":
        return cls(
            key=message.key,
            tenant=message.tenant,
            priority=message.priority,
            state=_STATES.get(message.state, SequenceState.OTHER),
            age=_seconds(message.age),
            num_prompt_tokens=message.num_prompt_tokens,
            num_generated_tokens=message.num_generated_tokens,
            model=message.model,
        )


@dataclass(frozen=True, slots=True)
class RequestList:
    """The oldest matching live requests, oldest first, the number of all that match, and the workers of all models
    whose memory is short, or that are set apart.
    """

    requests: tuple[RequestSummary, ...]
    num_live: int
    workers_short_of_memory: tuple[WorkerMemory, ...] = ()
    workers_set_apart: tuple[WorkerSetApart, ...] = ()

    @classmethod
    def from_proto(cls, message: pb.ListRequestsResponse) -> "RequestList":
        return cls(
            requests=tuple(map(RequestSummary.from_proto, message.requests)),
            num_live=message.num_live,
            workers_short_of_memory=tuple(map(WorkerMemory.from_proto, message.workers_short_of_memory)),
            workers_set_apart=tuple(map(WorkerSetApart.from_proto, message.workers_set_apart)),
        )


@dataclass(frozen=True, slots=True)
class WorkerCacheReset:
    """What a reset did to the prefix cache of one worker, by its address: the cached blocks that it freed, and the
    blocks that can still be found since sequences, steps or copies use them, on device and host.
    """

    worker: str
    model: str
    num_freed_device_blocks: int
    num_freed_host_blocks: int
    num_kept_device_blocks: int
    num_kept_host_blocks: int

    @classmethod
    def from_proto(cls, message: pb.WorkerCacheReset) -> "WorkerCacheReset":
        return cls(**{field.name: getattr(message, field.name) for field in fields(cls)})


@dataclass(frozen=True, slots=True)
class WorkerProfile:
    """What a worker answered to the start or the end of a profile: the file of its trace on its own machine, which is
    empty at the start, or a `problem`: why it refused or failed.
    """

    worker: str
    model: str
    path: str
    problem: str

    @classmethod
    def from_proto(cls, message: pb.WorkerProfile) -> "WorkerProfile":
        return cls(message.worker, message.model, message.path, message.problem)


class AdminClient(Closeable):
    """Calls the admin service of a scheduler. Use it as a context manager.

    Every call raises QuireError, with INVALID_FIELD for a value that no message can hold.
    `address` is QUIRE_ADMIN_ADDRESS or 127.0.0.1:50062 unless given; `timeout` is in seconds. `secret_file` has the
    deployment's secret: QUIRE_DEPLOYMENT_SECRET_FILE unless given, or run/deployment.secret if it exists. With
    QUIRE_MTLS_CERT_FILE, QUIRE_MTLS_KEY_FILE and QUIRE_MTLS_CA_FILE it uses mutual TLS.
    """

    def __init__(
        self, address: str | None = None, *, timeout: float | None = None, secret_file: Path | None = None
    ) -> None:
        address = address or os.environ.get("QUIRE_ADMIN_ADDRESS") or DEFAULT_ADMIN_ADDRESS
        check_address(address, "a scheduler's admin port")
        self._address = address
        self._timeout = timeout_of(timeout)
        self._metadata = admin_metadata(address, secret_file)
        self._channel = admin_channel(address)
        self._stub = AdminServiceStub(self._channel)
        self._is_closed = False

    def close(self) -> None:
        """Cancels all calls and closes the connection."""
        self._is_closed = True
        self._channel.close()

    def explain(self, request_id: str, *, tenant: str | None = None, prompt: int = 0) -> Explanation:
        """The state of a tenant's request, of `default` unless given; `prompt` is its index in a call of several."""
        request = pb.ExplainRequest()
        assign(request, "name.request_id", request_id)
        assign(request, "name.prompt", prompt)
        if tenant is not None:
            assign(request, "name.tenant", tenant)
        return self._explain(request)

    def explain_key(self, key: str) -> Explanation:
        """The state of the request with a key that `requests` lists."""
        request = pb.ExplainRequest()
        assign(request, "key", key)
        return self._explain(request)

    def requests(self, *, tenant: str | None = None, limit: int | None = None) -> RequestList:
        """The oldest live requests, of one tenant or of all."""
        request = pb.ListRequestsRequest()
        for name, value in (("tenant", tenant), ("limit", limit)):
            if value is not None:
                assign(request, name, value)
        with self._errors():
            listed = self._stub.ListRequests(request, timeout=self._timeout, metadata=self._metadata)
        return RequestList.from_proto(listed)

    def reset_prefix_cache(self, *, model: str | None = None) -> tuple[WorkerCacheReset, ...]:
        """Frees the cached blocks of all workers, or of those that serve a model."""
        request = _of_model(pb.ResetPrefixCacheRequest(), model)
        with self._errors():
            answer = self._stub.ResetPrefixCache(request, timeout=self._timeout, metadata=self._metadata)
        return tuple(map(WorkerCacheReset.from_proto, answer.workers))

    def start_profile(self, *, model: str | None = None) -> tuple[WorkerProfile, ...]:
        """Starts a profile of all workers, or of those that serve a model."""
        request = _of_model(pb.StartProfileRequest(), model)
        with self._errors():
            answer = self._stub.StartProfile(request, timeout=self._timeout, metadata=self._metadata)
        return tuple(map(WorkerProfile.from_proto, answer.workers))

    def stop_profile(self, *, model: str | None = None) -> tuple[WorkerProfile, ...]:
        """Ends the profile of all workers, or of those that serve a model: each writes its trace."""
        request = _of_model(pb.StopProfileRequest(), model)
        with self._errors():
            answer = self._stub.StopProfile(request, timeout=self._timeout, metadata=self._metadata)
        return tuple(map(WorkerProfile.from_proto, answer.workers))

    def _explain(self, request: pb.ExplainRequest) -> Explanation:
        with self._errors():
            explained = self._stub.Explain(request, timeout=self._timeout, metadata=self._metadata)
        return Explanation.from_proto(explained)

    @contextmanager
    def _errors(self) -> Iterator[None]:
        """Raises the errors of a call as QuireError."""
        with quire_errors(self._address), closed_errors(lambda: self._is_closed):
            yield


_STATES = {
    pb.SEQUENCE_STATE_QUEUED: SequenceState.QUEUED,
    pb.SEQUENCE_STATE_WAITING_FOR_PREFIX: SequenceState.WAITING_FOR_PREFIX,
    pb.SEQUENCE_STATE_SWAPPING_IN: SequenceState.SWAPPING_IN,
    pb.SEQUENCE_STATE_RUNNING: SequenceState.RUNNING,
    pb.SEQUENCE_STATE_PAUSED: SequenceState.PAUSED,
    pb.SEQUENCE_STATE_WAITING_FOR_TOKENS: SequenceState.WAITING_FOR_TOKENS,
    pb.SEQUENCE_STATE_SWAPPED: SequenceState.SWAPPED,
    pb.SEQUENCE_STATE_PREEMPTED: SequenceState.PREEMPTED,
    pb.SEQUENCE_STATE_ENDED: SequenceState.ENDED,
    pb.SEQUENCE_STATE_HELD_BACK: SequenceState.HELD_BACK,
}
_PRESSURES = {
    pb.MEMORY_PRESSURE_HIGH: MemoryPressure.HIGH,
    pb.MEMORY_PRESSURE_CRITICAL: MemoryPressure.CRITICAL,
}
_PREEMPTION_METHODS = {
    pb.RETURN_SWAP: PreemptionMethod.SWAP,
    pb.RETURN_RECOMPUTE: PreemptionMethod.RECOMPUTE,
    pb.RETURN_KEEP: PreemptionMethod.KEEP,
}


_OfModel = TypeVar("_OfModel", pb.ResetPrefixCacheRequest, pb.StartProfileRequest, pb.StopProfileRequest)


def _of_model(request: _OfModel, model: str | None) -> _OfModel:
    """The request for the workers of a model, or of all."""
    if model is not None:
        assign(request, "model", model)
    return request


def _seconds(duration: Duration) -> float:
    return duration.ToNanoseconds() / 1e9
