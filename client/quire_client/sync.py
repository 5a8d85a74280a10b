"""The blocking client: safe to share between threads."""

from collections.abc import Callable, Iterator, Sequence
from types import TracebackType
from typing import Protocol, Self, TypeVar, Unpack

import grpc

from quire.inference.v1 import inference_pb2 as pb
from quire.inference.v1.inference_pb2_grpc import InferenceServiceStub
from quire_client import requests
from quire_client.connection import Connection, OwnsChannel
from quire_client.errors import quire_errors
from quire_client.requests import GenerationOptions, Messages, Prompt
from quire_client.results import Acceptance, Chunk, Generation, Model, Tokenized, Usage
from quire_client.transcript import Transcript

RequestT = TypeVar("RequestT")
ResponseT = TypeVar("ResponseT")


class StreamCall(Protocol):
    """A running StreamGenerate."""

    def __iter__(self) -> Iterator[pb.StreamGenerateResponse]: ...
    def cancel(self) -> bool: ...


class Stream:
    """The chunks of one generation, read once with `for`. The call starts at the first chunk asked for.

    Leaving early, by `break`, an exception, `close()` or the end of `with`, ends the call and frees what the
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

    def __iter__(self) -> Iterator[Chunk]:
        """Yields the chunks of all sequences as they come. Raises QuireError."""
        if self._call is not None or self._closed:
            raise RuntimeError("a stream is read once")
        self._call = self._start()
        try:
            with quire_errors(self._address):
                for message in self._call:
                    chunk = self._transcript.read(message)
                    if chunk is not None:
                        yield chunk
            self._transcript.check_complete()
        finally:
            self._call.cancel()

    def collect(self) -> Generation:
        """Reads the whole stream. Raises QuireError."""
        return self._transcript.fold(list(self))

    def close(self) -> None:
        """Ends the call, if it runs. A reader in another thread gets QuireError CANCELLED."""
        self._closed = True
        if self._call is not None:
            self._call.cancel()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()


class Client(OwnsChannel):
    """Calls a Quire gateway. Use it as a context manager; threads may share it.

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
        interceptors: Sequence[grpc.UnaryUnaryClientInterceptor | grpc.UnaryStreamClientInterceptor] = (),
    ) -> None:
        self._connection = to = Connection.resolve(address, credentials, timeout, api_key)
        self._channel = (
            grpc.insecure_channel(to.address, to.options)
            if to.credentials is None
            else grpc.secure_channel(to.address, to.credentials, to.options)
        )
        self._stub = InferenceServiceStub(grpc.intercept_channel(self._channel, *interceptors))

    def generate(
        self,
        prompt: Prompt,
        *,
        timeout: float | None = None,
        traceparent: str | None = None,
        **options: Unpack[GenerationOptions],
    ) -> Generation:
        """Continues text or token ids, and answers when every sequence has ended."""
        return self._generate(requests.completion_of(prompt, options), timeout, traceparent)

    def chat(
        self,
        messages: Messages,
        *,
        timeout: float | None = None,
        traceparent: str | None = None,
        **options: Unpack[GenerationOptions],
    ) -> Generation:
        """Answers a chat, when every sequence has ended."""
        return self._generate(requests.chat_of(messages, options), timeout, traceparent)

    def stream(
        self,
        prompt: Prompt,
        *,
        timeout: float | None = None,
        traceparent: str | None = None,
        **options: Unpack[GenerationOptions],
    ) -> Stream:
        """Continues text or token ids, and yields text as it comes."""
        return self._stream(requests.completion_of(prompt, options), timeout, traceparent)

    def stream_chat(
        self,
        messages: Messages,
        *,
        timeout: float | None = None,
        traceparent: str | None = None,
        **options: Unpack[GenerationOptions],
    ) -> Stream:
        """Answers a chat, and yields text as it comes."""
        return self._stream(requests.chat_of(messages, options), timeout, traceparent)

    def cancel(self, request_id: str, *, timeout: float | None = None) -> None:
        """Ends a request, on whichever gateway it runs. Does nothing where it has ended, or never was."""
        self._unary(self._stub.Cancel, pb.CancelRequest(request_id=request_id), timeout)

    def tokenize(self, text: str | Messages, *, model: str | None = None, timeout: float | None = None) -> Tokenized:
        """Token ids of a text, or of a chat by way of the model's template."""
        response = self._unary(self._stub.Tokenize, requests.tokenize_of(text, model), timeout)
        return Tokenized.from_proto(response)

    def detokenize(
        self,
        token_ids: Sequence[int],
        *,
        model: str | None = None,
        keep_special_tokens: bool = False,
        timeout: float | None = None,
    ) -> str:
        """Text of token ids."""
        request = requests.detokenize_of(token_ids, model, keep_special_tokens)
        return (self._unary(self._stub.Detokenize, request, timeout)).text

    def models(self, *, timeout: float | None = None) -> tuple[Model, ...]:
        """The models that are served."""
        response = self._unary(self._stub.ListModels, pb.ListModelsRequest(), timeout)
        return tuple(map(Model.from_proto, response.models))

    def _unary(
        self,
        method: "grpc.UnaryUnaryMultiCallable[RequestT, ResponseT]",  # generic in the stubs only
        request: RequestT,
        timeout: float | None,
        traceparent: str | None = None,
    ) -> ResponseT:
        to = self._connection
        with quire_errors(to.address):
            return method(request, timeout=to.deadline(timeout), metadata=to.metadata(traceparent))

    def _generate(self, generation: pb.Generation, timeout: float | None, traceparent: str | None) -> Generation:
        request = pb.GenerateRequest(generation=generation)
        return Generation.from_proto(self._unary(self._stub.Generate, request, timeout, traceparent))

    def _stream(self, generation: pb.Generation, timeout: float | None, traceparent: str | None) -> Stream:
        to = self._connection

        def start() -> StreamCall:
            return self._stub.StreamGenerate(
                pb.StreamGenerateRequest(generation=generation),
                timeout=to.deadline(timeout),
                metadata=to.metadata(traceparent),
            )

        return Stream(start, to.address)
