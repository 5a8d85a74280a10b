"""The asyncio client."""

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from functools import cached_property
from types import TracebackType
from typing import TYPE_CHECKING, Self, TypeVar, Unpack

import grpc

from quire.inference.v1 import inference_pb2 as pb
from quire.inference.v1.inference_pb2_grpc import InferenceServiceStub
from quire_client import requests
from quire_client.connection import Connection
from quire_client.errors import QuireError, quire_errors
from quire_client.requests import GenerationOptions, Messages, Prompt
from quire_client.results import Acceptance, Chunk, Generation, Model, Tokenized, Usage
from quire_client.transcript import Transcript

if TYPE_CHECKING:  # exists in the stubs only
    from quire.inference.v1.inference_pb2_grpc import InferenceServiceAsyncStub

RequestT = TypeVar("RequestT")
ResponseT = TypeVar("ResponseT")

StreamCall = grpc.aio.UnaryStreamCall[pb.StreamGenerateRequest, pb.StreamGenerateResponse]


class AsyncStream:
    """The chunks of one generation, read once with `async for`. The call starts at the first chunk asked for.

    Leaving early, by `break`, an exception, `aclose()` or the end of `async with`, ends the call and frees what the
    request holds on the server.
    """

    def __init__(self, start: Callable[[], StreamCall], address: str) -> None:
        self._start = start
        self._address = address
        self._transcript = Transcript()
        self._call: StreamCall | None = None
        self._closed = False

    @property
    def acceptance(self) -> Acceptance | None:
        """Id, model and seed; None before the first chunk."""
        return self._transcript.acceptance

    @property
    def usage(self) -> Usage | None:
        """Tokens processed; None before the end."""
        return self._transcript.usage

    async def __aiter__(self) -> AsyncIterator[Chunk]:
        """Yields the chunks of all sequences as they come. Raises QuireError."""
        if self._call is not None or self._closed:
            raise RuntimeError("a stream is read once")
        self._call = self._start()
        try:
            with quire_errors(self._address):
                async for message in self._call:
                    chunk = self._transcript.read(message)
                    if chunk is not None:
                        yield chunk
            self._transcript.check_complete()
        except asyncio.CancelledError:
            # grpc answers so both where this task is cancelled and where the call was closed by another one.
            if not self._closed:
                raise
            raise QuireError(grpc.StatusCode.CANCELLED, "CANCELLED", "the stream was closed") from None
        finally:
            self._call.cancel()

    async def collect(self) -> Generation:
        """Reads the whole stream. Raises QuireError."""
        return self._transcript.fold([chunk async for chunk in self])

    async def aclose(self) -> None:
        """Ends the call, if it runs. A reader in another task gets QuireError CANCELLED."""
        self._closed = True
        if self._call is not None:
            self._call.cancel()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self.aclose()


class AsyncClient:
    """Calls a Quire gateway from asyncio. Use it as a context manager, from one event loop.

    `address` is QUIRE_ADDRESS or 127.0.0.1:50051 unless given, `api_key` QUIRE_API_KEY. `credentials` make the channel
    secure. `timeout`, of the client or of one call, is the deadline in seconds that all services keep; absent, the
    server's own. `interceptors` are grpc's, such as OpenTelemetry's stock ones; `traceparent` of a call puts it into a
    W3C trace without them. Every call raises QuireError.
    """

    def __init__(
        self,
        address: str | None = None,
        *,
        api_key: str | None = None,
        credentials: grpc.ChannelCredentials | None = None,
        timeout: float | None = None,
        interceptors: Sequence[grpc.aio.ClientInterceptor] = (),
    ) -> None:
        self._connection = Connection.resolve(address, credentials, timeout, api_key)
        self._interceptors = interceptors
        self._channel: grpc.aio.Channel | None = None

    async def generate(
        self,
        prompt: Prompt,
        *,
        timeout: float | None = None,
        traceparent: str | None = None,
        **options: Unpack[GenerationOptions],
    ) -> Generation:
        """Continues text or token ids, and answers when every sequence has ended."""
        return await self._generate(requests.completion_of(prompt, options), timeout, traceparent)

    async def chat(
        self,
        messages: Messages,
        *,
        timeout: float | None = None,
        traceparent: str | None = None,
        **options: Unpack[GenerationOptions],
    ) -> Generation:
        """Answers a chat, when every sequence has ended."""
        return await self._generate(requests.chat_of(messages, options), timeout, traceparent)

    def stream(
        self,
        prompt: Prompt,
        *,
        timeout: float | None = None,
        traceparent: str | None = None,
        **options: Unpack[GenerationOptions],
    ) -> AsyncStream:
        """Continues text or token ids, and yields text as it comes."""
        return self._stream(requests.completion_of(prompt, options), timeout, traceparent)

    def stream_chat(
        self,
        messages: Messages,
        *,
        timeout: float | None = None,
        traceparent: str | None = None,
        **options: Unpack[GenerationOptions],
    ) -> AsyncStream:
        """Answers a chat, and yields text as it comes."""
        return self._stream(requests.chat_of(messages, options), timeout, traceparent)

    async def cancel(self, request_id: str, *, timeout: float | None = None) -> None:
        """Ends a request, on whichever gateway it runs. Does nothing where it has ended, or never was."""
        await self._unary(self._stub.Cancel, pb.CancelRequest(request_id=request_id), timeout)

    async def tokenize(
        self, text: str | Messages, *, model: str | None = None, timeout: float | None = None
    ) -> Tokenized:
        """Token ids of a text, or of a chat by way of the model's template."""
        response = await self._unary(self._stub.Tokenize, requests.tokenize_of(text, model), timeout)
        return Tokenized.from_proto(response)

    async def detokenize(
        self,
        token_ids: Sequence[int],
        *,
        model: str | None = None,
        keep_special_tokens: bool = False,
        timeout: float | None = None,
    ) -> str:
        """Text of token ids."""
        request = requests.detokenize_of(token_ids, model, keep_special_tokens)
        return (await self._unary(self._stub.Detokenize, request, timeout)).text

    async def models(self, *, timeout: float | None = None) -> tuple[Model, ...]:
        """The models that are served."""
        response = await self._unary(self._stub.ListModels, pb.ListModelsRequest(), timeout)
        return tuple(map(Model.from_proto, response.models))

    async def aclose(self) -> None:
        """Ends all calls and closes the connection."""
        if self._channel is not None:
            await self._channel.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self.aclose()

    @cached_property
    def _stub(self) -> "InferenceServiceAsyncStub":
        # At the first call, not before: a channel belongs to the event loop that runs when it is made.
        to = self._connection
        if to.credentials is None:
            self._channel = grpc.aio.insecure_channel(to.address, options=to.options, interceptors=self._interceptors)
        else:
            self._channel = grpc.aio.secure_channel(
                to.address, to.credentials, options=to.options, interceptors=self._interceptors
            )
        return InferenceServiceStub(self._channel)

    async def _unary(
        self,
        method: grpc.aio.UnaryUnaryMultiCallable[RequestT, ResponseT],
        request: RequestT,
        timeout: float | None,
        traceparent: str | None = None,
    ) -> ResponseT:
        to = self._connection
        with quire_errors(to.address):
            return await method(request, timeout=to.deadline(timeout), metadata=to.metadata(traceparent))

    async def _generate(self, generation: pb.Generation, timeout: float | None, traceparent: str | None) -> Generation:
        request = pb.GenerateRequest(generation=generation)
        return Generation.from_proto(await self._unary(self._stub.Generate, request, timeout, traceparent))

    def _stream(self, generation: pb.Generation, timeout: float | None, traceparent: str | None) -> AsyncStream:
        to = self._connection

        def start() -> StreamCall:
            return self._stub.StreamGenerate(
                pb.StreamGenerateRequest(generation=generation),
                timeout=to.deadline(timeout),
                metadata=to.metadata(traceparent),
            )

        return AsyncStream(start, to.address)
