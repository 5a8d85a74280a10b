"""A step as plain values: what the runner is given and what it answers. No grpc, no protobuf, no torch."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import NamedTuple, TypeAlias

# One step that runs, and one that waits behind it. More would help no device, and an executor has room for no more.
MAX_IN_FLIGHT = 2

# Blocks to copy, as (source, destination). No two have one destination.
BlockPairs: TypeAlias = list[tuple[int, int]]

# What blocks hold, as (block, hash). The hash is the scheduler's own, and says nothing here.
BlockHashes: TypeAlias = list[tuple[int, bytes]]


class Direction(Enum):
    """Which way blocks are swapped: from the device to the host, or from the host to the device."""

    OUT = "out"
    IN = "in"


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How the next token is drawn. All values are resolved and within their documented ranges."""

    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    seed: int = 0
    logit_bias: dict[int, float] = field(default_factory=dict)
    suppressed_token_ids: tuple[int, ...] = ()
    min_tokens: int = 0
    logprobs: int | None = None


@dataclass(frozen=True, slots=True)
class NewSequence:
    """A sequence in full: prompt and what was generated so far."""

    sequence_id: int
    token_ids: list[int]
    prompt_length: int
    index: int
    sampling: SamplingParams
    traceparent: str = ""


class ScheduledSequence(NamedTuple):
    """Compute tokens start to start + num_tokens - 1 of a known sequence, after adding blocks to its table.

    Keys and values of tokens before `num_cached_tokens` (None: start) stand in shared blocks already and are not
    written.
    """

    sequence_id: int
    start: int
    num_tokens: int
    new_block_ids: list[int]
    num_cached_tokens: int | None = None


@dataclass(frozen=True, slots=True)
class BlockTableUpdate:
    """Place `index` of a known sequence's block table is `block_id` from now on."""

    sequence_id: int
    index: int
    block_id: int


@dataclass(frozen=True, slots=True)
class BlockOps:
    """Blocks that a step copies: to the host, from the host, and within the device, where none is at both ends."""

    swap_out: BlockPairs = field(default_factory=list)
    swap_in: BlockPairs = field(default_factory=list)
    copies: BlockPairs = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Step:
    """One step, executed in the order: labels, finished, swap out, swap in, copies, table changes, new sequences,
    forward.
    """

    finished_ids: list[int]
    new_sequences: list[NewSequence]
    scheduled: list[ScheduledSequence]
    block_ops: BlockOps = field(default_factory=BlockOps)
    block_table_updates: list[BlockTableUpdate] = field(default_factory=list)
    step_id: int = 0
    """By which its transfers are told apart from others'; none is less than that of the step before."""
    block_hashes: BlockHashes = field(default_factory=list)
    """Of blocks of the device that steps which are finished filled."""
    host_block_hashes: BlockHashes = field(default_factory=list)
    """Of blocks of the host that transfers which are done filled."""


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """Log-probabilities at one place: of the token drawn, and (token, logprob) of the likeliest, likeliest first."""

    logprob: float
    top: list[tuple[int, float]]


class SequenceResult(NamedTuple):
    """What became of one scheduled sequence: no token while known tokens are left to compute, else one."""

    sequence_id: int
    token_ids: list[int]
    logprobs: Sequence[TokenLogprobs] = ()
    failure: str | None = None


@dataclass(frozen=True, slots=True)
class SwapResult:
    """The swaps of one step in one direction: done, or failed, as one.

    `seconds` is how long the copying took, without what it waited for. After a failure the destinations hold nothing
    of use.
    """

    step_id: int
    direction: Direction
    num_blocks: int
    seconds: float
    failure: str | None = None


@dataclass(frozen=True, slots=True)
class StepOutcome:
    """Results in the order of Step.scheduled, and the time on the device thread in seconds.

    Of the tokens computed, `decode_tokens` were the last that their sequences drew, `prefill_tokens` all others.
    `transfers` are those of this step and of earlier ones that were found done or failed, each once. `stall_seconds`
    are what its own took of its time, where they are not made beside it.
    """

    sequences: list[SequenceResult]
    busy_seconds: float
    prefill_tokens: int = 0
    decode_tokens: int = 0
    swap_results: list[SwapResult] = field(default_factory=list)
    stall_seconds: float = 0.0
