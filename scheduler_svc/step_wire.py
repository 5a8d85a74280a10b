"""Between the core's plans, the worker's description, and the messages of the step stream."""

from collections.abc import Iterable
from itertools import chain
from typing import cast

from quire.worker.v1 import worker_pb2 as worker_v1
from scheduler_svc.core.kv.block_hash_report import BlockHashReport
from scheduler_svc.core.replica_shape import ReplicaShape
from scheduler_svc.core.request import Sequence
from scheduler_svc.core.step import (
    BlockHash,
    BlockPair,
    Direction,
    MemoryPressure,
    NewSequence,
    ScheduledSequence,
    StepPlan,
)
from scheduler_svc.result_kinds import computations_from_proto
from svc_common.protocols import STEP_PROTOCOLS


def shape_from_proto(description: worker_v1.DescribeResponse) -> ReplicaShape:
    """The part of a worker's description that the core uses."""
    return ReplicaShape(
        fingerprint=description.fingerprint,
        block_size=description.block_size,
        num_blocks=description.num_blocks,
        context_length=description.context_length,
        max_step_tokens=description.max_step_tokens,
        max_sequences=description.max_sequences,
        num_host_blocks=description.num_host_blocks,
        block_bytes=description.block_bytes,
        swap_bytes_per_second=description.swap_bytes_per_second,
        prefill_tokens_per_second=description.prefill_tokens_per_second,
        max_sampled_tokens=max(1, description.max_sampled_tokens),
        protocol=STEP_PROTOCOLS.newest_common(description.oldest_protocol, description.newest_protocol) or 1,
        max_indivisible_tokens=description.max_indivisible_tokens,
        has_kv_in_host_memory=description.has_kv_in_host_memory,
        usual_step_tokens=description.usual_step_tokens,
        results=computations_from_proto(description.computed_results),
    )


_PRESSURES = {
    worker_v1.MEMORY_PRESSURE_NONE: MemoryPressure.NONE,
    worker_v1.MEMORY_PRESSURE_HIGH: MemoryPressure.HIGH,
    worker_v1.MEMORY_PRESSURE_CRITICAL: MemoryPressure.CRITICAL,
}
_PRESSURE_NUMBERS = {pressure: number for number, pressure in _PRESSURES.items()}


def pressure_from_proto(pressure: worker_v1.MemoryPressure) -> MemoryPressure | None:
    """What a worker has measured; None: nothing, or what this release does not know."""
    return _PRESSURES.get(pressure)


def highest_pressure(pressures: Iterable[MemoryPressure]) -> worker_v1.MemoryPressure:
    """The highest of what workers have measured; none if there is no worker."""
    return max((_PRESSURE_NUMBERS[pressure] for pressure in pressures), default=worker_v1.MEMORY_PRESSURE_NONE)


def plan_to_proto(plan: StepPlan, epoch: int, generation: int) -> worker_v1.StepRequest:
    return worker_v1.StepRequest(
        epoch=epoch,
        generation=generation,
        step_id=plan.step_id,
        finished_ids=plan.finished_ids,
        swap_out=_pairs_to_proto(plan.swap_out, Direction.OUT),
        swap_in=_pairs_to_proto(plan.swap_in, Direction.IN),
        copies=_copies_to_proto([copy.source for copy in plan.copies], [copy.destination for copy in plan.copies]),
        block_table_updates=[
            worker_v1.BlockTableUpdate(sequence_id=change.sequence_id, index=change.index, block_id=change.block_id)
            for change in plan.block_table_updates
        ],
        new_sequences=[
            worker_v1.NewSequence(
                sequence_id=new.sequence.id,
                token_ids=new.tokens,
                prompt_length=len(new.sequence.request.prompt),
                index=new.sequence.index,
                sampling=cast(worker_v1.SamplingParams, new.sequence.request.sampling),
                traceparent=_traceparent(new.sequence),
                result=_result_to_proto(new),
            )
            for new in plan.new_sequences
        ],
        scheduled=_schedule_to_proto(plan.scheduled),
        block_hashes=_block_hashes_to_proto(plan.block_hashes),
        host_block_hashes=_block_hashes_to_proto(plan.host_block_hashes),
        discarded_block_ids=plan.discarded_block_ids,
        discarded_host_block_ids=plan.discarded_host_block_ids,
    )


def _result_to_proto(new: NewSequence) -> worker_v1.ResultKind | None:
    return cast(worker_v1.ResultKind, new.sequence.request.result_params) if new.has_other_results else None


def _block_hashes_to_proto(block_hashes: list[BlockHash]) -> worker_v1.BlockHashes | None:
    if not block_hashes:
        return None
    return worker_v1.BlockHashes(
        block_ids=[block for block, _ in block_hashes], hashes=[block_hash for _, block_hash in block_hashes]
    )


def hash_report_from_proto(hash_report: worker_v1.ReportBlockHashesResponse) -> BlockHashReport:
    """The hashes of a worker's blocks. Raises ValueError where the message's parts do not fit each other."""
    device, host = (
        dict(zip(tier.block_ids, tier.hashes, strict=True)) for tier in (hash_report.device, hash_report.host)
    )
    return BlockHashReport(device, host)


def _traceparent(sequence: Sequence) -> str:
    # One span for a request's stay at a worker, however many sequences it has, and however often beams are sent again.
    if sequence.index or sequence.is_one_of_beams:
        return ""
    return sequence.request.traceparent


def _pairs_to_proto(pairs: list[BlockPair], direction: Direction) -> worker_v1.BlockCopies | None:
    device, host = [pair.device for pair in pairs], [pair.host for pair in pairs]
    return _copies_to_proto(device, host) if direction is Direction.OUT else _copies_to_proto(host, device)


def _copies_to_proto(sources: list[int], destinations: list[int]) -> worker_v1.BlockCopies | None:
    return worker_v1.BlockCopies(sources=sources, destinations=destinations) if sources else None


def _schedule_to_proto(scheduled: list[ScheduledSequence]) -> worker_v1.Schedule:
    if not scheduled:
        return worker_v1.Schedule()
    sequences, starts, num_tokens, new_block_ids, cached_tokens, _, max_extra_tokens = zip(*scheduled, strict=True)
    return worker_v1.Schedule(
        sequence_ids=[sequence.id for sequence in sequences],
        starts=starts,
        num_tokens=num_tokens,
        num_new_blocks=map(len, new_block_ids),
        new_block_ids=chain.from_iterable(new_block_ids),
        cached_tokens=[
            worker_v1.CachedTokens(schedule_index=schedule_index, num_cached_tokens=part.num_cached_tokens)
            for schedule_index, part in enumerate(scheduled)
            if part.num_cached_tokens > part.start
        ]
        if starts != cached_tokens
        else (),
        max_extra_tokens=max_extra_tokens if any(max_extra_tokens) else (),
    )
