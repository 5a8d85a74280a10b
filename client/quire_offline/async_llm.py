"""`AsyncLLM`: a model in this process, for single requests of asyncio programs, each with a stream of outputs."""

import asyncio
import uuid
from collections.abc import AsyncGenerator, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from typing import Any, Self

from quire_offline.calls import (
    chat_options,
    default_params,
    read_chats,
    read_classifications,
    read_embeddings,
    read_prompts,
    read_scores,
    refuse_adapter,
)
from quire_offline.deltas import Deltas
from quire_offline.engine import R
from quire_offline.engine_thread import EngineThread
from quire_offline.errors import client_errors
from quire_offline.offline_request import Messages, OfflineRequest, Prompt
from quire_offline.offline_values import Texts
from quire_offline.outputs import (
    ClassificationRequestOutput,
    EmbeddingRequestOutput,
    RequestOutput,
    ScoringRequestOutput,
)
from quire_offline.pooling_params import PoolingParams
from quire_offline.sampling_params import RequestOutputKind, SamplingParams


class AsyncLLM:
    """A model that this process computes. The arguments and errors are those of LLM; the constructor blocks while it
    loads.

    Steps are computed on threads of their own, so that the caller's event loop is not blocked.
    """

    def __init__(self, model: str | None = None, **options: Any) -> None:
        self._thread = EngineThread({"model": model, **options})

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    @property
    def model(self) -> str:
        """The name of the model."""
        return self._thread.engine.description.model

    @property
    def labels(self) -> tuple[str, ...]:
        """As `LLM.labels`."""
        return self._thread.engine.labels

    async def get_tokenizer(self) -> Any:
        """As `LLM.get_tokenizer`."""
        return await asyncio.to_thread(self._thread.engine.load_tokenizer)

    def get_default_sampling_params(self) -> SamplingParams:
        """As `LLM.get_default_sampling_params`."""
        return default_params(self._thread.engine.generation_defaults)

    def generate(
        self,
        prompt: Prompt,
        sampling_params: SamplingParams | None = None,
        request_id: str | None = None,
        *,
        priority: int | None = None,
        lora_request: None = None,
    ) -> AsyncGenerator[RequestOutput, None]:
        """Continues a prompt. Each output has all text and tokens so far, or what `output_kind` says; the last one is
        `finished`.

        If the reader is slow, outputs between are left out. A generator that is closed or cancelled cancels its
        request. `request_id` names the request for `abort`. Raises QuireError.
        """
        refuse_adapter(lora_request)
        (request,) = read_prompts(_ids(request_id), [prompt], sampling_params, priority)
        return self._stream(request)

    def chat(
        self,
        messages: Messages,
        sampling_params: SamplingParams | None = None,
        request_id: str | None = None,
        *,
        priority: int | None = None,
        tools: Sequence[Mapping[str, Any]] | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        lora_request: None = None,
        **options: Any,
    ) -> AsyncGenerator[RequestOutput, None]:
        """Answers a chat. The arguments are those of `LLM.chat`, for one chat; otherwise as `generate`."""
        refuse_adapter(lora_request)
        fields = chat_options(tools, chat_template_kwargs, options)
        (request,) = read_chats(_ids(request_id), [messages], sampling_params, fields, priority)
        return self._stream(request)

    async def embed(
        self,
        prompts: Prompt | Sequence[Prompt],
        *,
        pooling_params: PoolingParams | Sequence[PoolingParams] | None = None,
        request_id: str | None = None,
        priority: int | Sequence[int] | None = None,
    ) -> list[EmbeddingRequestOutput]:
        """The vector of each prompt, as `LLM.embed`. A call that is cancelled cancels its prompts.

        `request_id` names the call for `abort`, after which it raises QuireError CANCELLED.
        """
        requests = read_embeddings(_ids(), prompts, pooling_params, priority)
        await self._run_call(request_id, requests)
        return [request.output() for request in requests]

    async def classify(
        self,
        prompts: Prompt | Sequence[Prompt],
        *,
        pooling_params: PoolingParams | Sequence[PoolingParams] | None = None,
        request_id: str | None = None,
        priority: int | Sequence[int] | None = None,
    ) -> list[ClassificationRequestOutput]:
        """A number for each label of each prompt, as `LLM.classify`. A call that is cancelled cancels its prompts.

        `request_id`: as in `embed`.
        """
        requests = read_classifications(_ids(), prompts, pooling_params, priority)
        await self._run_call(request_id, requests)
        return [request.output() for request in requests]

    async def score(
        self,
        text_1: Texts,
        text_2: Texts,
        *,
        pooling_params: PoolingParams | None = None,
        request_id: str | None = None,
        priority: int | None = None,
        instruction: str | None = None,
    ) -> list[ScoringRequestOutput]:
        """The score of each pair, as `LLM.score`. A call that is cancelled cancels its pairs.

        `request_id`: as in `embed`.
        """
        requests = read_scores(_ids(), text_1, text_2, pooling_params, priority, instruction)
        await self._run_call(request_id, requests)
        # Many cosines take long.
        return await asyncio.to_thread(lambda: [output for request in requests for output in request.outputs()])

    async def abort(self, request_id: str | Iterable[str]) -> None:
        """Ends requests, if they run: their last outputs are what they have so far, with finish_reason "abort".

        Calls of `embed`, `classify` and `score` have none: they raise QuireError CANCELLED.
        """
        ids = [request_id] if isinstance(request_id, str) else list(request_id)
        engine = self._thread.engine

        async def abort_all() -> None:
            for one in ids:
                engine.abort(one)

        await self._thread.wait_for(abort_all())

    async def close(self) -> None:
        """Ends the engine and its threads, and frees the model. Requests that run raise QuireError CANCELLED."""
        await asyncio.to_thread(self._thread.close)

    def shutdown(self) -> None:
        """As `close`, and blocks."""
        self._thread.close()

    async def _stream(self, request: OfflineRequest) -> AsyncGenerator[RequestOutput, None]:
        """Runs a request. Its outputs; the generator's end cancels it."""
        engine = self._thread.engine
        loop, has_more = asyncio.get_running_loop(), asyncio.Event()

        def wake() -> None:
            with suppress(RuntimeError):  # the reader's loop is closed
                loop.call_soon_threadsafe(has_more.set)

        make = Deltas(request).next if request.output_kind is RequestOutputKind.DELTA else request.output
        has_parts = request.output_kind is not RequestOutputKind.FINAL_ONLY
        future, cancel = self._thread.start(engine.run(request, lambda _: wake()))
        future.add_done_callback(lambda _: wake())
        try:
            while not future.done():
                await has_more.wait()
                has_more.clear()
                is_due = has_parts and request.chunks and not request.is_ranked and not future.done()
                if is_due and (output := make(finished=False)).outputs:
                    yield output
            with client_errors():
                future.result()
            yield make(finished=True)
        finally:
            if not future.done():
                cancel()

    async def _run_call(self, request_id: str | None, requests: Sequence[R]) -> None:
        engine = self._thread.engine
        with client_errors():
            await self._thread.wait_for(engine.run_call(next(_ids(request_id)), requests))


def _ids(first: str | None = None) -> Iterator[str]:
    """Ids of a call's requests: the given one, then new ones. Raises TypeError for one that is no text."""
    if first is not None:
        if not isinstance(first, str):
            raise TypeError(f"request_id: must be a text, not {type(first).__name__}")
        yield first
    while True:
        yield uuid.uuid4().hex
