"""Gateways that fail at given messages: real gRPC servers that share their requests, as Quire's gateways do."""

import asyncio
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from enum import Enum, auto
from typing import Any

import grpc
from google.protobuf.duration_pb2 import Duration
from google.rpc import error_details_pb2, status_pb2

from ports import lasting_port
from quire.inference.v1 import inference_pb2 as pb
from quire.inference.v1 import inference_pb2_grpc as pb_grpc

Context = grpc.aio.ServicerContext[Any, Any]

LENGTHS = (7, 4)
"""How many tokens each sequence of every request has."""

SEED = 11


class Fault(Enum):
    """How a call fails."""

    DRAINS = auto()
    """UNAVAILABLE, sent by the gateway."""
    RESETS = auto()
    """INTERNAL, without details of the gateway."""
    STOPS = auto()
    """The gateway exits: its listener and the connection are closed."""
    HANGS = auto()
    """The gateway stops sending."""
    PAUSES = auto()
    """The call sends nothing until the gateway was probed twice; then the gateway drains."""


@dataclass(frozen=True)
class Refusal:
    """An error that the gateway sends."""

    code: grpc.StatusCode
    reason: str
    retry_after: int | None = None
    """Seconds."""


@dataclass(frozen=True)
class Break:
    """How a call fails after a number of messages."""

    after: int
    how: Fault | Refusal


def token(index: int, place: int) -> int:
    """The token at a position of the sequence."""
    return 100 * (index + 1) + place


def text_after(index: int, num_tokens: int, is_ended: bool) -> str:
    """The text of the first tokens. The text of the last one is held back until the end."""
    shown = num_tokens if is_ended else max(0, num_tokens - 1)
    return "".join(f"<{token(index, place)}>" for place in range(shown))


def messages(name: str, starts: Sequence[int], size: int) -> Iterator[dict[str, Any]]:
    """The messages of a call, from the first token of each sequence in `starts`, in chunks of `size` tokens."""
    yield {"acceptance": pb.Acceptance(request_id=name, model="tiny", seed=SEED, is_durable=True)}
    places = list(starts)
    ended = [False] * len(places)
    while not all(ended):
        for index, length in enumerate(LENGTHS):
            if ended[index]:
                continue
            start, end = places[index], min(places[index] + size, length)
            ended[index] = end == length
            text = text_after(index, end, ended[index]).removeprefix(text_after(index, start, False))
            finish = pb.Finish(reason=pb.FINISH_REASON_LENGTH) if ended[index] else None
            tokens = [token(index, place) for place in range(start, end)]
            yield {"chunk": pb.Chunk(index=index, offset=start, text=text, token_ids=tokens, finish=finish)}
            places[index] = end
    yield {"usage": pb.Usage(prompt_tokens=1, completion_tokens=sum(LENGTHS))}


@dataclass
class BreakingGateway(pb_grpc.InferenceServiceServicer):
    """One gateway. All gateways share `known`, the names of the requests. Each call uses up one of `breaks`."""

    known: set[str]
    size: int
    breaks: list[Break] = field(default_factory=list)
    asked: list[pb.StreamGenerateRequest | pb.ResumeRequest | pb.GenerateRequest | pb.CancelRequest] = field(
        default_factory=list
    )
    address: str = ""
    is_silent: bool = False
    num_probes: int = 0
    _probed: asyncio.Event = field(default_factory=asyncio.Event)
    _server: grpc.aio.Server | None = None
    _stopping: asyncio.Task[None] | None = None

    async def start(self, port: int = 0) -> None:
        """Starts to listen, by default on a free port."""
        port = port or lasting_port()
        self._server = grpc.aio.server(options=[("grpc.so_reuseport", 0)])
        pb_grpc.add_InferenceServiceServicer_to_server(self, self._server)
        self.address = f"127.0.0.1:{self._server.add_insecure_port(f'127.0.0.1:{port}')}"
        await self._server.start()

    async def stop(self) -> None:
        """Closes the listener and ends all calls."""
        if self._server is not None:
            await self._server.stop(None)

    async def StreamGenerate(
        self, request: pb.StreamGenerateRequest, context: Context
    ) -> AsyncIterator[pb.StreamGenerateResponse]:
        self.asked.append(request)
        self.known.add(request.generation.request_id)
        said = messages(request.generation.request_id, [0] * len(LENGTHS), self.size)
        async for message in self._until_it_breaks(said, context):
            yield pb.StreamGenerateResponse(**message)

    async def Resume(self, request: pb.ResumeRequest, context: Context) -> AsyncIterator[pb.ResumeResponse]:
        self.asked.append(request)
        if request.request_id not in self.known:
            await _refuse(context, Refusal(grpc.StatusCode.NOT_FOUND, "REQUEST_UNKNOWN"))
        starts = [0] * len(LENGTHS)
        for position in request.positions:
            starts[position.index] = position.next_offset
        async for message in self._until_it_breaks(messages(request.request_id, starts, self.size), context):
            yield pb.ResumeResponse(**message)

    async def Generate(self, request: pb.GenerateRequest, context: Context) -> pb.GenerateResponse:
        self.asked.append(request)
        async for _ in self._until_it_breaks(iter(()), context):
            pass
        acceptance = pb.Acceptance(request_id=request.generation.request_id, model="tiny", seed=SEED)
        return pb.GenerateResponse(acceptance=acceptance, completions=[pb.Completion(text="whole")])

    async def ListModels(self, request: pb.ListModelsRequest, context: Context) -> pb.ListModelsResponse:
        if self.is_silent:
            await asyncio.Event().wait()
        self.num_probes += 1
        self._probed.set()
        return pb.ListModelsResponse()

    async def Cancel(self, request: pb.CancelRequest, context: Context) -> pb.CancelResponse:
        self.asked.append(request)
        return pb.CancelResponse()

    async def Tokenize(self, request: pb.TokenizeRequest, context: Context) -> pb.TokenizeResponse:
        return pb.TokenizeResponse()

    async def Embed(self, request: pb.EmbedRequest, context: Context) -> pb.EmbedResponse:
        raise NotImplementedError

    async def Classify(self, request: pb.ClassifyRequest, context: Context) -> pb.ClassifyResponse:
        raise NotImplementedError

    async def Score(self, request: pb.ScoreRequest, context: Context) -> pb.ScoreResponse:
        raise NotImplementedError

    async def Detokenize(self, request: pb.DetokenizeRequest, context: Context) -> pb.DetokenizeResponse:
        return pb.DetokenizeResponse()

    async def _until_it_breaks(self, said: Iterator[dict[str, Any]], context: Context) -> AsyncIterator[dict[str, Any]]:
        broken = self.breaks.pop(0) if self.breaks else None
        for place, message in enumerate(said):
            if broken is not None and place == broken.after:
                break
            yield message
        if broken is not None:
            await self._break(broken.how, context)

    async def _break(self, how: Fault | Refusal, context: Context) -> None:
        match how:
            case Fault.DRAINS:
                await _refuse(context, Refusal(grpc.StatusCode.UNAVAILABLE, "DRAINING"))
            case Fault.RESETS:
                await context.abort(grpc.StatusCode.INTERNAL, "Received RST_STREAM with error code 2")
            case Fault.STOPS:
                self._stopping = asyncio.create_task(self.stop())
                await asyncio.Event().wait()
            case Fault.PAUSES:
                while self.num_probes < 2:
                    self._probed.clear()
                    await self._probed.wait()
                await self._break(Fault.DRAINS, context)
            case Fault.HANGS:
                self.is_silent = True
                await asyncio.Event().wait()
            case refusal:
                await _refuse(context, refusal)


async def _refuse(context: Context, refusal: Refusal) -> None:
    status = status_pb2.Status(code=refusal.code.value[0], message="why")
    status.details.add().Pack(error_details_pb2.ErrorInfo(reason=refusal.reason, domain="quire"))
    if refusal.retry_after is not None:
        status.details.add().Pack(error_details_pb2.RetryInfo(retry_delay=Duration(seconds=refusal.retry_after)))
    details = (("grpc-status-details-bin", status.SerializeToString()),)
    await context.abort(refusal.code, "why", trailing_metadata=details)


@asynccontextmanager
async def breaking_gateways(*sizes: int) -> AsyncIterator[list[BreakingGateway]]:
    """One gateway for each chunk size, over the same requests."""
    known: set[str] = set()
    gateways = [BreakingGateway(known, size) for size in sizes]
    for gateway in gateways:
        await gateway.start()
    try:
        yield gateways
    finally:
        for gateway in gateways:
            await gateway.stop()
