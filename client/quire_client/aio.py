"""The asyncio client."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from typing import Unpack

import grpc

from quire.inference.v1 import inference_pb2 as pb
from quire_client import requests
from quire_client.aio_endpoints import AsyncEndpointPool, AsyncStreamCall
from quire_client.base import BaseClient, BaseStream, GenerationCall
from quire_client.chats import Messages
from quire_client.classify_requests import ClassifyOptions, classify_request
from quire_client.connection import AsyncCloseable, Connection
from quire_client.embed_requests import EmbedOptions, Inputs, embed_request
from quire_client.errors import QuireError
from quire_client.requests import CallOptions, Prompt
from quire_client.results import Chunk, Generation, Model, Tokenized
from quire_client.resumable_stream import RESUME_TIMEOUT, ResumableStream
from quire_client.score_requests import ScoreOptions, score_request
from quire_client.value_results import Classifications, Embeddings, Scores


class AsyncStream(BaseStream, AsyncCloseable):
    """The chunks of one generation, read once with `async for`. The call starts at the first chunk asked for.

    Where a call breaks, the stream is resumed from the next token, at any gateway that answers.

    Leaving early, by `break`, an exception, `aclose()` or the end of `async with`, cancels the request. One that you
    named runs on for the server's grace period, for `AsyncClient.resume`.
    """

    def __init__(
        self, pool: AsyncEndpointPool, resumable: ResumableStream, generated_id: str | None, traceparent: str | None
    ) -> None:
        super().__init__(resumable, generated_id, traceparent)
        self._pool = pool
        self._call: AsyncStreamCall | None = None

    async def __aiter__(self) -> AsyncIterator[Chunk]:
        """Yields the chunks of all sequences as they come. Raises QuireError."""
        self._begin_reading()
        resumable = self._resumable
        async with self._pool.cancel_on_exit(self._generated_id):
            while resumable.usage is None:
                call, endpoint = self._pool.start_call(resumable, self._traceparent)
                self._call = call
                try:
                    with endpoint.watching(call, is_watched=resumable.is_resumable):
                        async for message in call:
                            endpoint.record_activity()
                            chunk = resumable.read(message)
                            if chunk is not None:
                                yield chunk
                    resumable.assembler.check_complete()
                except asyncio.CancelledError:
                    self._check_open()
                    raise
                except QuireError as error:
                    self._check_open()
                    await self._pool.wait_to_resume(resumable, error, endpoint)
                    self._check_open()
                finally:
                    call.cancel()

    async def collect(self) -> Generation:
        """Reads the whole stream. Raises QuireError."""
        return self._resumable.assembler.assemble([chunk async for chunk in self])

    async def aclose(self) -> None:
        """Cancels the request, if it runs. A reader in another task gets QuireError CANCELLED."""
        self._is_closed = True
        if self._call is not None:
            self._call.cancel()
        if self._generated_id is not None:
            await self._pool.cancel(self._generated_id)


class AsyncClient(BaseClient[AsyncStream], AsyncCloseable):
    """Calls Quire's gateways from asyncio. Use it as a context manager, from one event loop.

    `address` defaults to QUIRE_ADDRESS, then 127.0.0.1:50051; `api_key` to QUIRE_API_KEY. Several addresses are
    separated by commas: calls go to the first gateway, and to the next one if it does not answer. `credentials`
    make the channels secure; so does QUIRE_CA_FILE, a file of CA certificates. `timeout`, of the client or of one
    call, is the deadline in seconds; without it, the server's limits apply. `interceptors` are grpc.aio's, such as
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
        interceptors: Sequence[grpc.aio.ClientInterceptor] = (),
    ) -> None:
        connection = Connection.resolve(address, credentials, timeout, api_key)
        self._pool = AsyncEndpointPool(connection, interceptors)
        super().__init__(connection, self._pool.endpoint_list, resume, resume_patience)

    async def generate(self, prompt: Prompt, **options: Unpack[CallOptions]) -> Generation:
        """Continues text or token ids, and returns when every sequence has ended."""
        return await self._generate(self._completion_call(prompt, options))

    async def chat(self, messages: Messages, **options: Unpack[CallOptions]) -> Generation:
        """Answers a chat, and returns when every sequence has ended."""
        return await self._generate(self._chat_call(messages, options))

    async def embed(self, inputs: Inputs, **options: Unpack[EmbedOptions]) -> Embeddings:
        """Embeds a text, token ids, or a list of those: each becomes a vector."""
        request = embed_request(inputs, options)
        retry_policy = self._retry_policy(options.get("timeout"))
        response = await self._pool.call(lambda stub: stub.Embed, request, retry_policy, options.get("traceparent"))
        return Embeddings.from_proto(response)

    async def classify(self, inputs: Inputs, **options: Unpack[ClassifyOptions]) -> Classifications:
        """Classifies a text, token ids, or a list of those: each gets a number for each label of the model's head."""
        request = classify_request(inputs, options)
        retry_policy = self._retry_policy(options.get("timeout"))
        response = await self._pool.call(lambda stub: stub.Classify, request, retry_policy, options.get("traceparent"))
        return Classifications.from_proto(response)

    async def score(
        self, queries: str | Sequence[str], documents: str | Sequence[str], **options: Unpack[ScoreOptions]
    ) -> Scores:
        """Scores how well documents match one query, or how well each one matches the query at its place."""
        request = score_request(queries, documents, options)
        retry_policy = self._retry_policy(options.get("timeout"))
        response = await self._pool.call(lambda stub: stub.Score, request, retry_policy, options.get("traceparent"))
        return Scores.from_proto(response)

    async def cancel(self, request_id: str, *, timeout: float | None = None) -> None:
        """Cancels a request, on whichever gateway it runs. Does nothing where it has ended, or never was."""
        request = pb.CancelRequest(request_id=request_id)
        await self._pool.call(lambda stub: stub.Cancel, request, self._retry_policy(timeout))

    async def tokenize(
        self, text: str | Messages, *, model: str | None = None, timeout: float | None = None
    ) -> Tokenized:
        """Token ids of a text, or of a chat by the model's template."""
        request = requests.tokenize_request(text, model)
        response = await self._pool.call(lambda stub: stub.Tokenize, request, self._retry_policy(timeout))
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
        request = requests.detokenize_request(token_ids, model, keep_special_tokens)
        return (await self._pool.call(lambda stub: stub.Detokenize, request, self._retry_policy(timeout))).text

    async def models(self, *, timeout: float | None = None) -> tuple[Model, ...]:
        """The served models."""
        request = pb.ListModelsRequest()
        response = await self._pool.call(lambda stub: stub.ListModels, request, self._retry_policy(timeout))
        return tuple(map(Model.from_proto, response.models))

    async def aclose(self) -> None:
        """Cancels all requests and closes the connections."""
        await self._pool.close()

    async def _generate(self, call: GenerationCall) -> Generation:
        request = pb.GenerateRequest(generation=call.generation)
        async with self._pool.cancel_on_exit(call.generated_id):
            response = await self._pool.call(lambda stub: stub.Generate, request, call.retry_policy, call.traceparent)
        return Generation.from_proto(response)

    def _open_stream(
        self, resumable: ResumableStream, generated_id: str | None, traceparent: str | None
    ) -> AsyncStream:
        return AsyncStream(self._pool, resumable, generated_id, traceparent)
