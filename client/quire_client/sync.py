"""The blocking client, on gRPC's blocking channels (docs/design/sync-client.md)."""

from collections.abc import Iterator, Sequence
from typing import Unpack

import grpc

from quire.inference.v1 import inference_pb2 as pb
from quire_client import requests
from quire_client.base import BaseClient, BaseStream, GenerationCall
from quire_client.chats import Messages
from quire_client.classify_requests import ClassifyOptions, classify_request
from quire_client.connection import Closeable, Connection
from quire_client.embed_requests import EmbedOptions, Inputs, embed_request
from quire_client.errors import QuireError
from quire_client.requests import CallOptions, Prompt
from quire_client.results import Chunk, Generation, Model, Tokenized
from quire_client.resumable_stream import RESUME_TIMEOUT, ResumableStream
from quire_client.score_requests import ScoreOptions, score_request
from quire_client.sync_endpoints import Interceptor, StreamCall, SyncEndpointPool
from quire_client.value_results import Classifications, Embeddings, Scores


class Stream(BaseStream, Closeable):
    """The chunks of one generation, read once with `for`. The call starts at the first chunk asked for.

    Where a call breaks, the stream is resumed from the next token, at any gateway that answers.

    Leaving early, by `break`, an exception, `close()` or the end of `with`, cancels the request. One that you named
    runs on for the server's grace period, for `Client.resume`.
    """

    def __init__(
        self, pool: SyncEndpointPool, resumable: ResumableStream, generated_id: str | None, traceparent: str | None
    ) -> None:
        super().__init__(resumable, generated_id, traceparent)
        self._pool = pool
        self._call: StreamCall | None = None

    def __iter__(self) -> Iterator[Chunk]:
        """Yields the chunks of all sequences as they come. Raises QuireError."""
        self._begin_reading()
        resumable = self._resumable
        with self._pool.cancel_on_exit(self._generated_id):
            while resumable.usage is None:
                call, endpoint = self._pool.start_call(resumable, self._traceparent)
                self._call = call
                try:
                    self._check_open()  # another thread may have closed it before this call was made
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
        """Cancels the request, if it runs. A reader in another thread gets QuireError CANCELLED."""
        self._is_closed = True
        if self._call is not None:
            self._call.cancel()
        if self._generated_id is not None:
            self._pool.cancel(self._generated_id)


class Client(BaseClient[Stream], Closeable):
    """Calls Quire's gateways. Use it as a context manager; threads may share it.

    `address` defaults to QUIRE_ADDRESS, then 127.0.0.1:50051; `api_key` to QUIRE_API_KEY. Several addresses are
    separated by commas: calls go to the first gateway, and to the next one if it does not answer. `credentials`
    make the channels secure; so does QUIRE_CA_FILE, a file of CA certificates. `timeout`, of the client or of one
    call, is the deadline in seconds; without it, the server's limits apply. `interceptors` are grpc's, such as
    OpenTelemetry's; `traceparent` of a call puts it into a W3C trace without them. Every call raises QuireError.

    The client gives each request without a `request_id` a name, and resumes it after a broken call, with each token
    once. It raises the error when calls have failed for `resume_patience` seconds without progress, or at once if no
    gateway has answered this client yet. `resume=False`, of the client or of one call, turns both off. `on_resume` is
    called with the error of a broken call, once per break.
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
        connection = Connection.resolve(address, credentials, timeout, api_key)
        self._pool = SyncEndpointPool(connection, interceptors)
        super().__init__(connection, self._pool.endpoint_list, resume, resume_patience)

    def generate(self, prompt: Prompt, **options: Unpack[CallOptions]) -> Generation:
        """Continues text or token ids, and returns when every sequence has ended."""
        return self._generate(self._completion_call(prompt, options))

    def chat(self, messages: Messages, **options: Unpack[CallOptions]) -> Generation:
        """Answers a chat, and returns when every sequence has ended."""
        return self._generate(self._chat_call(messages, options))

    def embed(self, inputs: Inputs, **options: Unpack[EmbedOptions]) -> Embeddings:
        """Embeds a text, token ids, or a list of those: each becomes a vector."""
        request = embed_request(inputs, options)
        retry_policy = self._retry_policy(options.get("timeout"))
        response = self._pool.call(lambda stub: stub.Embed, request, retry_policy, options.get("traceparent"))
        return Embeddings.from_proto(response)

    def classify(self, inputs: Inputs, **options: Unpack[ClassifyOptions]) -> Classifications:
        """Classifies a text, token ids, or a list of those: each gets a number for each label of the model's head."""
        request = classify_request(inputs, options)
        retry_policy = self._retry_policy(options.get("timeout"))
        response = self._pool.call(lambda stub: stub.Classify, request, retry_policy, options.get("traceparent"))
        return Classifications.from_proto(response)

    def score(
        self, queries: str | Sequence[str], documents: str | Sequence[str], **options: Unpack[ScoreOptions]
    ) -> Scores:
        """Scores how well documents match one query, or how well each one matches the query at its place."""
        request = score_request(queries, documents, options)
        retry_policy = self._retry_policy(options.get("timeout"))
        response = self._pool.call(lambda stub: stub.Score, request, retry_policy, options.get("traceparent"))
        return Scores.from_proto(response)

    def cancel(self, request_id: str, *, timeout: float | None = None) -> None:
        """Cancels a request, on whichever gateway it runs. Does nothing where it has ended, or never was."""
        request = pb.CancelRequest(request_id=request_id)
        self._pool.call(lambda stub: stub.Cancel, request, self._retry_policy(timeout))

    def tokenize(self, text: str | Messages, *, model: str | None = None, timeout: float | None = None) -> Tokenized:
        """Token ids of a text, or of a chat by the model's template."""
        request = requests.tokenize_request(text, model)
        response = self._pool.call(lambda stub: stub.Tokenize, request, self._retry_policy(timeout))
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
        return self._pool.call(lambda stub: stub.Detokenize, request, self._retry_policy(timeout)).text

    def models(self, *, timeout: float | None = None) -> tuple[Model, ...]:
        """The served models."""
        request = pb.ListModelsRequest()
        response = self._pool.call(lambda stub: stub.ListModels, request, self._retry_policy(timeout))
        return tuple(map(Model.from_proto, response.models))

    def close(self) -> None:
        """Cancels all requests and closes the connections."""
        self._pool.close()

    def _generate(self, call: GenerationCall) -> Generation:
        request = pb.GenerateRequest(generation=call.generation)
        with self._pool.cancel_on_exit(call.generated_id):
            response = self._pool.call(lambda stub: stub.Generate, request, call.retry_policy, call.traceparent)
        return Generation.from_proto(response)

    def _open_stream(self, resumable: ResumableStream, generated_id: str | None, traceparent: str | None) -> Stream:
        return Stream(self._pool, resumable, generated_id, traceparent)
