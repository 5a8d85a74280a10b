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
from quire_client.resumable_stream import RESUME_TIMEOUT, OnResume, ResumableStream, RetryPolicy
from quire_client.sync_endpoints import Interceptor, StreamCall, SyncEndpointPool


class Stream(Closeable):
    """The chunks of one generation, read once with `for`. The call starts at the first chunk asked for.

    Where a call breaks it goes on with another one, from the next token, at whichever gateway answers.

    Leaving early, by `break`, an exception, `close()` or the end of `with`, ends the request and frees what it
    holds on the server; one that you named runs on for the server's grace, for `Client.resume`.
    """

    def __init__(
        self, pool: SyncEndpointPool, resumable: ResumableStream, generated_id: str | None, traceparent: str | None
    ) -> None:
        self._pool = pool
        self._resumable = resumable
        self._generated_id = generated_id
        self._traceparent = traceparent
        self._call: StreamCall | None = None
        self._is_read = False
        self._is_closed = False

    @property
    def acceptance(self) -> Acceptance | None:
        """Id, model and seed; None before the first chunk."""
        return self._resumable.acceptance

    @property
    def usage(self) -> Usage | None:
        """Tokens processed; None before the end."""
        return self._resumable.usage

    @property
    def num_resumes(self) -> int:
        """How often a call broke, or was not taken, and the stream went on."""
        return self._resumable.num_resumes

    def __iter__(self) -> Iterator[Chunk]:
        """Yields the chunks of all sequences as they come. Raises QuireError."""
        if self._is_read or self._is_closed:
            raise RuntimeError("a stream is read once")
        self._is_read = True
        resumable = self._resumable
        with self._pool.cancel_on_exit(self._generated_id):
            while resumable.usage is None:
                call, endpoint = self._pool.start_call(resumable, self._traceparent)
                self._call = call
                try:
                    self._check_open()  # another thread may have closed it before there was this call to end
                    with endpoint.watching(call, is_watched=resumable.is_resumable):
                        for message in call:
                            endpoint.record_activity()
                            chunk = resumable.read(message)
                            if chunk is not None:
                                yield chunk
                    resumable.assembler.check_complete()
                except QuireError as error:
                    self._check_open()
                    self._pool.wait_to_resume(resumable, error, endpoint)
                    self._check_open()
                finally:
                    call.cancel()

    def collect(self) -> Generation:
        """Reads the whole stream. Raises QuireError."""
        return self._resumable.assembler.assemble(list(self))

    def close(self) -> None:
        """Ends the request, if it runs. A reader in another thread gets QuireError CANCELLED."""
        self._is_closed = True
        if self._call is not None:
            self._call.cancel()
        if self._generated_id is not None:
            self._pool.cancel(self._generated_id)

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
        resume_patience: float = RESUME_TIMEOUT,
        interceptors: Sequence[Interceptor] = (),
    ) -> None:
        self._connection = Connection.resolve(address, credentials, timeout, api_key)
        self._pool = SyncEndpointPool(self._connection, interceptors)
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
            requests.completion_request(prompt, options), self._retry_policy(timeout, resume, on_resume), traceparent
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
            requests.chat_request(messages, options), self._retry_policy(timeout, resume, on_resume), traceparent
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
            requests.completion_request(prompt, options), self._retry_policy(timeout, resume, on_resume), traceparent
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
            requests.chat_request(messages, options), self._retry_policy(timeout, resume, on_resume), traceparent
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
        request = requests.resume_request(request_id, positions or {})
        resumable = ResumableStream(request, self._retry_policy(timeout, True, on_resume), positions)
        return Stream(self._pool, resumable, None, traceparent)

    def cancel(self, request_id: str, *, timeout: float | None = None) -> None:
        """Ends a request, on whichever gateway it runs. Does nothing where it has ended, or never was."""
        request = pb.CancelRequest(request_id=request_id)
        self._pool.call(lambda stub: stub.Cancel, request, self._unary_retry_policy(timeout))

    def tokenize(self, text: str | Messages, *, model: str | None = None, timeout: float | None = None) -> Tokenized:
        """Token ids of a text, or of a chat by way of the model's template."""
        request = requests.tokenize_request(text, model)
        response = self._pool.call(lambda stub: stub.Tokenize, request, self._unary_retry_policy(timeout))
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
        request = requests.detokenize_request(token_ids, model, keep_special_tokens)
        return (self._pool.call(lambda stub: stub.Detokenize, request, self._unary_retry_policy(timeout))).text

    def models(self, *, timeout: float | None = None) -> tuple[Model, ...]:
        """The models that are served."""
        request = pb.ListModelsRequest()
        response = self._pool.call(lambda stub: stub.ListModels, request, self._unary_retry_policy(timeout))
        return tuple(map(Model.from_proto, response.models))

    def close(self) -> None:
        """Ends all calls and requests, and closes the connections."""
        self._pool.close()

    def _unary_retry_policy(self, timeout: float | None) -> RetryPolicy:
        return RetryPolicy(self._pool.endpoint_list, self._connection.deadline(timeout))

    def _retry_policy(self, timeout: float | None, resume: bool | None, on_resume: OnResume | None) -> RetryPolicy:
        is_resumed = self._resume if resume is None else resume
        resume_timeout = self._resume_patience if is_resumed else None
        return RetryPolicy(self._pool.endpoint_list, self._connection.deadline(timeout), resume_timeout, on_resume)

    def _generate(self, generation: pb.Generation, retry_policy: RetryPolicy, traceparent: str | None) -> Generation:
        generated_id = requests.assign_request_id(generation) if retry_policy.resume_timeout is not None else None
        request = pb.GenerateRequest(generation=generation)
        with self._pool.cancel_on_exit(generated_id):
            response = self._pool.call(lambda stub: stub.Generate, request, retry_policy, traceparent)
        return Generation.from_proto(response)

    def _stream(self, generation: pb.Generation, retry_policy: RetryPolicy, traceparent: str | None) -> Stream:
        generated_id = requests.assign_request_id(generation) if retry_policy.resume_timeout is not None else None
        resumable = ResumableStream(pb.StreamGenerateRequest(generation=generation), retry_policy)
        return Stream(self._pool, resumable, generated_id, traceparent)
