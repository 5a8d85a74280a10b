import datetime

from google.protobuf import duration_pb2 as _duration_pb2
from google.protobuf import timestamp_pb2 as _timestamp_pb2
from quire.worker.v1 import worker_pb2 as _worker_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class EarlyStopping(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    EARLY_STOPPING_UNSPECIFIED: _ClassVar[EarlyStopping]
    EARLY_STOPPING_HEURISTIC: _ClassVar[EarlyStopping]
    EARLY_STOPPING_AT_WIDTH: _ClassVar[EarlyStopping]
    EARLY_STOPPING_NEVER: _ClassVar[EarlyStopping]

class FailureReason(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    FAILURE_REASON_UNSPECIFIED: _ClassVar[FailureReason]
    FAILURE_REASON_KEY_IN_USE: _ClassVar[FailureReason]
    FAILURE_REASON_DEADLINE_EXCEEDED: _ClassVar[FailureReason]
    FAILURE_REASON_CANCELLED: _ClassVar[FailureReason]
    FAILURE_REASON_INVALID: _ClassVar[FailureReason]
    FAILURE_REASON_INTERNAL: _ClassVar[FailureReason]
    FAILURE_REASON_UNAVAILABLE: _ClassVar[FailureReason]
    FAILURE_REASON_CONTEXT_LENGTH_EXCEEDED: _ClassVar[FailureReason]
    FAILURE_REASON_TENANT_OVER_QUOTA: _ClassVar[FailureReason]
    FAILURE_REASON_DEADLINE_INFEASIBLE: _ClassVar[FailureReason]
    FAILURE_REASON_SEARCH_TOO_WIDE: _ClassVar[FailureReason]
    FAILURE_REASON_TOO_MANY_TOKENS: _ClassVar[FailureReason]
    FAILURE_REASON_UNKNOWN_REQUEST: _ClassVar[FailureReason]
    FAILURE_REASON_QUARANTINED: _ClassVar[FailureReason]
    FAILURE_REASON_STORE_DEGRADED: _ClassVar[FailureReason]
    FAILURE_REASON_DIVERGED: _ClassVar[FailureReason]
    FAILURE_REASON_UNSUPPORTED_RESULT: _ClassVar[FailureReason]
    FAILURE_REASON_RECORD_INCOMPLETE: _ClassVar[FailureReason]
    FAILURE_REASON_RECORD_UNDECRYPTABLE: _ClassVar[FailureReason]
    FAILURE_REASON_PROMPT_TOO_COSTLY: _ClassVar[FailureReason]
    FAILURE_REASON_GRAMMAR_TOO_COMPLEX: _ClassVar[FailureReason]
EARLY_STOPPING_UNSPECIFIED: EarlyStopping
EARLY_STOPPING_HEURISTIC: EarlyStopping
EARLY_STOPPING_AT_WIDTH: EarlyStopping
EARLY_STOPPING_NEVER: EarlyStopping
FAILURE_REASON_UNSPECIFIED: FailureReason
FAILURE_REASON_KEY_IN_USE: FailureReason
FAILURE_REASON_DEADLINE_EXCEEDED: FailureReason
FAILURE_REASON_CANCELLED: FailureReason
FAILURE_REASON_INVALID: FailureReason
FAILURE_REASON_INTERNAL: FailureReason
FAILURE_REASON_UNAVAILABLE: FailureReason
FAILURE_REASON_CONTEXT_LENGTH_EXCEEDED: FailureReason
FAILURE_REASON_TENANT_OVER_QUOTA: FailureReason
FAILURE_REASON_DEADLINE_INFEASIBLE: FailureReason
FAILURE_REASON_SEARCH_TOO_WIDE: FailureReason
FAILURE_REASON_TOO_MANY_TOKENS: FailureReason
FAILURE_REASON_UNKNOWN_REQUEST: FailureReason
FAILURE_REASON_QUARANTINED: FailureReason
FAILURE_REASON_STORE_DEGRADED: FailureReason
FAILURE_REASON_DIVERGED: FailureReason
FAILURE_REASON_UNSUPPORTED_RESULT: FailureReason
FAILURE_REASON_RECORD_INCOMPLETE: FailureReason
FAILURE_REASON_RECORD_UNDECRYPTABLE: FailureReason
FAILURE_REASON_PROMPT_TOO_COSTLY: FailureReason
FAILURE_REASON_GRAMMAR_TOO_COMPLEX: FailureReason

class BeamSearch(_message.Message):
    __slots__ = ("width", "length_penalty", "early_stopping")
    WIDTH_FIELD_NUMBER: _ClassVar[int]
    LENGTH_PENALTY_FIELD_NUMBER: _ClassVar[int]
    EARLY_STOPPING_FIELD_NUMBER: _ClassVar[int]
    width: int
    length_penalty: float
    early_stopping: EarlyStopping
    def __init__(self, width: _Optional[int] = ..., length_penalty: _Optional[float] = ..., early_stopping: _Optional[_Union[EarlyStopping, str]] = ...) -> None: ...

class CallableTool(_message.Message):
    __slots__ = ("name", "parameters", "is_custom")
    NAME_FIELD_NUMBER: _ClassVar[int]
    PARAMETERS_FIELD_NUMBER: _ClassVar[int]
    IS_CUSTOM_FIELD_NUMBER: _ClassVar[int]
    name: str
    parameters: str
    is_custom: bool
    def __init__(self, name: _Optional[str] = ..., parameters: _Optional[str] = ..., is_custom: _Optional[bool] = ...) -> None: ...

class TurnFormat(_message.Message):
    __slots__ = ("tools", "reasoning", "is_reasoning_open", "callable", "has_one_call", "must_call")
    TOOLS_FIELD_NUMBER: _ClassVar[int]
    REASONING_FIELD_NUMBER: _ClassVar[int]
    IS_REASONING_OPEN_FIELD_NUMBER: _ClassVar[int]
    CALLABLE_FIELD_NUMBER: _ClassVar[int]
    HAS_ONE_CALL_FIELD_NUMBER: _ClassVar[int]
    MUST_CALL_FIELD_NUMBER: _ClassVar[int]
    tools: str
    reasoning: str
    is_reasoning_open: bool
    callable: _containers.RepeatedCompositeFieldContainer[CallableTool]
    has_one_call: bool
    must_call: bool
    def __init__(self, tools: _Optional[str] = ..., reasoning: _Optional[str] = ..., is_reasoning_open: _Optional[bool] = ..., callable: _Optional[_Iterable[_Union[CallableTool, _Mapping]]] = ..., has_one_call: _Optional[bool] = ..., must_call: _Optional[bool] = ...) -> None: ...

class RenderOptions(_message.Message):
    __slots__ = ("request_id", "model", "stops", "include_stop", "keep_special_tokens", "n", "logprobs", "stop_token_ids", "min_tokens", "prompt_tail", "turn", "logprob_token_ids", "joins_special_tokens", "echo", "prompt_logprobs", "omits_output")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    STOPS_FIELD_NUMBER: _ClassVar[int]
    INCLUDE_STOP_FIELD_NUMBER: _ClassVar[int]
    KEEP_SPECIAL_TOKENS_FIELD_NUMBER: _ClassVar[int]
    N_FIELD_NUMBER: _ClassVar[int]
    LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    STOP_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    MIN_TOKENS_FIELD_NUMBER: _ClassVar[int]
    PROMPT_TAIL_FIELD_NUMBER: _ClassVar[int]
    TURN_FIELD_NUMBER: _ClassVar[int]
    LOGPROB_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    JOINS_SPECIAL_TOKENS_FIELD_NUMBER: _ClassVar[int]
    ECHO_FIELD_NUMBER: _ClassVar[int]
    PROMPT_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    OMITS_OUTPUT_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    model: str
    stops: _containers.RepeatedScalarFieldContainer[str]
    include_stop: bool
    keep_special_tokens: bool
    n: int
    logprobs: int
    stop_token_ids: _containers.RepeatedScalarFieldContainer[int]
    min_tokens: int
    prompt_tail: _containers.RepeatedScalarFieldContainer[int]
    turn: TurnFormat
    logprob_token_ids: _containers.RepeatedScalarFieldContainer[int]
    joins_special_tokens: bool
    echo: bool
    prompt_logprobs: int
    omits_output: bool
    def __init__(self, request_id: _Optional[str] = ..., model: _Optional[str] = ..., stops: _Optional[_Iterable[str]] = ..., include_stop: _Optional[bool] = ..., keep_special_tokens: _Optional[bool] = ..., n: _Optional[int] = ..., logprobs: _Optional[int] = ..., stop_token_ids: _Optional[_Iterable[int]] = ..., min_tokens: _Optional[int] = ..., prompt_tail: _Optional[_Iterable[int]] = ..., turn: _Optional[_Union[TurnFormat, _Mapping]] = ..., logprob_token_ids: _Optional[_Iterable[int]] = ..., joins_special_tokens: _Optional[bool] = ..., echo: _Optional[bool] = ..., prompt_logprobs: _Optional[int] = ..., omits_output: _Optional[bool] = ...) -> None: ...

class AccountLimits(_message.Message):
    __slots__ = ("account", "max_running", "max_queued", "max_kv_blocks", "tokens_per_minute", "requests_per_minute", "cached_token_factor")
    ACCOUNT_FIELD_NUMBER: _ClassVar[int]
    MAX_RUNNING_FIELD_NUMBER: _ClassVar[int]
    MAX_QUEUED_FIELD_NUMBER: _ClassVar[int]
    MAX_KV_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    TOKENS_PER_MINUTE_FIELD_NUMBER: _ClassVar[int]
    REQUESTS_PER_MINUTE_FIELD_NUMBER: _ClassVar[int]
    CACHED_TOKEN_FACTOR_FIELD_NUMBER: _ClassVar[int]
    account: str
    max_running: int
    max_queued: int
    max_kv_blocks: int
    tokens_per_minute: int
    requests_per_minute: int
    cached_token_factor: float
    def __init__(self, account: _Optional[str] = ..., max_running: _Optional[int] = ..., max_queued: _Optional[int] = ..., max_kv_blocks: _Optional[int] = ..., tokens_per_minute: _Optional[int] = ..., requests_per_minute: _Optional[int] = ..., cached_token_factor: _Optional[float] = ...) -> None: ...

class Retention(_message.Message):
    __slots__ = ("is_unrecorded", "seconds", "most_seconds")
    IS_UNRECORDED_FIELD_NUMBER: _ClassVar[int]
    SECONDS_FIELD_NUMBER: _ClassVar[int]
    MOST_SECONDS_FIELD_NUMBER: _ClassVar[int]
    is_unrecorded: bool
    seconds: int
    most_seconds: int
    def __init__(self, is_unrecorded: _Optional[bool] = ..., seconds: _Optional[int] = ..., most_seconds: _Optional[int] = ...) -> None: ...

class Submit(_message.Message):
    __slots__ = ("key", "submission_id", "tenant", "weight", "prompt_token_ids", "n", "max_tokens", "sampling", "stop_token_ids", "has_stop_strings", "priority", "time_left", "detachable", "cache_salt", "traceparent", "beam_search", "render_options", "body_digest", "command_id", "unflushed", "is_resumption", "model", "result", "tokenizer_fingerprint", "model_fingerprint", "limits", "retention", "attachment", "is_background", "was_accepted", "prompt_cost", "call")
    KEY_FIELD_NUMBER: _ClassVar[int]
    SUBMISSION_ID_FIELD_NUMBER: _ClassVar[int]
    TENANT_FIELD_NUMBER: _ClassVar[int]
    WEIGHT_FIELD_NUMBER: _ClassVar[int]
    PROMPT_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    N_FIELD_NUMBER: _ClassVar[int]
    MAX_TOKENS_FIELD_NUMBER: _ClassVar[int]
    SAMPLING_FIELD_NUMBER: _ClassVar[int]
    STOP_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    HAS_STOP_STRINGS_FIELD_NUMBER: _ClassVar[int]
    PRIORITY_FIELD_NUMBER: _ClassVar[int]
    TIME_LEFT_FIELD_NUMBER: _ClassVar[int]
    DETACHABLE_FIELD_NUMBER: _ClassVar[int]
    CACHE_SALT_FIELD_NUMBER: _ClassVar[int]
    TRACEPARENT_FIELD_NUMBER: _ClassVar[int]
    BEAM_SEARCH_FIELD_NUMBER: _ClassVar[int]
    RENDER_OPTIONS_FIELD_NUMBER: _ClassVar[int]
    BODY_DIGEST_FIELD_NUMBER: _ClassVar[int]
    COMMAND_ID_FIELD_NUMBER: _ClassVar[int]
    UNFLUSHED_FIELD_NUMBER: _ClassVar[int]
    IS_RESUMPTION_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    RESULT_FIELD_NUMBER: _ClassVar[int]
    TOKENIZER_FINGERPRINT_FIELD_NUMBER: _ClassVar[int]
    MODEL_FINGERPRINT_FIELD_NUMBER: _ClassVar[int]
    LIMITS_FIELD_NUMBER: _ClassVar[int]
    RETENTION_FIELD_NUMBER: _ClassVar[int]
    ATTACHMENT_FIELD_NUMBER: _ClassVar[int]
    IS_BACKGROUND_FIELD_NUMBER: _ClassVar[int]
    WAS_ACCEPTED_FIELD_NUMBER: _ClassVar[int]
    PROMPT_COST_FIELD_NUMBER: _ClassVar[int]
    CALL_FIELD_NUMBER: _ClassVar[int]
    key: str
    submission_id: str
    tenant: str
    weight: float
    prompt_token_ids: _containers.RepeatedScalarFieldContainer[int]
    n: int
    max_tokens: int
    sampling: _worker_pb2.SamplingParams
    stop_token_ids: _containers.RepeatedScalarFieldContainer[int]
    has_stop_strings: bool
    priority: int
    time_left: _duration_pb2.Duration
    detachable: bool
    cache_salt: bytes
    traceparent: str
    beam_search: BeamSearch
    render_options: RenderOptions
    body_digest: bytes
    command_id: int
    unflushed: _containers.RepeatedCompositeFieldContainer[UnflushedTokens]
    is_resumption: bool
    model: str
    result: _worker_pb2.ResultKind
    tokenizer_fingerprint: bytes
    model_fingerprint: bytes
    limits: AccountLimits
    retention: Retention
    attachment: bytes
    is_background: bool
    was_accepted: bool
    prompt_cost: int
    call: CountedCall
    def __init__(self, key: _Optional[str] = ..., submission_id: _Optional[str] = ..., tenant: _Optional[str] = ..., weight: _Optional[float] = ..., prompt_token_ids: _Optional[_Iterable[int]] = ..., n: _Optional[int] = ..., max_tokens: _Optional[int] = ..., sampling: _Optional[_Union[_worker_pb2.SamplingParams, _Mapping]] = ..., stop_token_ids: _Optional[_Iterable[int]] = ..., has_stop_strings: _Optional[bool] = ..., priority: _Optional[int] = ..., time_left: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ..., detachable: _Optional[bool] = ..., cache_salt: _Optional[bytes] = ..., traceparent: _Optional[str] = ..., beam_search: _Optional[_Union[BeamSearch, _Mapping]] = ..., render_options: _Optional[_Union[RenderOptions, _Mapping]] = ..., body_digest: _Optional[bytes] = ..., command_id: _Optional[int] = ..., unflushed: _Optional[_Iterable[_Union[UnflushedTokens, _Mapping]]] = ..., is_resumption: _Optional[bool] = ..., model: _Optional[str] = ..., result: _Optional[_Union[_worker_pb2.ResultKind, _Mapping]] = ..., tokenizer_fingerprint: _Optional[bytes] = ..., model_fingerprint: _Optional[bytes] = ..., limits: _Optional[_Union[AccountLimits, _Mapping]] = ..., retention: _Optional[_Union[Retention, _Mapping]] = ..., attachment: _Optional[bytes] = ..., is_background: _Optional[bool] = ..., was_accepted: _Optional[bool] = ..., prompt_cost: _Optional[int] = ..., call: _Optional[_Union[CountedCall, _Mapping]] = ...) -> None: ...

class CountedCall(_message.Message):
    __slots__ = ("id", "num_requests")
    ID_FIELD_NUMBER: _ClassVar[int]
    NUM_REQUESTS_FIELD_NUMBER: _ClassVar[int]
    id: bytes
    num_requests: int
    def __init__(self, id: _Optional[bytes] = ..., num_requests: _Optional[int] = ...) -> None: ...

class UnflushedTokens(_message.Message):
    __slots__ = ("index", "offset", "token_ids", "logprobs", "is_truncated", "prompt_logprobs")
    INDEX_FIELD_NUMBER: _ClassVar[int]
    OFFSET_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    IS_TRUNCATED_FIELD_NUMBER: _ClassVar[int]
    PROMPT_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    index: int
    offset: int
    token_ids: _containers.RepeatedScalarFieldContainer[int]
    logprobs: _containers.RepeatedCompositeFieldContainer[_worker_pb2.TokenLogprobs]
    is_truncated: bool
    prompt_logprobs: _containers.RepeatedCompositeFieldContainer[_worker_pb2.TokenLogprobs]
    def __init__(self, index: _Optional[int] = ..., offset: _Optional[int] = ..., token_ids: _Optional[_Iterable[int]] = ..., logprobs: _Optional[_Iterable[_Union[_worker_pb2.TokenLogprobs, _Mapping]]] = ..., is_truncated: _Optional[bool] = ..., prompt_logprobs: _Optional[_Iterable[_Union[_worker_pb2.TokenLogprobs, _Mapping]]] = ...) -> None: ...

class Attach(_message.Message):
    __slots__ = ("key", "command_id", "unflushed", "model_fingerprint", "submission_id")
    KEY_FIELD_NUMBER: _ClassVar[int]
    COMMAND_ID_FIELD_NUMBER: _ClassVar[int]
    UNFLUSHED_FIELD_NUMBER: _ClassVar[int]
    MODEL_FINGERPRINT_FIELD_NUMBER: _ClassVar[int]
    SUBMISSION_ID_FIELD_NUMBER: _ClassVar[int]
    key: str
    command_id: int
    unflushed: _containers.RepeatedCompositeFieldContainer[UnflushedTokens]
    model_fingerprint: bytes
    submission_id: str
    def __init__(self, key: _Optional[str] = ..., command_id: _Optional[int] = ..., unflushed: _Optional[_Iterable[_Union[UnflushedTokens, _Mapping]]] = ..., model_fingerprint: _Optional[bytes] = ..., submission_id: _Optional[str] = ...) -> None: ...

class Lookup(_message.Message):
    __slots__ = ("key", "command_id")
    KEY_FIELD_NUMBER: _ClassVar[int]
    COMMAND_ID_FIELD_NUMBER: _ClassVar[int]
    key: str
    command_id: int
    def __init__(self, key: _Optional[str] = ..., command_id: _Optional[int] = ...) -> None: ...

class Delete(_message.Message):
    __slots__ = ("key", "command_id")
    KEY_FIELD_NUMBER: _ClassVar[int]
    COMMAND_ID_FIELD_NUMBER: _ClassVar[int]
    key: str
    command_id: int
    def __init__(self, key: _Optional[str] = ..., command_id: _Optional[int] = ...) -> None: ...

class Cancel(_message.Message):
    __slots__ = ("key", "submission_id", "sent_ago")
    KEY_FIELD_NUMBER: _ClassVar[int]
    SUBMISSION_ID_FIELD_NUMBER: _ClassVar[int]
    SENT_AGO_FIELD_NUMBER: _ClassVar[int]
    key: str
    submission_id: str
    sent_ago: _duration_pb2.Duration
    def __init__(self, key: _Optional[str] = ..., submission_id: _Optional[str] = ..., sent_ago: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ...) -> None: ...

class Detach(_message.Message):
    __slots__ = ("key",)
    KEY_FIELD_NUMBER: _ClassVar[int]
    key: str
    def __init__(self, key: _Optional[str] = ...) -> None: ...

class Finish(_message.Message):
    __slots__ = ("key", "index", "num_tokens", "submission_id")
    KEY_FIELD_NUMBER: _ClassVar[int]
    INDEX_FIELD_NUMBER: _ClassVar[int]
    NUM_TOKENS_FIELD_NUMBER: _ClassVar[int]
    SUBMISSION_ID_FIELD_NUMBER: _ClassVar[int]
    key: str
    index: int
    num_tokens: int
    submission_id: str
    def __init__(self, key: _Optional[str] = ..., index: _Optional[int] = ..., num_tokens: _Optional[int] = ..., submission_id: _Optional[str] = ...) -> None: ...

class Acknowledge(_message.Message):
    __slots__ = ("key", "index", "num_tokens")
    KEY_FIELD_NUMBER: _ClassVar[int]
    INDEX_FIELD_NUMBER: _ClassVar[int]
    NUM_TOKENS_FIELD_NUMBER: _ClassVar[int]
    key: str
    index: int
    num_tokens: int
    def __init__(self, key: _Optional[str] = ..., index: _Optional[int] = ..., num_tokens: _Optional[int] = ...) -> None: ...

class Hello(_message.Message):
    __slots__ = ("protocol",)
    PROTOCOL_FIELD_NUMBER: _ClassVar[int]
    protocol: int
    def __init__(self, protocol: _Optional[int] = ...) -> None: ...

class CommandBatch(_message.Message):
    __slots__ = ("commands",)
    COMMANDS_FIELD_NUMBER: _ClassVar[int]
    commands: _containers.RepeatedCompositeFieldContainer[SessionRequest]
    def __init__(self, commands: _Optional[_Iterable[_Union[SessionRequest, _Mapping]]] = ...) -> None: ...

class SessionRequest(_message.Message):
    __slots__ = ("submit", "cancel", "detach", "finish", "acknowledge", "attach", "hello", "lookup", "delete", "batch")
    SUBMIT_FIELD_NUMBER: _ClassVar[int]
    CANCEL_FIELD_NUMBER: _ClassVar[int]
    DETACH_FIELD_NUMBER: _ClassVar[int]
    FINISH_FIELD_NUMBER: _ClassVar[int]
    ACKNOWLEDGE_FIELD_NUMBER: _ClassVar[int]
    ATTACH_FIELD_NUMBER: _ClassVar[int]
    HELLO_FIELD_NUMBER: _ClassVar[int]
    LOOKUP_FIELD_NUMBER: _ClassVar[int]
    DELETE_FIELD_NUMBER: _ClassVar[int]
    BATCH_FIELD_NUMBER: _ClassVar[int]
    submit: Submit
    cancel: Cancel
    detach: Detach
    finish: Finish
    acknowledge: Acknowledge
    attach: Attach
    hello: Hello
    lookup: Lookup
    delete: Delete
    batch: CommandBatch
    def __init__(self, submit: _Optional[_Union[Submit, _Mapping]] = ..., cancel: _Optional[_Union[Cancel, _Mapping]] = ..., detach: _Optional[_Union[Detach, _Mapping]] = ..., finish: _Optional[_Union[Finish, _Mapping]] = ..., acknowledge: _Optional[_Union[Acknowledge, _Mapping]] = ..., attach: _Optional[_Union[Attach, _Mapping]] = ..., hello: _Optional[_Union[Hello, _Mapping]] = ..., lookup: _Optional[_Union[Lookup, _Mapping]] = ..., delete: _Optional[_Union[Delete, _Mapping]] = ..., batch: _Optional[_Union[CommandBatch, _Mapping]] = ...) -> None: ...

class Model(_message.Message):
    __slots__ = ("name", "tokenizer_fingerprint", "context_length", "vocab_size", "memory_pressure")
    NAME_FIELD_NUMBER: _ClassVar[int]
    TOKENIZER_FINGERPRINT_FIELD_NUMBER: _ClassVar[int]
    CONTEXT_LENGTH_FIELD_NUMBER: _ClassVar[int]
    VOCAB_SIZE_FIELD_NUMBER: _ClassVar[int]
    MEMORY_PRESSURE_FIELD_NUMBER: _ClassVar[int]
    name: str
    tokenizer_fingerprint: bytes
    context_length: int
    vocab_size: int
    memory_pressure: _worker_pb2.MemoryPressure
    def __init__(self, name: _Optional[str] = ..., tokenizer_fingerprint: _Optional[bytes] = ..., context_length: _Optional[int] = ..., vocab_size: _Optional[int] = ..., memory_pressure: _Optional[_Union[_worker_pb2.MemoryPressure, str]] = ...) -> None: ...

class Status(_message.Message):
    __slots__ = ("model", "is_store_degraded", "models", "oldest_protocol", "newest_protocol", "num_workers_set_apart")
    MODEL_FIELD_NUMBER: _ClassVar[int]
    IS_STORE_DEGRADED_FIELD_NUMBER: _ClassVar[int]
    MODELS_FIELD_NUMBER: _ClassVar[int]
    OLDEST_PROTOCOL_FIELD_NUMBER: _ClassVar[int]
    NEWEST_PROTOCOL_FIELD_NUMBER: _ClassVar[int]
    NUM_WORKERS_SET_APART_FIELD_NUMBER: _ClassVar[int]
    model: Model
    is_store_degraded: bool
    models: _containers.RepeatedCompositeFieldContainer[Model]
    oldest_protocol: int
    newest_protocol: int
    num_workers_set_apart: int
    def __init__(self, model: _Optional[_Union[Model, _Mapping]] = ..., is_store_degraded: _Optional[bool] = ..., models: _Optional[_Iterable[_Union[Model, _Mapping]]] = ..., oldest_protocol: _Optional[int] = ..., newest_protocol: _Optional[int] = ..., num_workers_set_apart: _Optional[int] = ...) -> None: ...

class Accepted(_message.Message):
    __slots__ = ("is_durable",)
    IS_DURABLE_FIELD_NUMBER: _ClassVar[int]
    is_durable: bool
    def __init__(self, is_durable: _Optional[bool] = ...) -> None: ...

class Attached(_message.Message):
    __slots__ = ("render_options", "prompt_length", "sequences", "submission_id", "detachable", "seed", "num_sequences", "prompt_logprobs", "tokenizer_fingerprint", "is_durable", "retention", "prompt_token_ids")
    RENDER_OPTIONS_FIELD_NUMBER: _ClassVar[int]
    PROMPT_LENGTH_FIELD_NUMBER: _ClassVar[int]
    SEQUENCES_FIELD_NUMBER: _ClassVar[int]
    SUBMISSION_ID_FIELD_NUMBER: _ClassVar[int]
    DETACHABLE_FIELD_NUMBER: _ClassVar[int]
    SEED_FIELD_NUMBER: _ClassVar[int]
    NUM_SEQUENCES_FIELD_NUMBER: _ClassVar[int]
    PROMPT_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    TOKENIZER_FINGERPRINT_FIELD_NUMBER: _ClassVar[int]
    IS_DURABLE_FIELD_NUMBER: _ClassVar[int]
    RETENTION_FIELD_NUMBER: _ClassVar[int]
    PROMPT_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    render_options: RenderOptions
    prompt_length: int
    sequences: _containers.RepeatedCompositeFieldContainer[Tokens]
    submission_id: str
    detachable: bool
    seed: int
    num_sequences: int
    prompt_logprobs: PromptLogprobs
    tokenizer_fingerprint: bytes
    is_durable: bool
    retention: Retention
    prompt_token_ids: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, render_options: _Optional[_Union[RenderOptions, _Mapping]] = ..., prompt_length: _Optional[int] = ..., sequences: _Optional[_Iterable[_Union[Tokens, _Mapping]]] = ..., submission_id: _Optional[str] = ..., detachable: _Optional[bool] = ..., seed: _Optional[int] = ..., num_sequences: _Optional[int] = ..., prompt_logprobs: _Optional[_Union[PromptLogprobs, _Mapping]] = ..., tokenizer_fingerprint: _Optional[bytes] = ..., is_durable: _Optional[bool] = ..., retention: _Optional[_Union[Retention, _Mapping]] = ..., prompt_token_ids: _Optional[_Iterable[int]] = ...) -> None: ...

class Record(_message.Message):
    __slots__ = ("attached", "attachment", "ended_at", "failed")
    ATTACHED_FIELD_NUMBER: _ClassVar[int]
    ATTACHMENT_FIELD_NUMBER: _ClassVar[int]
    ENDED_AT_FIELD_NUMBER: _ClassVar[int]
    FAILED_FIELD_NUMBER: _ClassVar[int]
    attached: Attached
    attachment: bytes
    ended_at: _timestamp_pb2.Timestamp
    failed: Failed
    def __init__(self, attached: _Optional[_Union[Attached, _Mapping]] = ..., attachment: _Optional[bytes] = ..., ended_at: _Optional[_Union[datetime.datetime, _timestamp_pb2.Timestamp, _Mapping]] = ..., failed: _Optional[_Union[Failed, _Mapping]] = ...) -> None: ...

class Deleted(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class PromptLogprobs(_message.Message):
    __slots__ = ("offset", "tokens")
    OFFSET_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    offset: int
    tokens: _containers.RepeatedCompositeFieldContainer[_worker_pb2.TokenLogprobs]
    def __init__(self, offset: _Optional[int] = ..., tokens: _Optional[_Iterable[_Union[_worker_pb2.TokenLogprobs, _Mapping]]] = ...) -> None: ...

class PromptPaid(_message.Message):
    __slots__ = ("num_tokens",)
    NUM_TOKENS_FIELD_NUMBER: _ClassVar[int]
    num_tokens: int
    def __init__(self, num_tokens: _Optional[int] = ...) -> None: ...

class Durable(_message.Message):
    __slots__ = ("index", "num_tokens")
    INDEX_FIELD_NUMBER: _ClassVar[int]
    NUM_TOKENS_FIELD_NUMBER: _ClassVar[int]
    index: int
    num_tokens: int
    def __init__(self, index: _Optional[int] = ..., num_tokens: _Optional[int] = ...) -> None: ...

class Failed(_message.Message):
    __slots__ = ("reason", "message", "retry_after")
    REASON_FIELD_NUMBER: _ClassVar[int]
    MESSAGE_FIELD_NUMBER: _ClassVar[int]
    RETRY_AFTER_FIELD_NUMBER: _ClassVar[int]
    reason: FailureReason
    message: str
    retry_after: _duration_pb2.Duration
    def __init__(self, reason: _Optional[_Union[FailureReason, str]] = ..., message: _Optional[str] = ..., retry_after: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ...) -> None: ...

class SequenceEnd(_message.Message):
    __slots__ = ("stop_token_id", "length", "stop_string", "value")
    STOP_TOKEN_ID_FIELD_NUMBER: _ClassVar[int]
    LENGTH_FIELD_NUMBER: _ClassVar[int]
    STOP_STRING_FIELD_NUMBER: _ClassVar[int]
    VALUE_FIELD_NUMBER: _ClassVar[int]
    stop_token_id: int
    length: Length
    stop_string: StopString
    value: _worker_pb2.PromptValue
    def __init__(self, stop_token_id: _Optional[int] = ..., length: _Optional[_Union[Length, _Mapping]] = ..., stop_string: _Optional[_Union[StopString, _Mapping]] = ..., value: _Optional[_Union[_worker_pb2.PromptValue, _Mapping]] = ...) -> None: ...

class Length(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class StopString(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class Tokens(_message.Message):
    __slots__ = ("index", "offset", "token_ids", "logprobs", "cached_tokens", "end", "score", "model_fingerprint")
    INDEX_FIELD_NUMBER: _ClassVar[int]
    OFFSET_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    CACHED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    END_FIELD_NUMBER: _ClassVar[int]
    SCORE_FIELD_NUMBER: _ClassVar[int]
    MODEL_FINGERPRINT_FIELD_NUMBER: _ClassVar[int]
    index: int
    offset: int
    token_ids: _containers.RepeatedScalarFieldContainer[int]
    logprobs: _containers.RepeatedCompositeFieldContainer[_worker_pb2.TokenLogprobs]
    cached_tokens: int
    end: SequenceEnd
    score: float
    model_fingerprint: bytes
    def __init__(self, index: _Optional[int] = ..., offset: _Optional[int] = ..., token_ids: _Optional[_Iterable[int]] = ..., logprobs: _Optional[_Iterable[_Union[_worker_pb2.TokenLogprobs, _Mapping]]] = ..., cached_tokens: _Optional[int] = ..., end: _Optional[_Union[SequenceEnd, _Mapping]] = ..., score: _Optional[float] = ..., model_fingerprint: _Optional[bytes] = ...) -> None: ...

class Event(_message.Message):
    __slots__ = ("key", "accepted", "tokens", "failed", "attached", "durable", "prompt_logprobs", "record", "deleted", "prompt_paid", "command_id")
    KEY_FIELD_NUMBER: _ClassVar[int]
    ACCEPTED_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    FAILED_FIELD_NUMBER: _ClassVar[int]
    ATTACHED_FIELD_NUMBER: _ClassVar[int]
    DURABLE_FIELD_NUMBER: _ClassVar[int]
    PROMPT_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    RECORD_FIELD_NUMBER: _ClassVar[int]
    DELETED_FIELD_NUMBER: _ClassVar[int]
    PROMPT_PAID_FIELD_NUMBER: _ClassVar[int]
    COMMAND_ID_FIELD_NUMBER: _ClassVar[int]
    key: str
    accepted: Accepted
    tokens: Tokens
    failed: Failed
    attached: Attached
    durable: Durable
    prompt_logprobs: PromptLogprobs
    record: Record
    deleted: Deleted
    prompt_paid: PromptPaid
    command_id: int
    def __init__(self, key: _Optional[str] = ..., accepted: _Optional[_Union[Accepted, _Mapping]] = ..., tokens: _Optional[_Union[Tokens, _Mapping]] = ..., failed: _Optional[_Union[Failed, _Mapping]] = ..., attached: _Optional[_Union[Attached, _Mapping]] = ..., durable: _Optional[_Union[Durable, _Mapping]] = ..., prompt_logprobs: _Optional[_Union[PromptLogprobs, _Mapping]] = ..., record: _Optional[_Union[Record, _Mapping]] = ..., deleted: _Optional[_Union[Deleted, _Mapping]] = ..., prompt_paid: _Optional[_Union[PromptPaid, _Mapping]] = ..., command_id: _Optional[int] = ...) -> None: ...

class SessionResponse(_message.Message):
    __slots__ = ("epoch", "events", "status")
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    EVENTS_FIELD_NUMBER: _ClassVar[int]
    STATUS_FIELD_NUMBER: _ClassVar[int]
    epoch: int
    events: _containers.RepeatedCompositeFieldContainer[Event]
    status: Status
    def __init__(self, epoch: _Optional[int] = ..., events: _Optional[_Iterable[_Union[Event, _Mapping]]] = ..., status: _Optional[_Union[Status, _Mapping]] = ...) -> None: ...
