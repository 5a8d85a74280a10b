"""A step as plain values: the runner's input and output. No gRPC, no protobuf, no torch."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import NamedTuple, TypeAlias

# One step that runs and the next one. More would not help any device, and an executor has buffers for two.
MAX_STEPS_IN_FLIGHT = 2


class PromptComputation(Enum):
    """How a prompt is computed."""

    CHUNKED = "chunked"
    """In any number of steps, in blocks."""
    INDIVISIBLE_WITHOUT_KV = "indivisible without KV"
    """All of it in one step, without blocks."""


# Kinds of results by their names in quire.worker.v1.ResultKind. A sequence with another kind fails.
DECODER_RESULTS = {"tokens": PromptComputation.CHUNKED, "prompt_logprobs": PromptComputation.CHUNKED}

# Blocks to copy, as (source, destination). Destinations are distinct.
BlockPairs: TypeAlias = list[tuple[int, int]]

# Hashes of what blocks hold, as (block, hash). The worker does not interpret them.
BlockHashes: TypeAlias = list[tuple[int, bytes]]


class Direction(Enum):
    """Direction of a swap: from the device to the host, or from the host to the device."""

    OUT = "out"
    IN = "in"


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How the next token is sampled. All values are resolved and within their documented ranges."""

    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    typical_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    seed: int = 0
    logit_bias: dict[int, float] = field(default_factory=dict)
    suppressed_token_ids: tuple[int, ...] = ()
    min_tokens: int = 0
    logprobs: int | None = None
    grammar: str = ""
    """In llguidance's Lark syntax; empty: none."""
    allowed_token_ids: tuple[int, ...] = ()
    """The only tokens that are sampled; empty: all."""
    bad_words: tuple[tuple[int, ...], ...] = ()
    """Sequences of tokens that the output does not contain, each at least one token."""
    logprob_token_ids: tuple[int, ...] = ()
    """Tokens whose log-probabilities are reported with each sampled one, if `logprobs` is set."""

    @property
    def has_penalties(self) -> bool:
        """Whether sampling depends on how often tokens occurred."""
        return (self.repetition_penalty, self.frequency_penalty, self.presence_penalty) != (1.0, 0.0, 0.0)


class Pooling(Enum):
    """How the hidden states of a prompt's tokens become one vector."""

    MEAN = "mean"
    CLS = "cls"
    """The first token's."""
    LAST = "last"
    """The last token's."""


@dataclass(frozen=True, slots=True)
class EmbeddingParams:
    """How an embedding is made. None: as the model's files say."""

    pooling: Pooling | None = None
    num_dimensions: int = 0
    """How many numbers are kept, from the first on; 0: all, and so for more than there are."""
    normalizes: bool | None = None
    """Whether those are divided by the length of the vector."""


@dataclass(frozen=True, slots=True)
class ScoreParams:
    """How the numbers of a head are made of a prompt that is a text, or a pair of texts."""

    num_first_tokens: int = 0
    """How many tokens are of the first token type; the others are of the second. 0: all are of the first."""
    is_raw: bool = False
    """Whether they are the head's output without its activation function."""


@dataclass(frozen=True, slots=True)
class NewSequence:
    """A sequence in full: prompt and the tokens generated so far.

    `result` is the kind of result; `num_top_of_prompt` is how many top tokens the log-probabilities of a prompt have.
    """

    sequence_id: int
    token_ids: list[int]
    prompt_length: int
    index: int
    sampling: SamplingParams
    traceparent: str = ""
    result: str = "tokens"
    num_top_of_prompt: int = 0
    embedding: EmbeddingParams = EmbeddingParams()
    score: ScoreParams = ScoreParams()


class ScheduledSequence(NamedTuple):
    """Compute `num_tokens` more tokens of a known sequence, after adding blocks to its table.

    `start` is the position of the first. It is exact in a sequence's first step; later the scheduler may have assumed
    that the step ahead returns one token. Keys and values of tokens before `num_cached_tokens` (None: as before) are in
    shared blocks already and are not written. Up to `max_extra_tokens` may be returned beyond the first; the blocks
    have room for them.
    """

    sequence_id: int
    start: int
    num_tokens: int
    new_block_ids: list[int]
    num_cached_tokens: int | None = None
    max_extra_tokens: int = 0


@dataclass(frozen=True, slots=True)
class BlockTableUpdate:
    """Entry `index` of a known sequence's block table becomes `block_id`."""

    sequence_id: int
    index: int
    block_id: int


@dataclass(frozen=True, slots=True)
class BlockOps:
    """Blocks that a step copies: to the host, from the host, and within the device, where no block is source and
    destination.
    """

    swap_out: BlockPairs = field(default_factory=list)
    swap_in: BlockPairs = field(default_factory=list)
    copies: BlockPairs = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Step:
    """One step, executed in the order: block hashes, discards, finished, swap out, swap in, copies, block-table
    updates, new sequences, forward.
    """

    finished_ids: list[int]
    new_sequences: list[NewSequence]
    scheduled: list[ScheduledSequence]
    block_ops: BlockOps = field(default_factory=BlockOps)
    block_table_updates: list[BlockTableUpdate] = field(default_factory=list)
    step_id: int = 0
    """Identifies its swaps; not less than that of the step before."""
    block_hashes: BlockHashes = field(default_factory=list)
    """Of device blocks that finished steps filled."""
    host_block_hashes: BlockHashes = field(default_factory=list)
    """Of host blocks that finished swaps filled."""
    discarded_blocks: Sequence[int] = ()
    """Device blocks whose contents are not needed any more: their memory goes back to the system."""
    discarded_host_blocks: Sequence[int] = ()
    """The same of host blocks."""


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """The log-probability of the token, (token, logprob) of the top tokens in descending order, and the
    log-probabilities of `logprob_token_ids`.
    """

    logprob: float
    top: list[tuple[int, float]]
    requested: Sequence[float] = ()


class FailureReason(Enum):
    """Why a sequence failed, for the client."""

    INTERNAL = "internal"
    GRAMMAR_TOO_COMPLEX = "grammar too complex"
    OUT_OF_MEMORY = "out of memory"


class SequenceResult(NamedTuple):
    """The result of one scheduled sequence: one token, or none while known tokens are left to compute; or a value.

    With a drafter there may be up to 1 + max_extra_tokens tokens; or none if the next step computes the last one again,
    which is also so while the sequence's grammar is not compiled. `prompt_logprobs`, if requested, are of the tokens of
    the prompt that follow one that the step computed.
    """

    sequence_id: int
    token_ids: list[int]
    logprobs: Sequence[TokenLogprobs] = ()
    failure: str | None = None
    failure_reason: FailureReason = FailureReason.INTERNAL
    prompt_logprobs: Sequence[TokenLogprobs] = ()
    value: Sequence[float] = ()


@dataclass(frozen=True, slots=True)
class SwapResult:
    """The swaps of one step in one direction: done or failed as one.

    `seconds` is the time of the copying, without waiting. After a failure the destinations are invalid.
    """

    step_id: int
    direction: Direction
    num_blocks: int
    seconds: float
    failure: str | None = None


@dataclass(frozen=True, slots=True)
class StepOutcome:
    """Results in the order of Step.scheduled, and the time on the device thread in seconds.

    Of the computed tokens, `decode_tokens` are the last sampled tokens of their sequences and `prefill_tokens` all
    other known ones; `draft_tokens` are drafts, `accepted_tokens` those of them that were sampled. `swap_results` are
    the swaps of this step and of earlier ones that were found done or failed, each once. `stall_seconds` is the part of
    the step's time that its own swaps took, if they do not run at the same time. `num_left_out` sequences failed in
    this step because memory ran out.
    """

    sequences: list[SequenceResult]
    busy_seconds: float
    prefill_tokens: int = 0
    decode_tokens: int = 0
    swap_results: list[SwapResult] = field(default_factory=list)
    stall_seconds: float = 0.0
    draft_tokens: int = 0
    accepted_tokens: int = 0
    num_left_out: int = 0
