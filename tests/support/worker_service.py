"""A worker's service on its own port, and the scheduler's side of its step streams."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
import pytest

from quire.worker.v1 import worker_pb2 as pb
from quire.worker.v1 import worker_pb2_grpc
from svc_common.channels import internal_channel
from svc_common.server import INTERNAL_MESSAGE_BYTES, bind, create_server
from svc_common.settings import read_settings
from worker_svc.device_thread import DeviceThread
from worker_svc.instance import ModelInstance, load_instance
from worker_svc.service import WorkerService
from worker_svc.settings import WorkerSettings

GREEDY = pb.SamplingParams(top_p=1.0, repetition_penalty=1.0)
PROMPT = [3, 1, 4, 1, 5]


class Worker:
    """A channel to a worker, and its service if it runs in this process."""

    def __init__(self, service: WorkerService | None, channel: grpc.aio.Channel, port: int = 0) -> None:
        self._service = service
        self.port = port
        self.stub: Any = worker_pb2_grpc.WorkerServiceStub(channel)

    @property
    def service(self) -> WorkerService:
        assert self._service is not None, "the worker is another process"
        return self._service

    async def open(self, epoch: int = 1, generation: int = 1) -> "Stream":
        """A stream whose opening message was answered."""
        stream = Stream(self.stub.Step(), epoch, generation)
        await stream.send(step_id=0)
        assert (await stream.receive()).WhichOneof("outcome") == "ready"
        return stream


class Stream:
    """The scheduler's side of a step stream."""

    def __init__(self, call: Any, epoch: int, generation: int) -> None:
        self.call, self.epoch, self.generation = call, epoch, generation

    async def send(self, step_id: int, **fields: Any) -> None:
        term = {"epoch": self.epoch, "generation": self.generation}
        await self.call.write(pb.StepRequest(**{**term, "step_id": step_id, **fields}))

    async def receive(self) -> pb.StepResponse:
        response = await self.call.read()
        assert isinstance(response, pb.StepResponse), "the stream ended"
        assert (response.epoch, response.generation) == (self.epoch, self.generation)
        return response

    async def refusal(self) -> tuple[grpc.StatusCode, str]:
        """The status with which the stream ends."""
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await self._drain()
        return caught.value.code(), caught.value.details() or ""

    async def _drain(self) -> None:
        while await self.call.read() is not grpc.aio.EOF:
            pass


def new_sequence(sequence_id: int, tokens: list[int] | None = None, **fields: Any) -> pb.NewSequence:
    """A complete NewSequence; by default the greedy one of PROMPT."""
    known = PROMPT if tokens is None else tokens
    return pb.NewSequence(
        **{
            "sequence_id": sequence_id,
            "token_ids": known,
            "prompt_length": len(known),
            "sampling": GREEDY,
            **fields,
        }
    )


def scheduled(*items: tuple[int, ...]) -> pb.Schedule:
    """Items are (sequence_id, start, num_tokens, *new blocks)."""
    schedule = pb.Schedule()
    for sequence_id, start, num_tokens, *blocks in items:
        schedule.sequence_ids.append(sequence_id)
        schedule.starts.append(start)
        schedule.num_tokens.append(num_tokens)
        schedule.num_new_blocks.append(len(blocks))
        schedule.new_block_ids.extend(blocks)
    return schedule


@asynccontextmanager
async def serving(profile_dir: Path | None = None) -> AsyncIterator[Worker]:
    """A worker's server with no replica yet, and a channel to it."""
    device = DeviceThread()
    server = create_server(max_message_bytes=INTERNAL_MESSAGE_BYTES)
    service = WorkerService(device, profile_dir)
    worker_pb2_grpc.add_WorkerServiceServicer_to_server(service, server)
    port = bind(server, "127.0.0.1", 0)
    await server.start()
    async with internal_channel(f"127.0.0.1:{port}") as channel:
        yield Worker(service, channel, port)
    await server.stop(0)
    device.close()


def small_replica(directory: Path) -> ModelInstance:
    """A replica of the model in a directory, with 32 device blocks and at least as many host blocks."""
    args = ["--model", str(directory), "--dtype", "float32", "--num-blocks", "32", "--num-threads", "1"]
    args += ["--swap-space", "0.001"]
    return load_instance(read_settings(WorkerSettings, args), print)
