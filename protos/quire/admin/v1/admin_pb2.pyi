import datetime

from google.protobuf import duration_pb2 as _duration_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class SequenceState(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    SEQUENCE_STATE_UNSPECIFIED: _ClassVar[SequenceState]
    SEQUENCE_STATE_QUEUED: _ClassVar[SequenceState]
    SEQUENCE_STATE_WAITING_FOR_PREFIX: _ClassVar[SequenceState]
    SEQUENCE_STATE_SWAPPING_IN: _ClassVar[SequenceState]
    SEQUENCE_STATE_RUNNING: _ClassVar[SequenceState]
    SEQUENCE_STATE_PAUSED: _ClassVar[SequenceState]
    SEQUENCE_STATE_SWAPPED: _ClassVar[SequenceState]
    SEQUENCE_STATE_PREEMPTED: _ClassVar[SequenceState]
    SEQUENCE_STATE_ENDED: _ClassVar[SequenceState]
    SEQUENCE_STATE_WAITING_FOR_TOKENS: _ClassVar[SequenceState]
    SEQUENCE_STATE_HELD_BACK: _ClassVar[SequenceState]

class Return(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    RETURN_UNSPECIFIED: _ClassVar[Return]
    RETURN_SWAP: _ClassVar[Return]
    RETURN_RECOMPUTE: _ClassVar[Return]
    RETURN_KEEP: _ClassVar[Return]

class MemoryPressure(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    MEMORY_PRESSURE_UNSPECIFIED: _ClassVar[MemoryPressure]
    MEMORY_PRESSURE_HIGH: _ClassVar[MemoryPressure]
    MEMORY_PRESSURE_CRITICAL: _ClassVar[MemoryPressure]
SEQUENCE_STATE_UNSPECIFIED: SequenceState
SEQUENCE_STATE_QUEUED: SequenceState
SEQUENCE_STATE_WAITING_FOR_PREFIX: SequenceState
SEQUENCE_STATE_SWAPPING_IN: SequenceState
SEQUENCE_STATE_RUNNING: SequenceState
SEQUENCE_STATE_PAUSED: SequenceState
SEQUENCE_STATE_SWAPPED: SequenceState
SEQUENCE_STATE_PREEMPTED: SequenceState
SEQUENCE_STATE_ENDED: SequenceState
SEQUENCE_STATE_WAITING_FOR_TOKENS: SequenceState
SEQUENCE_STATE_HELD_BACK: SequenceState
RETURN_UNSPECIFIED: Return
RETURN_SWAP: Return
RETURN_RECOMPUTE: Return
RETURN_KEEP: Return
MEMORY_PRESSURE_UNSPECIFIED: MemoryPressure
MEMORY_PRESSURE_HIGH: MemoryPressure
MEMORY_PRESSURE_CRITICAL: MemoryPressure

class RequestName(_message.Message):
    __slots__ = ("tenant", "request_id", "prompt")
    TENANT_FIELD_NUMBER: _ClassVar[int]
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    PROMPT_FIELD_NUMBER: _ClassVar[int]
    tenant: str
    request_id: str
    prompt: int
    def __init__(self, tenant: _Optional[str] = ..., request_id: _Optional[str] = ..., prompt: _Optional[int] = ...) -> None: ...

class ExplainRequest(_message.Message):
    __slots__ = ("name", "key")
    NAME_FIELD_NUMBER: _ClassVar[int]
    KEY_FIELD_NUMBER: _ClassVar[int]
    name: RequestName
    key: str
    def __init__(self, name: _Optional[_Union[RequestName, _Mapping]] = ..., key: _Optional[str] = ...) -> None: ...

class Preemption(_message.Message):
    __slots__ = ("choice", "swap_estimate", "recompute_estimate")
    CHOICE_FIELD_NUMBER: _ClassVar[int]
    SWAP_ESTIMATE_FIELD_NUMBER: _ClassVar[int]
    RECOMPUTE_ESTIMATE_FIELD_NUMBER: _ClassVar[int]
    choice: Return
    swap_estimate: _duration_pb2.Duration
    recompute_estimate: _duration_pb2.Duration
    def __init__(self, choice: _Optional[_Union[Return, str]] = ..., swap_estimate: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ..., recompute_estimate: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ...) -> None: ...

class SequenceExplanation(_message.Message):
    __slots__ = ("index", "state", "num_ahead", "awaits_key", "num_known_tokens", "num_computed_tokens", "num_generated_tokens", "num_device_blocks", "num_host_blocks", "num_missing_blocks", "num_preemptions", "last_preemption", "predicted_start")
    INDEX_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    NUM_AHEAD_FIELD_NUMBER: _ClassVar[int]
    AWAITS_KEY_FIELD_NUMBER: _ClassVar[int]
    NUM_KNOWN_TOKENS_FIELD_NUMBER: _ClassVar[int]
    NUM_COMPUTED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    NUM_GENERATED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    NUM_DEVICE_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    NUM_HOST_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    NUM_MISSING_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    NUM_PREEMPTIONS_FIELD_NUMBER: _ClassVar[int]
    LAST_PREEMPTION_FIELD_NUMBER: _ClassVar[int]
    PREDICTED_START_FIELD_NUMBER: _ClassVar[int]
    index: int
    state: SequenceState
    num_ahead: int
    awaits_key: str
    num_known_tokens: int
    num_computed_tokens: int
    num_generated_tokens: int
    num_device_blocks: int
    num_host_blocks: int
    num_missing_blocks: int
    num_preemptions: int
    last_preemption: Preemption
    predicted_start: _duration_pb2.Duration
    def __init__(self, index: _Optional[int] = ..., state: _Optional[_Union[SequenceState, str]] = ..., num_ahead: _Optional[int] = ..., awaits_key: _Optional[str] = ..., num_known_tokens: _Optional[int] = ..., num_computed_tokens: _Optional[int] = ..., num_generated_tokens: _Optional[int] = ..., num_device_blocks: _Optional[int] = ..., num_host_blocks: _Optional[int] = ..., num_missing_blocks: _Optional[int] = ..., num_preemptions: _Optional[int] = ..., last_preemption: _Optional[_Union[Preemption, _Mapping]] = ..., predicted_start: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ...) -> None: ...

class WorkerMemory(_message.Message):
    __slots__ = ("worker", "model", "pressure")
    WORKER_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    PRESSURE_FIELD_NUMBER: _ClassVar[int]
    worker: str
    model: str
    pressure: MemoryPressure
    def __init__(self, worker: _Optional[str] = ..., model: _Optional[str] = ..., pressure: _Optional[_Union[MemoryPressure, str]] = ...) -> None: ...

class WorkerSetApart(_message.Message):
    __slots__ = ("worker", "why")
    WORKER_FIELD_NUMBER: _ClassVar[int]
    WHY_FIELD_NUMBER: _ClassVar[int]
    worker: str
    why: str
    def __init__(self, worker: _Optional[str] = ..., why: _Optional[str] = ...) -> None: ...

class ExplainResponse(_message.Message):
    __slots__ = ("key", "tenant", "policy", "priority", "effective_priority", "tenant_debt", "age", "time_left", "num_prompt_tokens", "max_tokens", "num_waiting", "sequences", "model", "workers_short_of_memory")
    KEY_FIELD_NUMBER: _ClassVar[int]
    TENANT_FIELD_NUMBER: _ClassVar[int]
    POLICY_FIELD_NUMBER: _ClassVar[int]
    PRIORITY_FIELD_NUMBER: _ClassVar[int]
    EFFECTIVE_PRIORITY_FIELD_NUMBER: _ClassVar[int]
    TENANT_DEBT_FIELD_NUMBER: _ClassVar[int]
    AGE_FIELD_NUMBER: _ClassVar[int]
    TIME_LEFT_FIELD_NUMBER: _ClassVar[int]
    NUM_PROMPT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    MAX_TOKENS_FIELD_NUMBER: _ClassVar[int]
    NUM_WAITING_FIELD_NUMBER: _ClassVar[int]
    SEQUENCES_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    WORKERS_SHORT_OF_MEMORY_FIELD_NUMBER: _ClassVar[int]
    key: str
    tenant: str
    policy: str
    priority: int
    effective_priority: int
    tenant_debt: float
    age: _duration_pb2.Duration
    time_left: _duration_pb2.Duration
    num_prompt_tokens: int
    max_tokens: int
    num_waiting: int
    sequences: _containers.RepeatedCompositeFieldContainer[SequenceExplanation]
    model: str
    workers_short_of_memory: _containers.RepeatedCompositeFieldContainer[WorkerMemory]
    def __init__(self, key: _Optional[str] = ..., tenant: _Optional[str] = ..., policy: _Optional[str] = ..., priority: _Optional[int] = ..., effective_priority: _Optional[int] = ..., tenant_debt: _Optional[float] = ..., age: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ..., time_left: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ..., num_prompt_tokens: _Optional[int] = ..., max_tokens: _Optional[int] = ..., num_waiting: _Optional[int] = ..., sequences: _Optional[_Iterable[_Union[SequenceExplanation, _Mapping]]] = ..., model: _Optional[str] = ..., workers_short_of_memory: _Optional[_Iterable[_Union[WorkerMemory, _Mapping]]] = ...) -> None: ...

class ListRequestsRequest(_message.Message):
    __slots__ = ("tenant", "limit")
    TENANT_FIELD_NUMBER: _ClassVar[int]
    LIMIT_FIELD_NUMBER: _ClassVar[int]
    tenant: str
    limit: int
    def __init__(self, tenant: _Optional[str] = ..., limit: _Optional[int] = ...) -> None: ...

class RequestSummary(_message.Message):
    __slots__ = ("key", "tenant", "priority", "state", "age", "num_prompt_tokens", "num_generated_tokens", "model")
    KEY_FIELD_NUMBER: _ClassVar[int]
    TENANT_FIELD_NUMBER: _ClassVar[int]
    PRIORITY_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    AGE_FIELD_NUMBER: _ClassVar[int]
    NUM_PROMPT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    NUM_GENERATED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    key: str
    tenant: str
    priority: int
    state: SequenceState
    age: _duration_pb2.Duration
    num_prompt_tokens: int
    num_generated_tokens: int
    model: str
    def __init__(self, key: _Optional[str] = ..., tenant: _Optional[str] = ..., priority: _Optional[int] = ..., state: _Optional[_Union[SequenceState, str]] = ..., age: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ..., num_prompt_tokens: _Optional[int] = ..., num_generated_tokens: _Optional[int] = ..., model: _Optional[str] = ...) -> None: ...

class ListRequestsResponse(_message.Message):
    __slots__ = ("requests", "num_live", "workers_short_of_memory", "workers_set_apart")
    REQUESTS_FIELD_NUMBER: _ClassVar[int]
    NUM_LIVE_FIELD_NUMBER: _ClassVar[int]
    WORKERS_SHORT_OF_MEMORY_FIELD_NUMBER: _ClassVar[int]
    WORKERS_SET_APART_FIELD_NUMBER: _ClassVar[int]
    requests: _containers.RepeatedCompositeFieldContainer[RequestSummary]
    num_live: int
    workers_short_of_memory: _containers.RepeatedCompositeFieldContainer[WorkerMemory]
    workers_set_apart: _containers.RepeatedCompositeFieldContainer[WorkerSetApart]
    def __init__(self, requests: _Optional[_Iterable[_Union[RequestSummary, _Mapping]]] = ..., num_live: _Optional[int] = ..., workers_short_of_memory: _Optional[_Iterable[_Union[WorkerMemory, _Mapping]]] = ..., workers_set_apart: _Optional[_Iterable[_Union[WorkerSetApart, _Mapping]]] = ...) -> None: ...

class ResetPrefixCacheRequest(_message.Message):
    __slots__ = ("model",)
    MODEL_FIELD_NUMBER: _ClassVar[int]
    model: str
    def __init__(self, model: _Optional[str] = ...) -> None: ...

class WorkerCacheReset(_message.Message):
    __slots__ = ("worker", "model", "num_freed_device_blocks", "num_freed_host_blocks", "num_kept_device_blocks", "num_kept_host_blocks")
    WORKER_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    NUM_FREED_DEVICE_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    NUM_FREED_HOST_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    NUM_KEPT_DEVICE_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    NUM_KEPT_HOST_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    worker: str
    model: str
    num_freed_device_blocks: int
    num_freed_host_blocks: int
    num_kept_device_blocks: int
    num_kept_host_blocks: int
    def __init__(self, worker: _Optional[str] = ..., model: _Optional[str] = ..., num_freed_device_blocks: _Optional[int] = ..., num_freed_host_blocks: _Optional[int] = ..., num_kept_device_blocks: _Optional[int] = ..., num_kept_host_blocks: _Optional[int] = ...) -> None: ...

class ResetPrefixCacheResponse(_message.Message):
    __slots__ = ("workers",)
    WORKERS_FIELD_NUMBER: _ClassVar[int]
    workers: _containers.RepeatedCompositeFieldContainer[WorkerCacheReset]
    def __init__(self, workers: _Optional[_Iterable[_Union[WorkerCacheReset, _Mapping]]] = ...) -> None: ...

class StartProfileRequest(_message.Message):
    __slots__ = ("model",)
    MODEL_FIELD_NUMBER: _ClassVar[int]
    model: str
    def __init__(self, model: _Optional[str] = ...) -> None: ...

class WorkerProfile(_message.Message):
    __slots__ = ("worker", "model", "path", "problem")
    WORKER_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    PATH_FIELD_NUMBER: _ClassVar[int]
    PROBLEM_FIELD_NUMBER: _ClassVar[int]
    worker: str
    model: str
    path: str
    problem: str
    def __init__(self, worker: _Optional[str] = ..., model: _Optional[str] = ..., path: _Optional[str] = ..., problem: _Optional[str] = ...) -> None: ...

class StartProfileResponse(_message.Message):
    __slots__ = ("workers",)
    WORKERS_FIELD_NUMBER: _ClassVar[int]
    workers: _containers.RepeatedCompositeFieldContainer[WorkerProfile]
    def __init__(self, workers: _Optional[_Iterable[_Union[WorkerProfile, _Mapping]]] = ...) -> None: ...

class StopProfileRequest(_message.Message):
    __slots__ = ("model",)
    MODEL_FIELD_NUMBER: _ClassVar[int]
    model: str
    def __init__(self, model: _Optional[str] = ...) -> None: ...

class StopProfileResponse(_message.Message):
    __slots__ = ("workers",)
    WORKERS_FIELD_NUMBER: _ClassVar[int]
    workers: _containers.RepeatedCompositeFieldContainer[WorkerProfile]
    def __init__(self, workers: _Optional[_Iterable[_Union[WorkerProfile, _Mapping]]] = ...) -> None: ...
