"""The blocking client: safe to share between threads."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Unpack

import grpc

from quire.inference.v1 import inference_pb2 as pb
from quire_client import requests
from quire_client.connection import Closeable, Connection
from quire_client.errors import QuireError, closed
from quire_client.requests import GenerationOptions, Messages, Prompt
from quire_client.results import Acceptance, Chunk, Generation, Model, Tokenized, Usage
from quire_client.resuming import PATIENCE, Course, OnResume, Recovery
from quire_client.sync_gateways import Gateways, Interceptor, StreamCall


class Stream(Closeable):
    """The chunks of one generation, read once with `for`. The call starts at the first chunk asked for.

    Where a call breaks it goes on with another one, from the next token, at whichever gateway answers.

    Leaving early, by `break`, an exception, `close()` or the end of `with`, ends the request and frees what it
    holds on the server; one that you named runs on for the server's grace, for `Client.resume`.
    """

    def __init__(self, gateways: Gateways, course: Course, own_name: str | None, traceparent: str | None) -> None:
        self._gateways = gateways
        self._course = course
        self._own_name = own_name
        self._traceparent = traceparent
        self._call: StreamCall | None = None
        self._is_read = False
        self._is_closed = False

    @property
    def acceptance(self) -> Acceptance | None:
        """Id, model and seed; None before the first chunk."""
        return self._course.acceptance

    @property
    def usage(self) -> Usage | None:
        """Tokens processed; None before the end."""
        return self._course.usage

    @property
    def num_resumes(self) -> int:
        """How often a call broke, or was not taken, and the stream went on."""
        return self._course.num_resumes

    def __iter__(self) -> Iterator[Chunk]:
        """Yields the chunks of all sequences as they come. Raises QuireError."""
        if self._is_read or self._is_closed:
            raise RuntimeError("a stream is read once")
        self._is_read = True
        course = self._course
        with self._gateways.holding(self._own_name):
            while course.usage is None:
                call, gateway = self._gateways.begin(course, self._traceparent)
                self._call = call
                try:
                    self._check_open()  # another thread may have closed it before there was this call to end
                    with gateway.watching(call, is_watched=course.is_resumable):
                        for message in call:
                            gateway.hear()
                            chunk = course.read(message)
                            if chunk is not None:
                                yield chunk
                    course.transcript.check_complete()
                except QuireError as error:
                    self._check_open()
                    self._gateways.go_on(course, error, gateway)
                    self._check_open()
                finally:
                    call.cancel()

    def collect(self) -> Generation:
        """Reads the whole stream. Raises QuireError."""
        return self._course.transcript.fold(list(self))

    def close(self) -> None:
        """Ends the request, if it runs. A reader in another thread gets QuireError CANCELLED."""
        self._is_closed = True
        if self._call is not None:
            self._call.cancel()
        if self._own_name is not None:
            self._gateways.cancel(self._own_name)

    def _check_open(self) -> None:
        if self._is_closed:
            raise closed("the stream") from None


class Client(Closeable):
    """Calls Quire's gateways. Use it as a context manager; threads may share it.

    `address` is QUIRE_ADDRESS or 127.0.0.1:50051 unless given, `api_key` QUIRE_API_KEY. Where it names several
    gateways, separated by commas, calls go to the first, and from one that does not answer on to the next.
    `credentials` make the channels secure. `timeout`, of the client or of one call, is the deadline in seconds that all
    services keep; absent, the server's own. `interceptors` are grpc's, such as OpenTelemetry's stock ones;
    `traceparent` of a call puts it into a W3C trace without them. Every call raises QuireError.

    What generates outlives gateways: it gets a name, where you give none, and goes on where its call breaks, with no
    token missing or twice, until calls have failed for `resume_patience` seconds without anything new. `resume`, of the
    client or of one call, turns that off; then it has no name but yours. `on_resume` is called with what broke a call,
    once a break. A client that no gateway has answered yet gives up at once.
    """

    def __init__(
        self,
        address: str | None = None,
        *,
        api_key: str | None = None,
        credentials: grpc.ChannelCredentials | None = None,
        timeout: float | None = None,
        resume: bool = True,
        resume_patience: float = PATIENCE,
        interceptors: Sequence[Interceptor] = (),
    ) -> None:
        self._connection = Connection.resolve(address, credentials, timeout, api_key)
        self._gateways = Gateways(self._connection, interceptors)
        self._resume = resume
        self._resume_patience = resume_patience

    def generate(
        self,
        prompt: Prompt,
        *,
        timeout: float | None = None,
        traceparent: str | None = None,
        resume: bool | None = None,
        on_resume: OnResume | None = None,
        **options: Unpack[GenerationOptions],
    ) -> Generation:
        """Continues text or token ids, and answers when every sequence has ended."""
        return self._generate(
            requests.completion_of(prompt, options), self._recovery(timeout, resume, on_resume), traceparent
        )

    def chat(
        self,
        messages: Messages,
        *,
        timeout: float | None = None,
        traceparent: str | None = None,
        resume: bool | None = None,
        on_resume: OnResume | None = None,
        **options: Unpack[GenerationOptions],
    ) -> Generation:
        """Answers a chat, when every sequence has ended."""
        return self._generate(
            requests.chat_of(messages, options), self._recovery(timeout, resume, on_resume), traceparent
        )

    def stream(
        self,
        prompt: Prompt,
        *,
        timeout: float | None = None,
        traceparent: str | None = None,
        resume: bool | None = None,
        on_resume: OnResume | None = None,
        **options: Unpack[GenerationOptions],
    ) -> Stream:
        """Continues text or token ids, and yields text as it comes."""
        return self._stream(
            requests.completion_of(prompt, options), self._recovery(timeout, resume, on_resume), traceparent
        )

    def stream_chat(
        self,
        messages: Messages,
        *,
        timeout: float | None = None,
        traceparent: str | None = None,
        resume: bool | None = None,
        on_resume: OnResume | None = None,
        **options: Unpack[GenerationOptions],
    ) -> Stream:
        """Answers a chat, and yields text as it comes."""
        return self._stream(
            requests.chat_of(messages, options), self._recovery(timeout, resume, on_resume), traceparent
        )

    def resume(
        self,
        request_id: str,
        positions: Mapping[int, int] | None = None,
        *,
        timeout: float | None = None,
        traceparent: str | None = None,
        on_resume: OnResume | None = None,
    ) -> Stream:
        """Yields what comes of a request that runs, or ended within the hour: all of it, or what follows `positions`.

        `positions` is how far sequences were read already: index to offset of the next token. Raises QuireError
        REQUEST_UNKNOWN where there is no such request.
        """
        request = requests.resume_of(request_id, positions or {})
        course = Course(request, self._recovery(timeout, True, on_resume), positions)
        return Stream(self._gateways, course, None, traceparent)

    def cancel(self, request_id: str, *, timeout: float | None = None) -> None:
        """Ends a request, on whichever gateway it runs. Does nothing where it has ended, or never was."""
        request = pb.CancelRequest(request_id=request_id)
        self._gateways.call(lambda stub: stub.Cancel, request, self._tries(timeout))

    def tokenize(self, text: str | Messages, *, model: str | None = None, timeout: float | None = None) -> Tokenized:
        """Token ids of a text, or of a chat by way of the model's template."""
        request = requests.tokenize_of(text, model)
        response = self._gateways.call(lambda stub: stub.Tokenize, request, self._tries(timeout))
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
        return (self._gateways.call(lambda stub: stub.Detokenize, request, self._tries(timeout))).text

    def models(self, *, timeout: float | None = None) -> tuple[Model, ...]:
        """The models that are served."""
        request = pb.ListModelsRequest()
        response = self._gateways.call(lambda stub: stub.ListModels, request, self._tries(timeout))
        return tuple(map(Model.from_proto, response.models))

    def close(self) -> None:
        """Ends all calls and requests, and closes the connections."""
        self._gateways.close()

    def _tries(self, timeout: float | None) -> Recovery:
        return Recovery(self._gateways.roster, self._connection.deadline(timeout))

    def _recovery(self, timeout: float | None, resume: bool | None, on_resume: OnResume | None) -> Recovery:
        is_resumed = self._resume if resume is None else resume
        patience = self._resume_patience if is_resumed else None
        return Recovery(self._gateways.roster, self._connection.deadline(timeout), patience, on_resume)

    def _generate(self, generation: pb.Generation, recovery: Recovery, traceparent: str | None) -> Generation:
        own_name = requests.give_name(generation) if recovery.patience is not None else None
        request = pb.GenerateRequest(generation=generation)
        with self._gateways.holding(own_name):
            response = self._gateways.call(lambda stub: stub.Generate, request, recovery, traceparent)
        return Generation.from_proto(response)

    def _stream(self, generation: pb.Generation, recovery: Recovery, traceparent: str | None) -> Stream:
        own_name = requests.give_name(generation) if recovery.patience is not None else None
        course = Course(pb.StreamGenerateRequest(generation=generation), recovery)
        return Stream(self._gateways, course, own_name, traceparent)
