import datetime

from google.protobuf import timestamp_pb2 as _timestamp_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class MemoryPressure(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    MEMORY_PRESSURE_UNSPECIFIED: _ClassVar[MemoryPressure]
    MEMORY_PRESSURE_NONE: _ClassVar[MemoryPressure]
    MEMORY_PRESSURE_HIGH: _ClassVar[MemoryPressure]
    MEMORY_PRESSURE_CRITICAL: _ClassVar[MemoryPressure]

class Pooling(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    POOLING_UNSPECIFIED: _ClassVar[Pooling]
    POOLING_MEAN: _ClassVar[Pooling]
    POOLING_CLS: _ClassVar[Pooling]
    POOLING_LAST: _ClassVar[Pooling]

class Normalization(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    NORMALIZATION_UNSPECIFIED: _ClassVar[Normalization]
    NORMALIZATION_NONE: _ClassVar[Normalization]
    NORMALIZATION_L2: _ClassVar[Normalization]

class PromptComputation(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    PROMPT_COMPUTATION_UNSPECIFIED: _ClassVar[PromptComputation]
    PROMPT_COMPUTATION_CHUNKED: _ClassVar[PromptComputation]
    PROMPT_COMPUTATION_INDIVISIBLE: _ClassVar[PromptComputation]
    PROMPT_COMPUTATION_INDIVISIBLE_WITHOUT_KV: _ClassVar[PromptComputation]

class SequenceFailureReason(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    SEQUENCE_FAILURE_REASON_UNSPECIFIED: _ClassVar[SequenceFailureReason]
    SEQUENCE_FAILURE_REASON_GRAMMAR_TOO_COMPLEX: _ClassVar[SequenceFailureReason]
    SEQUENCE_FAILURE_REASON_OUT_OF_MEMORY: _ClassVar[SequenceFailureReason]

class Direction(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    DIRECTION_UNSPECIFIED: _ClassVar[Direction]
    DIRECTION_OUT: _ClassVar[Direction]
    DIRECTION_IN: _ClassVar[Direction]
MEMORY_PRESSURE_UNSPECIFIED: MemoryPressure
MEMORY_PRESSURE_NONE: MemoryPressure
MEMORY_PRESSURE_HIGH: MemoryPressure
MEMORY_PRESSURE_CRITICAL: MemoryPressure
POOLING_UNSPECIFIED: Pooling
POOLING_MEAN: Pooling
POOLING_CLS: Pooling
POOLING_LAST: Pooling
NORMALIZATION_UNSPECIFIED: Normalization
NORMALIZATION_NONE: Normalization
NORMALIZATION_L2: Normalization
PROMPT_COMPUTATION_UNSPECIFIED: PromptComputation
PROMPT_COMPUTATION_CHUNKED: PromptComputation
PROMPT_COMPUTATION_INDIVISIBLE: PromptComputation
PROMPT_COMPUTATION_INDIVISIBLE_WITHOUT_KV: PromptComputation
SEQUENCE_FAILURE_REASON_UNSPECIFIED: SequenceFailureReason
SEQUENCE_FAILURE_REASON_GRAMMAR_TOO_COMPLEX: SequenceFailureReason
SEQUENCE_FAILURE_REASON_OUT_OF_MEMORY: SequenceFailureReason
DIRECTION_UNSPECIFIED: Direction
DIRECTION_OUT: Direction
DIRECTION_IN: Direction

class DescribeRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class StartProfileRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class StartProfileResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class StopProfileRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class StopProfileResponse(_message.Message):
    __slots__ = ("path",)
    PATH_FIELD_NUMBER: _ClassVar[int]
    path: str
    def __init__(self, path: _Optional[str] = ...) -> None: ...

class RestartRequest(_message.Message):
    __slots__ = ("epoch", "worker_epoch")
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    WORKER_EPOCH_FIELD_NUMBER: _ClassVar[int]
    epoch: int
    worker_epoch: int
    def __init__(self, epoch: _Optional[int] = ..., worker_epoch: _Optional[int] = ...) -> None: ...

class RestartResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class DescribeResponse(_message.Message):
    __slots__ = ("model", "fingerprint", "tokenizer_fingerprint", "context_length", "vocab_size", "block_size", "block_bytes", "num_blocks", "max_step_tokens", "max_sequences", "epoch", "num_host_blocks", "swap_bytes_per_second", "prefill_tokens_per_second", "is_draining", "max_sampled_tokens", "oldest_protocol", "newest_protocol", "computed_results", "started_at", "max_indivisible_tokens", "memory_pressure", "has_kv_in_host_memory", "usual_step_tokens")
    MODEL_FIELD_NUMBER: _ClassVar[int]
    FINGERPRINT_FIELD_NUMBER: _ClassVar[int]
    TOKENIZER_FINGERPRINT_FIELD_NUMBER: _ClassVar[int]
    CONTEXT_LENGTH_FIELD_NUMBER: _ClassVar[int]
    VOCAB_SIZE_FIELD_NUMBER: _ClassVar[int]
    BLOCK_SIZE_FIELD_NUMBER: _ClassVar[int]
    BLOCK_BYTES_FIELD_NUMBER: _ClassVar[int]
    NUM_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    MAX_STEP_TOKENS_FIELD_NUMBER: _ClassVar[int]
    MAX_SEQUENCES_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    NUM_HOST_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    SWAP_BYTES_PER_SECOND_FIELD_NUMBER: _ClassVar[int]
    PREFILL_TOKENS_PER_SECOND_FIELD_NUMBER: _ClassVar[int]
    IS_DRAINING_FIELD_NUMBER: _ClassVar[int]
    MAX_SAMPLED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    OLDEST_PROTOCOL_FIELD_NUMBER: _ClassVar[int]
    NEWEST_PROTOCOL_FIELD_NUMBER: _ClassVar[int]
    COMPUTED_RESULTS_FIELD_NUMBER: _ClassVar[int]
    STARTED_AT_FIELD_NUMBER: _ClassVar[int]
    MAX_INDIVISIBLE_TOKENS_FIELD_NUMBER: _ClassVar[int]
    MEMORY_PRESSURE_FIELD_NUMBER: _ClassVar[int]
    HAS_KV_IN_HOST_MEMORY_FIELD_NUMBER: _ClassVar[int]
    USUAL_STEP_TOKENS_FIELD_NUMBER: _ClassVar[int]
    model: str
    fingerprint: bytes
    tokenizer_fingerprint: bytes
    context_length: int
    vocab_size: int
    block_size: int
    block_bytes: int
    num_blocks: int
    max_step_tokens: int
    max_sequences: int
    epoch: int
    num_host_blocks: int
    swap_bytes_per_second: float
    prefill_tokens_per_second: float
    is_draining: bool
    max_sampled_tokens: int
    oldest_protocol: int
    newest_protocol: int
    computed_results: _containers.RepeatedCompositeFieldContainer[ComputedResult]
    started_at: _timestamp_pb2.Timestamp
    max_indivisible_tokens: int
    memory_pressure: MemoryPressure
    has_kv_in_host_memory: bool
    usual_step_tokens: int
    def __init__(self, model: _Optional[str] = ..., fingerprint: _Optional[bytes] = ..., tokenizer_fingerprint: _Optional[bytes] = ..., context_length: _Optional[int] = ..., vocab_size: _Optional[int] = ..., block_size: _Optional[int] = ..., block_bytes: _Optional[int] = ..., num_blocks: _Optional[int] = ..., max_step_tokens: _Optional[int] = ..., max_sequences: _Optional[int] = ..., epoch: _Optional[int] = ..., num_host_blocks: _Optional[int] = ..., swap_bytes_per_second: _Optional[float] = ..., prefill_tokens_per_second: _Optional[float] = ..., is_draining: _Optional[bool] = ..., max_sampled_tokens: _Optional[int] = ..., oldest_protocol: _Optional[int] = ..., newest_protocol: _Optional[int] = ..., computed_results: _Optional[_Iterable[_Union[ComputedResult, _Mapping]]] = ..., started_at: _Optional[_Union[datetime.datetime, _timestamp_pb2.Timestamp, _Mapping]] = ..., max_indivisible_tokens: _Optional[int] = ..., memory_pressure: _Optional[_Union[MemoryPressure, str]] = ..., has_kv_in_host_memory: _Optional[bool] = ..., usual_step_tokens: _Optional[int] = ...) -> None: ...

class ResultKind(_message.Message):
    __slots__ = ("tokens", "prompt_logprobs", "embedding", "score")
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    PROMPT_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    EMBEDDING_FIELD_NUMBER: _ClassVar[int]
    SCORE_FIELD_NUMBER: _ClassVar[int]
    tokens: TokensResult
    prompt_logprobs: PromptLogprobsResult
    embedding: EmbeddingResult
    score: ScoreResult
    def __init__(self, tokens: _Optional[_Union[TokensResult, _Mapping]] = ..., prompt_logprobs: _Optional[_Union[PromptLogprobsResult, _Mapping]] = ..., embedding: _Optional[_Union[EmbeddingResult, _Mapping]] = ..., score: _Optional[_Union[ScoreResult, _Mapping]] = ...) -> None: ...

class TokensResult(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class PromptLogprobsResult(_message.Message):
    __slots__ = ("num_top_logprobs",)
    NUM_TOP_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    num_top_logprobs: int
    def __init__(self, num_top_logprobs: _Optional[int] = ...) -> None: ...

class EmbeddingResult(_message.Message):
    __slots__ = ("pooling", "num_dimensions", "normalization")
    POOLING_FIELD_NUMBER: _ClassVar[int]
    NUM_DIMENSIONS_FIELD_NUMBER: _ClassVar[int]
    NORMALIZATION_FIELD_NUMBER: _ClassVar[int]
    pooling: Pooling
    num_dimensions: int
    normalization: Normalization
    def __init__(self, pooling: _Optional[_Union[Pooling, str]] = ..., num_dimensions: _Optional[int] = ..., normalization: _Optional[_Union[Normalization, str]] = ...) -> None: ...

class ScoreResult(_message.Message):
    __slots__ = ("num_first_tokens", "is_raw")
    NUM_FIRST_TOKENS_FIELD_NUMBER: _ClassVar[int]
    IS_RAW_FIELD_NUMBER: _ClassVar[int]
    num_first_tokens: int
    is_raw: bool
    def __init__(self, num_first_tokens: _Optional[int] = ..., is_raw: _Optional[bool] = ...) -> None: ...

class ComputedResult(_message.Message):
    __slots__ = ("result", "computation")
    RESULT_FIELD_NUMBER: _ClassVar[int]
    COMPUTATION_FIELD_NUMBER: _ClassVar[int]
    result: ResultKind
    computation: PromptComputation
    def __init__(self, result: _Optional[_Union[ResultKind, _Mapping]] = ..., computation: _Optional[_Union[PromptComputation, str]] = ...) -> None: ...

class BlockHashes(_message.Message):
    __slots__ = ("block_ids", "hashes")
    BLOCK_IDS_FIELD_NUMBER: _ClassVar[int]
    HASHES_FIELD_NUMBER: _ClassVar[int]
    block_ids: _containers.RepeatedScalarFieldContainer[int]
    hashes: _containers.RepeatedScalarFieldContainer[bytes]
    def __init__(self, block_ids: _Optional[_Iterable[int]] = ..., hashes: _Optional[_Iterable[bytes]] = ...) -> None: ...

class ReportBlockHashesRequest(_message.Message):
    __slots__ = ("epoch", "generation")
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    GENERATION_FIELD_NUMBER: _ClassVar[int]
    epoch: int
    generation: int
    def __init__(self, epoch: _Optional[int] = ..., generation: _Optional[int] = ...) -> None: ...

class ReportBlockHashesResponse(_message.Message):
    __slots__ = ("device", "host")
    DEVICE_FIELD_NUMBER: _ClassVar[int]
    HOST_FIELD_NUMBER: _ClassVar[int]
    device: BlockHashes
    host: BlockHashes
    def __init__(self, device: _Optional[_Union[BlockHashes, _Mapping]] = ..., host: _Optional[_Union[BlockHashes, _Mapping]] = ...) -> None: ...

class SamplingParams(_message.Message):
    __slots__ = ("temperature", "top_p", "top_k", "min_p", "presence_penalty", "frequency_penalty", "repetition_penalty", "seed", "logit_bias", "suppressed_token_ids", "min_tokens", "logprobs", "typical_p", "grammar", "allowed_token_ids", "bad_words", "logprob_token_ids")
    class LogitBiasEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: int
        value: float
        def __init__(self, key: _Optional[int] = ..., value: _Optional[float] = ...) -> None: ...
    TEMPERATURE_FIELD_NUMBER: _ClassVar[int]
    TOP_P_FIELD_NUMBER: _ClassVar[int]
    TOP_K_FIELD_NUMBER: _ClassVar[int]
    MIN_P_FIELD_NUMBER: _ClassVar[int]
    PRESENCE_PENALTY_FIELD_NUMBER: _ClassVar[int]
    FREQUENCY_PENALTY_FIELD_NUMBER: _ClassVar[int]
    REPETITION_PENALTY_FIELD_NUMBER: _ClassVar[int]
    SEED_FIELD_NUMBER: _ClassVar[int]
    LOGIT_BIAS_FIELD_NUMBER: _ClassVar[int]
    SUPPRESSED_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    MIN_TOKENS_FIELD_NUMBER: _ClassVar[int]
    LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    TYPICAL_P_FIELD_NUMBER: _ClassVar[int]
    GRAMMAR_FIELD_NUMBER: _ClassVar[int]
    ALLOWED_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    BAD_WORDS_FIELD_NUMBER: _ClassVar[int]
    LOGPROB_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    temperature: float
    top_p: float
    top_k: int
    min_p: float
    presence_penalty: float
    frequency_penalty: float
    repetition_penalty: float
    seed: int
    logit_bias: _containers.ScalarMap[int, float]
    suppressed_token_ids: _containers.RepeatedScalarFieldContainer[int]
    min_tokens: int
    logprobs: int
    typical_p: float
    grammar: str
    allowed_token_ids: _containers.RepeatedScalarFieldContainer[int]
    bad_words: _containers.RepeatedCompositeFieldContainer[TokenSequence]
    logprob_token_ids: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, temperature: _Optional[float] = ..., top_p: _Optional[float] = ..., top_k: _Optional[int] = ..., min_p: _Optional[float] = ..., presence_penalty: _Optional[float] = ..., frequency_penalty: _Optional[float] = ..., repetition_penalty: _Optional[float] = ..., seed: _Optional[int] = ..., logit_bias: _Optional[_Mapping[int, float]] = ..., suppressed_token_ids: _Optional[_Iterable[int]] = ..., min_tokens: _Optional[int] = ..., logprobs: _Optional[int] = ..., typical_p: _Optional[float] = ..., grammar: _Optional[str] = ..., allowed_token_ids: _Optional[_Iterable[int]] = ..., bad_words: _Optional[_Iterable[_Union[TokenSequence, _Mapping]]] = ..., logprob_token_ids: _Optional[_Iterable[int]] = ...) -> None: ...

class TokenSequence(_message.Message):
    __slots__ = ("token_ids",)
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    token_ids: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, token_ids: _Optional[_Iterable[int]] = ...) -> None: ...

class NewSequence(_message.Message):
    __slots__ = ("sequence_id", "token_ids", "prompt_length", "index", "sampling", "traceparent", "result")
    SEQUENCE_ID_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    PROMPT_LENGTH_FIELD_NUMBER: _ClassVar[int]
    INDEX_FIELD_NUMBER: _ClassVar[int]
    SAMPLING_FIELD_NUMBER: _ClassVar[int]
    TRACEPARENT_FIELD_NUMBER: _ClassVar[int]
    RESULT_FIELD_NUMBER: _ClassVar[int]
    sequence_id: int
    token_ids: _containers.RepeatedScalarFieldContainer[int]
    prompt_length: int
    index: int
    sampling: SamplingParams
    traceparent: str
    result: ResultKind
    def __init__(self, sequence_id: _Optional[int] = ..., token_ids: _Optional[_Iterable[int]] = ..., prompt_length: _Optional[int] = ..., index: _Optional[int] = ..., sampling: _Optional[_Union[SamplingParams, _Mapping]] = ..., traceparent: _Optional[str] = ..., result: _Optional[_Union[ResultKind, _Mapping]] = ...) -> None: ...

class Schedule(_message.Message):
    __slots__ = ("sequence_ids", "starts", "num_tokens", "num_new_blocks", "new_block_ids", "cached_tokens", "max_extra_tokens")
    SEQUENCE_IDS_FIELD_NUMBER: _ClassVar[int]
    STARTS_FIELD_NUMBER: _ClassVar[int]
    NUM_TOKENS_FIELD_NUMBER: _ClassVar[int]
    NUM_NEW_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    NEW_BLOCK_IDS_FIELD_NUMBER: _ClassVar[int]
    CACHED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    MAX_EXTRA_TOKENS_FIELD_NUMBER: _ClassVar[int]
    sequence_ids: _containers.RepeatedScalarFieldContainer[int]
    starts: _containers.RepeatedScalarFieldContainer[int]
    num_tokens: _containers.RepeatedScalarFieldContainer[int]
    num_new_blocks: _containers.RepeatedScalarFieldContainer[int]
    new_block_ids: _containers.RepeatedScalarFieldContainer[int]
    cached_tokens: _containers.RepeatedCompositeFieldContainer[CachedTokens]
    max_extra_tokens: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, sequence_ids: _Optional[_Iterable[int]] = ..., starts: _Optional[_Iterable[int]] = ..., num_tokens: _Optional[_Iterable[int]] = ..., num_new_blocks: _Optional[_Iterable[int]] = ..., new_block_ids: _Optional[_Iterable[int]] = ..., cached_tokens: _Optional[_Iterable[_Union[CachedTokens, _Mapping]]] = ..., max_extra_tokens: _Optional[_Iterable[int]] = ...) -> None: ...

class CachedTokens(_message.Message):
    __slots__ = ("schedule_index", "num_cached_tokens")
    SCHEDULE_INDEX_FIELD_NUMBER: _ClassVar[int]
    NUM_CACHED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    schedule_index: int
    num_cached_tokens: int
    def __init__(self, schedule_index: _Optional[int] = ..., num_cached_tokens: _Optional[int] = ...) -> None: ...

class BlockCopies(_message.Message):
    __slots__ = ("sources", "destinations")
    SOURCES_FIELD_NUMBER: _ClassVar[int]
    DESTINATIONS_FIELD_NUMBER: _ClassVar[int]
    sources: _containers.RepeatedScalarFieldContainer[int]
    destinations: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, sources: _Optional[_Iterable[int]] = ..., destinations: _Optional[_Iterable[int]] = ...) -> None: ...

class BlockTableUpdate(_message.Message):
    __slots__ = ("sequence_id", "index", "block_id")
    SEQUENCE_ID_FIELD_NUMBER: _ClassVar[int]
    INDEX_FIELD_NUMBER: _ClassVar[int]
    BLOCK_ID_FIELD_NUMBER: _ClassVar[int]
    sequence_id: int
    index: int
    block_id: int
    def __init__(self, sequence_id: _Optional[int] = ..., index: _Optional[int] = ..., block_id: _Optional[int] = ...) -> None: ...

class StepRequest(_message.Message):
    __slots__ = ("epoch", "generation", "step_id", "finished_ids", "new_sequences", "scheduled", "swap_out", "swap_in", "copies", "block_table_updates", "block_hashes", "host_block_hashes", "protocol", "discarded_block_ids", "discarded_host_block_ids")
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    GENERATION_FIELD_NUMBER: _ClassVar[int]
    STEP_ID_FIELD_NUMBER: _ClassVar[int]
    FINISHED_IDS_FIELD_NUMBER: _ClassVar[int]
    NEW_SEQUENCES_FIELD_NUMBER: _ClassVar[int]
    SCHEDULED_FIELD_NUMBER: _ClassVar[int]
    SWAP_OUT_FIELD_NUMBER: _ClassVar[int]
    SWAP_IN_FIELD_NUMBER: _ClassVar[int]
    COPIES_FIELD_NUMBER: _ClassVar[int]
    BLOCK_TABLE_UPDATES_FIELD_NUMBER: _ClassVar[int]
    BLOCK_HASHES_FIELD_NUMBER: _ClassVar[int]
    HOST_BLOCK_HASHES_FIELD_NUMBER: _ClassVar[int]
    PROTOCOL_FIELD_NUMBER: _ClassVar[int]
    DISCARDED_BLOCK_IDS_FIELD_NUMBER: _ClassVar[int]
    DISCARDED_HOST_BLOCK_IDS_FIELD_NUMBER: _ClassVar[int]
    epoch: int
    generation: int
    step_id: int
    finished_ids: _containers.RepeatedScalarFieldContainer[int]
    new_sequences: _containers.RepeatedCompositeFieldContainer[NewSequence]
    scheduled: Schedule
    swap_out: BlockCopies
    swap_in: BlockCopies
    copies: BlockCopies
    block_table_updates: _containers.RepeatedCompositeFieldContainer[BlockTableUpdate]
    block_hashes: BlockHashes
    host_block_hashes: BlockHashes
    protocol: int
    discarded_block_ids: _containers.RepeatedScalarFieldContainer[int]
    discarded_host_block_ids: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, epoch: _Optional[int] = ..., generation: _Optional[int] = ..., step_id: _Optional[int] = ..., finished_ids: _Optional[_Iterable[int]] = ..., new_sequences: _Optional[_Iterable[_Union[NewSequence, _Mapping]]] = ..., scheduled: _Optional[_Union[Schedule, _Mapping]] = ..., swap_out: _Optional[_Union[BlockCopies, _Mapping]] = ..., swap_in: _Optional[_Union[BlockCopies, _Mapping]] = ..., copies: _Optional[_Union[BlockCopies, _Mapping]] = ..., block_table_updates: _Optional[_Iterable[_Union[BlockTableUpdate, _Mapping]]] = ..., block_hashes: _Optional[_Union[BlockHashes, _Mapping]] = ..., host_block_hashes: _Optional[_Union[BlockHashes, _Mapping]] = ..., protocol: _Optional[int] = ..., discarded_block_ids: _Optional[_Iterable[int]] = ..., discarded_host_block_ids: _Optional[_Iterable[int]] = ...) -> None: ...

class Logprob(_message.Message):
    __slots__ = ("token_id", "logprob")
    TOKEN_ID_FIELD_NUMBER: _ClassVar[int]
    LOGPROB_FIELD_NUMBER: _ClassVar[int]
    token_id: int
    logprob: float
    def __init__(self, token_id: _Optional[int] = ..., logprob: _Optional[float] = ...) -> None: ...

class TokenLogprobs(_message.Message):
    __slots__ = ("logprob", "top", "requested")
    LOGPROB_FIELD_NUMBER: _ClassVar[int]
    TOP_FIELD_NUMBER: _ClassVar[int]
    REQUESTED_FIELD_NUMBER: _ClassVar[int]
    logprob: float
    top: _containers.RepeatedCompositeFieldContainer[Logprob]
    requested: _containers.RepeatedScalarFieldContainer[float]
    def __init__(self, logprob: _Optional[float] = ..., top: _Optional[_Iterable[_Union[Logprob, _Mapping]]] = ..., requested: _Optional[_Iterable[float]] = ...) -> None: ...

class SequenceLogprobs(_message.Message):
    __slots__ = ("schedule_index", "tokens")
    SCHEDULE_INDEX_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    schedule_index: int
    tokens: _containers.RepeatedCompositeFieldContainer[TokenLogprobs]
    def __init__(self, schedule_index: _Optional[int] = ..., tokens: _Optional[_Iterable[_Union[TokenLogprobs, _Mapping]]] = ...) -> None: ...

class PromptValue(_message.Message):
    __slots__ = ("numbers",)
    NUMBERS_FIELD_NUMBER: _ClassVar[int]
    numbers: _containers.RepeatedScalarFieldContainer[float]
    def __init__(self, numbers: _Optional[_Iterable[float]] = ...) -> None: ...

class SequenceValue(_message.Message):
    __slots__ = ("schedule_index", "value")
    SCHEDULE_INDEX_FIELD_NUMBER: _ClassVar[int]
    VALUE_FIELD_NUMBER: _ClassVar[int]
    schedule_index: int
    value: PromptValue
    def __init__(self, schedule_index: _Optional[int] = ..., value: _Optional[_Union[PromptValue, _Mapping]] = ...) -> None: ...

class SequenceFailure(_message.Message):
    __slots__ = ("schedule_index", "message", "reason")
    SCHEDULE_INDEX_FIELD_NUMBER: _ClassVar[int]
    MESSAGE_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    schedule_index: int
    message: str
    reason: SequenceFailureReason
    def __init__(self, schedule_index: _Optional[int] = ..., message: _Optional[str] = ..., reason: _Optional[_Union[SequenceFailureReason, str]] = ...) -> None: ...

class SwapResult(_message.Message):
    __slots__ = ("step_id", "direction", "duration_us", "failure")
    STEP_ID_FIELD_NUMBER: _ClassVar[int]
    DIRECTION_FIELD_NUMBER: _ClassVar[int]
    DURATION_US_FIELD_NUMBER: _ClassVar[int]
    FAILURE_FIELD_NUMBER: _ClassVar[int]
    step_id: int
    direction: Direction
    duration_us: int
    failure: str
    def __init__(self, step_id: _Optional[int] = ..., direction: _Optional[_Union[Direction, str]] = ..., duration_us: _Optional[int] = ..., failure: _Optional[str] = ...) -> None: ...

class Ready(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class StepResult(_message.Message):
    __slots__ = ("sequence_ids", "num_tokens", "token_ids", "logprobs", "failures", "busy_us", "idle_us", "swaps", "values", "prompt_logprobs", "memory_pressure")
    SEQUENCE_IDS_FIELD_NUMBER: _ClassVar[int]
    NUM_TOKENS_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    FAILURES_FIELD_NUMBER: _ClassVar[int]
    BUSY_US_FIELD_NUMBER: _ClassVar[int]
    IDLE_US_FIELD_NUMBER: _ClassVar[int]
    SWAPS_FIELD_NUMBER: _ClassVar[int]
    VALUES_FIELD_NUMBER: _ClassVar[int]
    PROMPT_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    MEMORY_PRESSURE_FIELD_NUMBER: _ClassVar[int]
    sequence_ids: _containers.RepeatedScalarFieldContainer[int]
    num_tokens: _containers.RepeatedScalarFieldContainer[int]
    token_ids: _containers.RepeatedScalarFieldContainer[int]
    logprobs: _containers.RepeatedCompositeFieldContainer[SequenceLogprobs]
    failures: _containers.RepeatedCompositeFieldContainer[SequenceFailure]
    busy_us: int
    idle_us: int
    swaps: _containers.RepeatedCompositeFieldContainer[SwapResult]
    values: _containers.RepeatedCompositeFieldContainer[SequenceValue]
    prompt_logprobs: _containers.RepeatedCompositeFieldContainer[SequenceLogprobs]
    memory_pressure: MemoryPressure
    def __init__(self, sequence_ids: _Optional[_Iterable[int]] = ..., num_tokens: _Optional[_Iterable[int]] = ..., token_ids: _Optional[_Iterable[int]] = ..., logprobs: _Optional[_Iterable[_Union[SequenceLogprobs, _Mapping]]] = ..., failures: _Optional[_Iterable[_Union[SequenceFailure, _Mapping]]] = ..., busy_us: _Optional[int] = ..., idle_us: _Optional[int] = ..., swaps: _Optional[_Iterable[_Union[SwapResult, _Mapping]]] = ..., values: _Optional[_Iterable[_Union[SequenceValue, _Mapping]]] = ..., prompt_logprobs: _Optional[_Iterable[_Union[SequenceLogprobs, _Mapping]]] = ..., memory_pressure: _Optional[_Union[MemoryPressure, str]] = ...) -> None: ...

class StepResponse(_message.Message):
    __slots__ = ("epoch", "generation", "step_id", "ready", "result")
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    GENERATION_FIELD_NUMBER: _ClassVar[int]
    STEP_ID_FIELD_NUMBER: _ClassVar[int]
    READY_FIELD_NUMBER: _ClassVar[int]
    RESULT_FIELD_NUMBER: _ClassVar[int]
    epoch: int
    generation: int
    step_id: int
    ready: Ready
    result: StepResult
    def __init__(self, epoch: _Optional[int] = ..., generation: _Optional[int] = ..., step_id: _Optional[int] = ..., ready: _Optional[_Union[Ready, _Mapping]] = ..., result: _Optional[_Union[StepResult, _Mapping]] = ...) -> None: ...
