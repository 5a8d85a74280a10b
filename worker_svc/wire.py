"""Conversion between the messages of quire.worker.v1 and the worker's own values."""

from collections.abc import Sequence
from dataclasses import fields
from functools import partial
from itertools import chain, compress

from google.protobuf.timestamp_pb2 import Timestamp

from quire.worker.v1 import worker_pb2 as pb
from svc_common.protocols import STEP_PROTOCOLS
from worker_svc.block_hashes import BlockHashReport
from worker_svc.description import WorkerDescription
from worker_svc.memory_monitor import MemoryPressure
from worker_svc.step import (
    DECODER_RESULTS,
    BlockHashes,
    BlockOps,
    BlockPairs,
    BlockTableUpdate,
    Direction,
    EmbeddingParams,
    FailureReason,
    NewSequence,
    Pooling,
    PromptComputation,
    SamplingParams,
    ScheduledSequence,
    ScoreParams,
    Step,
    StepOutcome,
    SwapResult,
    TokenLogprobs,
)

_FAILURE_REASONS = {
    FailureReason.INTERNAL: pb.SEQUENCE_FAILURE_REASON_UNSPECIFIED,
    FailureReason.GRAMMAR_TOO_COMPLEX: pb.SEQUENCE_FAILURE_REASON_GRAMMAR_TOO_COMPLEX,
    FailureReason.OUT_OF_MEMORY: pb.SEQUENCE_FAILURE_REASON_OUT_OF_MEMORY,
}
_PRESSURES = {
    MemoryPressure.NONE: pb.MEMORY_PRESSURE_NONE,
    MemoryPressure.HIGH: pb.MEMORY_PRESSURE_HIGH,
    MemoryPressure.CRITICAL: pb.MEMORY_PRESSURE_CRITICAL,
}
_COMPUTATIONS = {
    PromptComputation.CHUNKED: pb.PROMPT_COMPUTATION_CHUNKED,
    PromptComputation.INDIVISIBLE_WITHOUT_KV: pb.PROMPT_COMPUTATION_INDIVISIBLE_WITHOUT_KV,
}
_POOLINGS = {pb.POOLING_MEAN: Pooling.MEAN, pb.POOLING_CLS: Pooling.CLS, pb.POOLING_LAST: Pooling.LAST}
_NORMALIZATIONS = {pb.NORMALIZATION_NONE: False, pb.NORMALIZATION_L2: True}
_DIRECTIONS = {Direction.OUT: pb.DIRECTION_OUT, Direction.IN: pb.DIRECTION_IN}


class MalformedMessage(Exception):  # noqa: N818
    """A message whose parts contradict each other. The text goes to the scheduler."""


def has_work(request: pb.StepRequest) -> bool:
    """Whether a request contains any work."""
    named = {field.name for field, _ in request.ListFields()}
    return bool(named - {"epoch", "generation", "step_id", "protocol"})


def step_from_proto(request: pb.StepRequest) -> Step:
    """The work of a request. Raises MalformedMessage."""
    return Step(
        finished_ids=list(request.finished_ids),
        new_sequences=[_new_sequence(new) for new in request.new_sequences],
        scheduled=_scheduled(request.scheduled),
        block_ops=BlockOps(_pairs(request.swap_out), _pairs(request.swap_in), _pairs(request.copies)),
        block_table_updates=[
            BlockTableUpdate(update.sequence_id, update.index, update.block_id)
            for update in request.block_table_updates
        ],
        step_id=request.step_id,
        block_hashes=_block_hashes(request.block_hashes),
        host_block_hashes=_block_hashes(request.host_block_hashes),
        discarded_blocks=request.discarded_block_ids[:],
        discarded_host_blocks=request.discarded_host_block_ids[:],
    )


def _block_hashes(block_hashes: pb.BlockHashes) -> BlockHashes:
    if len(block_hashes.block_ids) != len(block_hashes.hashes):
        raise MalformedMessage("block hashes with columns of different lengths")
    return list(zip(block_hashes.block_ids, block_hashes.hashes, strict=True))


def _pairs(copies: pb.BlockCopies) -> BlockPairs:
    if len(copies.sources) != len(copies.destinations):
        raise MalformedMessage("block copies with columns of different lengths")
    return list(zip(copies.sources, copies.destinations, strict=True))


def _scheduled(schedule: pb.Schedule) -> list[ScheduledSequence]:
    ids, starts, num_tokens = schedule.sequence_ids[:], schedule.starts[:], schedule.num_tokens[:]
    counts, blocks = schedule.num_new_blocks[:], schedule.new_block_ids[:]
    if not len(ids) == len(starts) == len(num_tokens) == len(counts) or sum(counts) != len(blocks):
        raise MalformedMessage("a schedule with columns of different lengths")
    extra = schedule.max_extra_tokens[:] or [0] * len(ids)
    if len(extra) != len(ids):
        raise MalformedMessage("a schedule with columns of different lengths")
    new_blocks: list[list[int]] = [[]] * len(ids)
    first = 0
    for schedule_index in compress(range(len(ids)), counts):
        end = first + counts[schedule_index]
        new_blocks[schedule_index] = blocks[first:end]
        first = end
    stored: list[int | None] = [None] * len(ids)
    for item in schedule.cached_tokens:
        if item.schedule_index >= len(ids):
            raise MalformedMessage("cached tokens of a sequence that is not in the schedule")
        stored[item.schedule_index] = item.num_cached_tokens
    # Hundreds per step: built without a Python call for each.
    make = partial(tuple.__new__, ScheduledSequence)
    return list(map(make, zip(ids, starts, num_tokens, new_blocks, stored, extra, strict=True)))


def _new_sequence(new: pb.NewSequence) -> NewSequence:
    result = _result_from_proto(new)
    return NewSequence(
        sequence_id=new.sequence_id,
        token_ids=list(new.token_ids),
        prompt_length=new.prompt_length,
        index=new.index,
        # To read the parameters takes longer than the rest, and values have none.
        sampling=sampling_from_proto(new.sampling) if result in DECODER_RESULTS else _NO_SAMPLING,
        traceparent=new.traceparent,
        result=result,
        num_top_of_prompt=new.result.prompt_logprobs.num_top_logprobs,
        embedding=_embedding_from_proto(new.result.embedding) if new.HasField("result") else EmbeddingParams(),
        score=ScoreParams(new.result.score.num_first_tokens, new.result.score.is_raw),
    )


_NO_SAMPLING = SamplingParams()


def _result_from_proto(new: pb.NewSequence) -> str:
    if not new.HasField("result"):
        return "tokens"
    return new.result.WhichOneof("kind") or "a kind of result that it does not know"


def _embedding_from_proto(result: pb.EmbeddingResult) -> EmbeddingParams:
    return EmbeddingParams(
        _POOLINGS.get(result.pooling), result.num_dimensions, _NORMALIZATIONS.get(result.normalization)
    )


def _computed_result(name: str, how: PromptComputation) -> pb.ComputedResult:
    computed = pb.ComputedResult(computation=_COMPUTATIONS[how])
    getattr(computed.result, name).SetInParent()
    return computed


def sampling_from_proto(params: pb.SamplingParams) -> SamplingParams:
    """Numbers and texts have the same names on both sides."""
    return SamplingParams(
        **{name: getattr(params, name) for name in _SAMPLING_SCALARS},
        logit_bias=dict(params.logit_bias),
        suppressed_token_ids=tuple(params.suppressed_token_ids),
        logprobs=params.logprobs if params.HasField("logprobs") else None,
        allowed_token_ids=tuple(params.allowed_token_ids),
        bad_words=tuple(tuple(word.token_ids) for word in params.bad_words if word.token_ids),
        logprob_token_ids=tuple(params.logprob_token_ids),
    )


_SAMPLING_SCALARS = {field.name for field in fields(SamplingParams)} - {
    "logit_bias",
    "suppressed_token_ids",
    "logprobs",
    "allowed_token_ids",
    "bad_words",
    "logprob_token_ids",
}


def outcome_to_proto(outcome: StepOutcome) -> pb.StepResult:
    sequence_ids, token_ids, logprobs, failures, reasons, prompt_logprobs, values = (
        zip(*outcome.sequences, strict=True) if outcome.sequences else [()] * 7
    )
    return pb.StepResult(
        sequence_ids=sequence_ids,
        num_tokens=map(len, token_ids),
        token_ids=chain.from_iterable(token_ids),
        logprobs=_sequence_logprobs(logprobs),
        prompt_logprobs=_sequence_logprobs(prompt_logprobs),
        failures=[
            pb.SequenceFailure(
                schedule_index=schedule_index, message=failure, reason=_FAILURE_REASONS[reasons[schedule_index]]
            )
            for schedule_index, failure in enumerate(failures)
            if failure is not None
        ],
        swaps=map(_transfer_to_proto, outcome.swap_results),
        values=[
            pb.SequenceValue(schedule_index=schedule_index, value=pb.PromptValue(numbers=values[schedule_index]))
            for schedule_index in compress(range(len(values)), values)
        ],
    )


def _sequence_logprobs(columns: Sequence[Sequence[TokenLogprobs]]) -> list[pb.SequenceLogprobs]:
    return [
        pb.SequenceLogprobs(schedule_index=schedule_index, tokens=map(_logprobs_to_proto, columns[schedule_index]))
        for schedule_index in compress(range(len(columns)), columns)
    ]


def _transfer_to_proto(swap_result: SwapResult) -> pb.SwapResult:
    return pb.SwapResult(
        step_id=swap_result.step_id,
        direction=_DIRECTIONS[swap_result.direction],
        duration_us=round(swap_result.seconds * 1e6),
        failure=swap_result.failure,
    )


def _logprobs_to_proto(logprobs: TokenLogprobs) -> pb.TokenLogprobs:
    return pb.TokenLogprobs(
        logprob=logprobs.logprob,
        top=[pb.Logprob(token_id=token, logprob=logprob) for token, logprob in logprobs.top],
        requested=logprobs.requested,
    )


def block_hash_report_to_proto(report: BlockHashReport) -> pb.ReportBlockHashesResponse:
    return pb.ReportBlockHashesResponse(
        device=_block_hashes_to_proto(report.device), host=_block_hashes_to_proto(report.host)
    )


def _block_hashes_to_proto(block_hashes: BlockHashes) -> pb.BlockHashes:
    return pb.BlockHashes(
        block_ids=[block for block, _ in block_hashes], hashes=[block_hash for _, block_hash in block_hashes]
    )


def pressure_to_proto(pressure: MemoryPressure) -> pb.MemoryPressure:
    return _PRESSURES[pressure]


def description_to_proto(
    description: WorkerDescription,
    epoch: int,
    *,
    is_draining: bool,
    started_at: float,
    pressure: MemoryPressure = MemoryPressure.NONE,
) -> pb.DescribeResponse:
    """The replica's description, the highest epoch that it served, whether it is draining, when it started, in seconds
    since 1970, and how short its memory is.
    """
    limits = description.limits
    return pb.DescribeResponse(
        model=description.model,
        fingerprint=description.fingerprint,
        tokenizer_fingerprint=description.tokenizer_fingerprint,
        context_length=limits.context_length,
        vocab_size=limits.vocab_size,
        block_size=limits.block_size,
        block_bytes=description.block_bytes,
        num_blocks=limits.num_blocks,
        max_step_tokens=limits.max_step_tokens,
        max_sequences=limits.max_sequences,
        max_indivisible_tokens=limits.max_indivisible_tokens,
        epoch=epoch,
        num_host_blocks=limits.num_host_blocks,
        swap_bytes_per_second=description.swap_bytes_per_second,
        prefill_tokens_per_second=description.prefill_tokens_per_second,
        is_draining=is_draining,
        oldest_protocol=STEP_PROTOCOLS.oldest,
        newest_protocol=STEP_PROTOCOLS.newest,
        max_sampled_tokens=1 + limits.max_draft_tokens,
        computed_results=[_computed_result(name, how) for name, how in description.results.items()],
        memory_pressure=pressure_to_proto(pressure),
        has_kv_in_host_memory=description.device == "cpu",
        usual_step_tokens=limits.usual_step_tokens,
        started_at=Timestamp(seconds=int(started_at), nanos=int(started_at % 1 * 1e9)),
    )
