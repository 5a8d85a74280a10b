"""Between the messages of quire.worker.v1 and the worker's own values."""

from functools import partial
from itertools import chain, compress

from quire.worker.v1 import worker_pb2 as pb
from worker_svc.identity import Identity
from worker_svc.labels import Inventory
from worker_svc.step import (
    BlockLabels,
    BlockPairs,
    Direction,
    Moves,
    NewSequence,
    SamplingParams,
    ScheduledSequence,
    Step,
    StepOutcome,
    TableChange,
    TokenLogprobs,
    Transfer,
)

_DIRECTIONS = {Direction.OUT: pb.DIRECTION_OUT, Direction.IN: pb.DIRECTION_IN}


class Malformed(Exception):  # noqa: N818
    """A message whose parts do not fit each other. The text goes to the scheduler."""


def has_work(request: pb.StepRequest) -> bool:
    """Whether a request asks for anything."""
    named = {field.name for field, _ in request.ListFields()}
    return bool(named - {"epoch", "generation", "step_id"})


def step_from_proto(request: pb.StepRequest) -> Step:
    """The work of a request. Raises Malformed."""
    return Step(
        finished_ids=list(request.finished_ids),
        new_sequences=[_new_sequence(new) for new in request.new_sequences],
        scheduled=_scheduled(request.scheduled),
        moves=Moves(_pairs(request.swap_out), _pairs(request.swap_in), _pairs(request.copies)),
        table_changes=[
            TableChange(change.sequence_id, change.index, change.block_id) for change in request.table_changes
        ],
        step_id=request.step_id,
        labels=_labels(request.labels),
        host_labels=_labels(request.host_labels),
    )


def _labels(labels: pb.BlockLabels) -> BlockLabels:
    if len(labels.block_ids) != len(labels.hashes):
        raise Malformed("labels whose columns are of different lengths")
    return list(zip(labels.block_ids, labels.hashes, strict=True))


def _pairs(copies: pb.BlockCopies) -> BlockPairs:
    if len(copies.sources) != len(copies.destinations):
        raise Malformed("blocks to copy whose columns are of different lengths")
    return list(zip(copies.sources, copies.destinations, strict=True))


def _scheduled(schedule: pb.Schedule) -> list[ScheduledSequence]:
    ids, starts, num_tokens = schedule.sequence_ids[:], schedule.starts[:], schedule.num_tokens[:]
    counts, blocks = schedule.num_new_blocks[:], schedule.new_block_ids[:]
    if not len(ids) == len(starts) == len(num_tokens) == len(counts) or sum(counts) != len(blocks):
        raise Malformed("a schedule whose columns are of different lengths")
    new_blocks: list[list[int]] = [[]] * len(ids)
    first = 0
    for place in compress(range(len(ids)), counts):
        end = first + counts[place]
        new_blocks[place] = blocks[first:end]
        first = end
    stored: list[int | None] = [None] * len(ids)
    for item in schedule.store_starts:
        if item.place >= len(ids):
            raise Malformed("a schedule that says of a sequence it has not what is stored")
        stored[item.place] = item.store_start
    # Hundreds of them a step: made without a call of Python for each.
    make = partial(tuple.__new__, ScheduledSequence)
    return list(map(make, zip(ids, starts, num_tokens, new_blocks, stored, strict=True)))


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


def outcome_to_proto(outcome: StepOutcome) -> pb.StepResult:
    """What became of a step's sequences, and of transfers."""
    sequence_ids, token_ids, logprobs, failures = (
        zip(*outcome.sequences, strict=True) if outcome.sequences else [()] * 4
    )
    return pb.StepResult(
        sequence_ids=sequence_ids,
        num_tokens=map(len, token_ids),
        token_ids=chain.from_iterable(token_ids),
        logprobs=[
            pb.SequenceLogprobs(place=place, tokens=map(_logprobs_to_proto, logprobs[place]))
            for place in compress(range(len(logprobs)), logprobs)
        ],
        failures=[
            pb.SequenceFailure(place=place, message=failure)
            for place, failure in enumerate(failures)
            if failure is not None
        ],
        transfers=map(_transfer_to_proto, outcome.transfers),
    )


def _transfer_to_proto(transfer: Transfer) -> pb.Transfer:
    return pb.Transfer(
        step_id=transfer.step_id,
        direction=_DIRECTIONS[transfer.direction],
        duration_us=round(transfer.seconds * 1e6),
        failure=transfer.failure,
    )


def _logprobs_to_proto(logprobs: TokenLogprobs) -> pb.TokenLogprobs:
    return pb.TokenLogprobs(
        logprob=logprobs.logprob,
        top=[pb.Logprob(token_id=token, logprob=logprob) for token, logprob in logprobs.top],
    )


def inventory_to_proto(inventory: Inventory) -> pb.InventoryResponse:
    """What blocks hold."""
    return pb.InventoryResponse(device=_labels_to_proto(inventory.device), host=_labels_to_proto(inventory.host))


def _labels_to_proto(labels: BlockLabels) -> pb.BlockLabels:
    return pb.BlockLabels(block_ids=[block for block, _ in labels], hashes=[label for _, label in labels])


def identity_to_proto(identity: Identity, epoch: int, *, is_draining: bool) -> pb.DescribeResponse:
    """What a replica is, the highest epoch that it served, and whether it is about to end."""
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
        num_host_blocks=limits.num_host_blocks,
        swap_bytes_per_second=identity.swap_bytes_per_second,
        prefill_tokens_per_second=identity.prefill_tokens_per_second,
        is_draining=is_draining,
    )
