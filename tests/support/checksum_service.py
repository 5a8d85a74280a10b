"""A worker process stand-in at the network's edge: the step stream, with a checksum for a model."""

import asyncio
from collections import Counter
from collections.abc import AsyncIterator
from typing import Any

import grpc

from memory_worker import next_token
from quire.worker.v1 import worker_pb2 as worker_v1
from quire.worker.v1.worker_pb2_grpc import WorkerServiceServicer, add_WorkerServiceServicer_to_server

VOCAB = 1000


class ChecksumService(WorkerServiceServicer):
    """Samples `next_token` of all tokens, and confirms every swap; keeps block hashes, and what it was sent.

    With `max_new_tokens` above 1 its steps return 0 to as many tokens for a sequence, in turn.
    """

    def __init__(
        self,
        num_blocks: int = 64,
        fingerprint: bytes = b"checksum",
        epoch: int = 0,
        num_host_blocks: int = 0,
        max_new_tokens: int = 1,
    ) -> None:
        self.about = worker_v1.DescribeResponse(
            model="checksum",
            fingerprint=fingerprint,
            tokenizer_fingerprint=b"tokens",
            context_length=256,
            vocab_size=VOCAB,
            block_size=4,
            block_bytes=64,
            num_blocks=num_blocks,
            max_step_tokens=64,
            max_sequences=16,
            epoch=epoch,
            num_host_blocks=num_host_blocks,
            swap_bytes_per_second=1e9 if num_host_blocks else 0.0,
            prefill_tokens_per_second=1e4,
            max_new_tokens=max_new_tokens,
        )
        self.num_returned: Counter[int] = Counter()  # how often a step returned so many tokens of a sequence
        self.openings: list[worker_v1.StepRequest] = []
        self.steps: list[worker_v1.StepRequest] = []
        self.gate = asyncio.Event()  # steps wait while it is clear
        self.gate.set()
        self.seconds = 0.0  # that a step takes
        self.spoil: dict[str, list[int]] = {}  # fields of one result, and what they hold instead
        self.failing_token: int | None = None  # rows fail of sequences that begin with it
        self.block_hashes: dict[int, bytes] = {}  # of the device
        self.host_block_hashes: dict[int, bytes] = {}

    async def Describe(self, request: worker_v1.DescribeRequest, context: Any) -> worker_v1.DescribeResponse:
        return self.about

    async def ReportBlockHashes(
        self, request: worker_v1.ReportBlockHashesRequest, context: Any
    ) -> worker_v1.ReportBlockHashesResponse:
        device, host = (
            worker_v1.BlockHashes(block_ids=block_hashes.keys(), hashes=block_hashes.values())
            for block_hashes in (self.block_hashes, self.host_block_hashes)
        )
        return worker_v1.ReportBlockHashesResponse(device=device, host=host)

    async def Step(
        self, requests: AsyncIterator[worker_v1.StepRequest], context: Any
    ) -> AsyncIterator[worker_v1.StepResponse]:
        known: dict[int, list[int]] = {}
        async for request in requests:
            response = worker_v1.StepResponse(
                epoch=request.epoch, generation=request.generation, step_id=request.step_id
            )
            if request.step_id == 0:
                self.openings.append(request)
                response.ready.SetInParent()
            else:
                self.steps.append(request)
                await self.gate.wait()
                await asyncio.sleep(self.seconds)
                response.result.CopyFrom(self._run(request, known))
            yield response

    def _label(self, request: worker_v1.StepRequest) -> None:
        for block_hashes, given in (
            (self.block_hashes, request.block_hashes),
            (self.host_block_hashes, request.host_block_hashes),
        ):
            block_hashes.update(zip(given.block_ids, given.hashes, strict=True))
        # Blocks that a step adds count as written, though those of a prefix that is there are only read.
        for block in (*request.scheduled.new_block_ids, *request.swap_in.destinations, *request.copies.destinations):
            self.block_hashes.pop(block, None)
        for block in request.swap_out.destinations:
            self.host_block_hashes.pop(block, None)

    def _run(self, request: worker_v1.StepRequest, known: dict[int, list[int]]) -> worker_v1.StepResult:
        self._label(request)
        for sequence_id in request.finished_ids:
            known.pop(sequence_id, None)
        for new in request.new_sequences:
            known[new.sequence_id] = list(new.token_ids)
        schedule = request.scheduled
        result = worker_v1.StepResult(sequence_ids=schedule.sequence_ids)
        for moved, direction in (
            (request.swap_out, worker_v1.DIRECTION_OUT),
            (request.swap_in, worker_v1.DIRECTION_IN),
        ):
            if moved.sources:
                result.swaps.add(step_id=request.step_id, direction=direction, duration_us=1)
        for schedule_index, sequence_id in enumerate(schedule.sequence_ids):
            tokens, num_tokens = known[sequence_id], schedule.num_tokens[schedule_index]
            if self.about.max_new_tokens > 1 and num_tokens == 1:
                most = 1 + (schedule.max_extra_tokens[schedule_index] if schedule.max_extra_tokens else 0)
                count = sum(self.num_returned.values()) % (most + 1)
                self.num_returned[count] += 1
                result.num_tokens.append(count)
                for _ in range(count):
                    tokens.append(next_token(tokens, VOCAB))
                    result.token_ids.append(tokens[-1])
                continue
            samples = schedule.starts[schedule_index] + num_tokens == len(tokens)
            if tokens[0] == self.failing_token:
                result.failures.add(schedule_index=schedule_index, message="told to fail")
                samples = False
            result.num_tokens.append(int(samples))
            if samples:
                tokens.append(next_token(tokens, VOCAB))
                result.token_ids.append(tokens[-1])
        for name, values in self.spoil.items():
            result.ClearField(name)
            getattr(result, name).extend(values)
        self.spoil = {}
        return result


async def serve(service: ChecksumService, port: int = 0) -> tuple[grpc.aio.Server, int]:
    """Start the service; returns its server and port."""
    server = grpc.aio.server(options=[("grpc.so_reuseport", 0)])
    add_WorkerServiceServicer_to_server(service, server)
    port = server.add_insecure_port(f"127.0.0.1:{port}")
    await server.start()
    return server, port
