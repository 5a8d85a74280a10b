"""Between the messages of quire.worker.v1 and the worker's own values."""

from quire.worker.v1 import worker_pb2 as pb
from worker_svc.identity import Identity
from worker_svc.step import (
    NewSequence,
    SamplingParams,
    ScheduledSequence,
    SequenceResult,
    Step,
    TokenLogprobs,
)


def step_from_proto(request: pb.StepRequest) -> Step:
    """The work of a request."""
    return Step(
        finished_ids=list(request.finished_ids),
        new_sequences=[_new_sequence(new) for new in request.new_sequences],
        scheduled=[_scheduled(item) for item in request.scheduled],
    )


def _scheduled(item: pb.ScheduledSequence) -> ScheduledSequence:
    return ScheduledSequence(
        sequence_id=item.sequence_id,
        start=item.start,
        num_tokens=item.num_tokens,
        new_block_ids=list(item.new_block_ids),
        store_start=item.store_start if item.HasField("store_start") else None,
    )


def _new_sequence(new: pb.NewSequence) -> NewSequence:
    return NewSequence(
        sequence_id=new.sequence_id,
        token_ids=list(new.token_ids),
        prompt_length=new.prompt_length,
        index=new.index,
        sampling=sampling_from_proto(new.sampling),
        traceparent=new.traceparent,
    )


def sampling_from_proto(params: pb.SamplingParams) -> SamplingParams:
    """How tokens are drawn."""
    return SamplingParams(
        temperature=params.temperature,
        top_p=params.top_p,
        top_k=params.top_k,
        min_p=params.min_p,
        presence_penalty=params.presence_penalty,
        frequency_penalty=params.frequency_penalty,
        repetition_penalty=params.repetition_penalty,
        seed=params.seed,
        logit_bias=dict(params.logit_bias),
        suppressed_token_ids=tuple(params.suppressed_token_ids),
        min_tokens=params.min_tokens,
        logprobs=params.logprobs if params.HasField("logprobs") else None,
    )


def result_to_proto(result: SequenceResult) -> pb.SequenceResult:
    """What became of one sequence."""
    return pb.SequenceResult(
        sequence_id=result.sequence_id,
        token_ids=result.token_ids,
        logprobs=[_logprobs_to_proto(logprobs) for logprobs in result.logprobs],
        failure=result.failure,
    )


def _logprobs_to_proto(logprobs: TokenLogprobs) -> pb.TokenLogprobs:
    return pb.TokenLogprobs(
        logprob=logprobs.logprob,
        top=[pb.Logprob(token_id=token, logprob=logprob) for token, logprob in logprobs.top],
    )


def identity_to_proto(identity: Identity, epoch: int) -> pb.DescribeResponse:
    """What a replica is, and the highest epoch that it served."""
    limits = identity.limits
    return pb.DescribeResponse(
        model=identity.model,
        fingerprint=identity.fingerprint,
        tokenizer_fingerprint=identity.tokenizer_fingerprint,
        context_length=limits.context_length,
        vocab_size=limits.vocab_size,
        block_size=limits.block_size,
        block_bytes=identity.block_bytes,
        num_blocks=limits.num_blocks,
        max_step_tokens=limits.max_step_tokens,
        max_sequences=limits.max_sequences,
        epoch=epoch,
    )
