"""A real gRPC server with scripted responses."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import grpc
import pytest
from google.protobuf.duration_pb2 import Duration
from google.rpc import error_details_pb2, status_pb2

from quire.inference.v1 import inference_pb2 as pb
from quire.inference.v1 import inference_pb2_grpc as pb_grpc

Context = grpc.aio.ServicerContext[Any, Any]


@dataclass
class Failure:
    """A status with trailing metadata."""

    code: grpc.StatusCode
    text: str
    metadata: tuple[tuple[str, str | bytes], ...] = ()


class Hold:
    """Waits until the call is cancelled."""


@dataclass
class ScriptedService(pb_grpc.InferenceServiceServicer):
    """Sends scripted responses, and records requests."""

    requests: list[Any] = field(default_factory=list)
    metadata: list[dict[str, str | bytes]] = field(default_factory=list)
    time_remaining: list[float | None] = field(default_factory=list)
    # Failures of the next calls, one per call; None lets a call pass.
    refusals: list[Failure | None] = field(default_factory=list)
    script: list[pb.StreamGenerateResponse | Failure | Hold] = field(default_factory=list)
    whole: pb.GenerateResponse = field(default_factory=pb.GenerateResponse)
    vector: Sequence[float] = ()
    """That of each text. Empty: its place in the call, and 0.5."""
    labels: Sequence[str] = ("no", "yes")
    hold_whole: bool = False
    holding: asyncio.Event = field(default_factory=asyncio.Event)
    cancelled: asyncio.Event = field(default_factory=asyncio.Event)
    offsets: dict[int, int] = field(default_factory=dict)

    def accept(self, request_id: str = "r-1", seed: int = 7) -> None:
        """Adds the acceptance to the stream."""
        acceptance = pb.Acceptance(request_id=request_id, model="tiny", seed=seed)
        self.script.append(pb.StreamGenerateResponse(acceptance=acceptance))

    def say(
        self,
        text: str,
        token_ids: Sequence[int] = (1,),
        index: int = 0,
        logprobs: Sequence[pb.TokenLogprob] = (),
        finish: pb.Finish | None = None,
    ) -> None:
        """Adds a chunk after the last one of its sequence."""
        offset = self.offsets.get(index, 0)
        self.offsets[index] = offset + len(token_ids)
        chunk = pb.Chunk(index=index, offset=offset, text=text, token_ids=token_ids, logprobs=logprobs, finish=finish)
        self.script.append(pb.StreamGenerateResponse(chunk=chunk))

    def end(self, index: int = 0, reason: pb.FinishReason = pb.FINISH_REASON_LENGTH) -> None:
        """Adds the end of a sequence."""
        self.say("", (), index, finish=pb.Finish(reason=reason))

    def account(self, prompt_tokens: int = 5, completion_tokens: int = 3, cached_tokens: int = 2) -> None:
        """Adds the usage."""
        usage = pb.Usage(prompt_tokens=prompt_tokens, completion_tokens=completion_tokens, cached_tokens=cached_tokens)
        self.script.append(pb.StreamGenerateResponse(usage=usage))

    def answer(self, *texts: str) -> None:
        """Scripts a whole stream: a token for each text."""
        self.accept()
        for text in texts:
            self.say(text)
        self.end()
        self.account(completion_tokens=len(texts))

    def hold(self) -> None:
        """Leaves the stream open until it is cancelled."""
        self.script.append(Hold())

    def refuse(self, code: grpc.StatusCode, text: str, metadata: Sequence[tuple[str, str | bytes]] = ()) -> None:
        """Fails the next call."""
        self.refusals.append(Failure(code, text, tuple(metadata)))

    def refuse_with_details(
        self,
        code: grpc.StatusCode,
        reason: str,
        message: str,
        field_path: str | None = None,
        retry_after: int | None = None,
        request_id: str | None = None,
    ) -> None:
        """Fails the next call with an error of Quire's gateway."""
        status = status_pb2.Status(code=code.value[0], message=message)
        status.details.add().Pack(error_details_pb2.ErrorInfo(reason=reason, domain="quire"))
        if field_path is not None:
            violation = error_details_pb2.BadRequest.FieldViolation(field=field_path, description=message)
            status.details.add().Pack(error_details_pb2.BadRequest(field_violations=[violation]))
        if retry_after is not None:
            status.details.add().Pack(error_details_pb2.RetryInfo(retry_delay=Duration(seconds=retry_after)))
        if request_id is not None:
            status.details.add().Pack(error_details_pb2.RequestInfo(request_id=request_id))
        text = f"{field_path}: {message}" if field_path else message
        self.refuse(code, text, [("grpc-status-details-bin", status.SerializeToString())])

    def break_off(self, code: grpc.StatusCode, reason: str, message: str) -> None:
        """Ends the stream with an error at this point."""
        self.refuse_with_details(code, reason, message)
        failure = self.refusals.pop()
        assert failure is not None
        self.script.append(failure)

    async def _take(self, request: Any, context: Context) -> None:
        self.requests.append(request)
        self.metadata.append(dict(context.invocation_metadata() or ()))
        self.time_remaining.append(context.time_remaining())
        if self.refusals and (failure := self.refusals.pop(0)) is not None:
            await self._fail(failure, context)

    async def _fail(self, failure: Failure, context: Context) -> None:
        await context.abort(failure.code, failure.text, trailing_metadata=failure.metadata)

    async def StreamGenerate(
        self, request: pb.StreamGenerateRequest, context: Context
    ) -> AsyncIterator[pb.StreamGenerateResponse]:
        at_end = False

        def note_cancelled(context: Any) -> None:
            if not at_end:
                self.cancelled.set()

        # There is no CancelledError here if the call is cancelled during a write.
        context.add_done_callback(note_cancelled)  # type: ignore[arg-type]  # the stubs want a class
        await self._take(request, context)
        for step in self.script:
            if isinstance(step, Failure):
                at_end = True
                await self._fail(step, context)
            elif isinstance(step, Hold):
                self.holding.set()
                await asyncio.Event().wait()
            else:
                yield step
        at_end = True

    async def Resume(self, request: pb.ResumeRequest, context: Context) -> AsyncIterator[pb.ResumeResponse]:
        await self._take(request, context)
        for step in self.script:
            if isinstance(step, pb.StreamGenerateResponse):
                yield pb.ResumeResponse.FromString(step.SerializeToString())

    async def Generate(self, request: pb.GenerateRequest, context: Context) -> pb.GenerateResponse:
        await self._take(request, context)
        if self.hold_whole:
            self.holding.set()
            await asyncio.Event().wait()
        return self.whole

    async def Cancel(self, request: pb.CancelRequest, context: Context) -> pb.CancelResponse:
        await self._take(request, context)
        return pb.CancelResponse()

    async def Embed(self, request: pb.EmbedRequest, context: Context) -> pb.EmbedResponse:
        await self._take(request, context)
        vectors = [pb.Embedding(numbers=self.vector or [number, 0.5]) for number in range(len(request.inputs))]
        return pb.EmbedResponse(model="tiny", embeddings=vectors, usage=pb.Usage(prompt_tokens=4, cached_tokens=1))

    async def Score(self, request: pb.ScoreRequest, context: Context) -> pb.ScoreResponse:
        await self._take(request, context)
        scores = [number + 0.5 for number in range(len(request.documents))]
        return pb.ScoreResponse(model="tiny", scores=scores, usage=pb.Usage(prompt_tokens=6))

    async def Classify(self, request: pb.ClassifyRequest, context: Context) -> pb.ClassifyResponse:
        await self._take(request, context)
        numbers = [pb.Classification(scores=[0.25 + number / 2, 0.5]) for number in range(len(request.inputs))]
        usage = pb.Usage(prompt_tokens=4)
        return pb.ClassifyResponse(model="tiny", labels=self.labels, classifications=numbers, usage=usage)

    async def Tokenize(self, request: pb.TokenizeRequest, context: Context) -> pb.TokenizeResponse:
        await self._take(request, context)
        return pb.TokenizeResponse(token_ids=[4, 5], context_length=64)

    async def Detokenize(self, request: pb.DetokenizeRequest, context: Context) -> pb.DetokenizeResponse:
        await self._take(request, context)
        return pb.DetokenizeResponse(text="so it says")

    async def ListModels(self, request: pb.ListModelsRequest, context: Context) -> pb.ListModelsResponse:
        await self._take(request, context)
        return pb.ListModelsResponse(
            models=[pb.Model(name="tiny", context_length=64, vocab_size=512, aliases=["small"])]
        )


@pytest.fixture
async def service() -> ScriptedService:
    return ScriptedService()


@pytest.fixture
async def address(service: ScriptedService, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[str]:
    """The address of `service`, which is also the default address of clients."""
    server = grpc.aio.server(options=[("grpc.so_reuseport", 0)])
    pb_grpc.add_InferenceServiceServicer_to_server(service, server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    monkeypatch.setenv("QUIRE_ADDRESS", f"127.0.0.1:{port}")
    monkeypatch.delenv("QUIRE_API_KEY", raising=False)
    yield f"127.0.0.1:{port}"
    await server.stop(None)
