"""`AsyncLLM`: a model in this process, for single requests of asyncio programs, each with a stream of outputs."""

import asyncio
import uuid
from collections.abc import AsyncGenerator, Iterable
from contextlib import suppress
from typing import Any, Self

from quire_offline.engine_thread import EngineThread
from quire_offline.errors import client_errors
from quire_offline.offline_request import OfflineRequest, Prompt
from quire_offline.outputs import RequestOutput
from quire_offline.sampling_params import SamplingParams


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

    async def generate(
        self,
        prompt: Prompt,
        sampling_params: SamplingParams | None = None,
        request_id: str | None = None,
        *,
        priority: int | None = None,
    ) -> AsyncGenerator[RequestOutput, None]:
        """Continues a prompt. Each output has all text and tokens so far; the last one is `finished`.

        If the reader is slow, outputs between are left out. A generator that is closed or cancelled cancels its
        request. `request_id` names the request for `abort`. Raises QuireError.
        """
        engine = self._thread.engine
        with client_errors():
            request = OfflineRequest.of_prompt(
                request_id or uuid.uuid4().hex, prompt, sampling_params or SamplingParams(), priority
            )
        loop, has_more = asyncio.get_running_loop(), asyncio.Event()

        def wake() -> None:
            with suppress(RuntimeError):  # the reader's loop is closed
                loop.call_soon_threadsafe(has_more.set)

        future, cancel = self._thread.start(engine.run(request, lambda _: wake()))
        future.add_done_callback(lambda _: wake())
        try:
            while not future.done():
                await has_more.wait()
                has_more.clear()
                if request.chunks and not request.is_ranked and not future.done():
                    yield request.output(finished=False)
            with client_errors():
                future.result()
            yield request.output(finished=True)
        finally:
            if not future.done():
                cancel()

    async def abort(self, request_id: str | Iterable[str]) -> None:
        """Ends requests, if they run: their last outputs are what they have so far, with finish_reason "abort"."""
        ids = [request_id] if isinstance(request_id, str) else list(request_id)
        engine = self._thread.engine

        async def abort_all() -> None:
            for one in ids:
                engine.abort(one)

        future, _ = self._thread.start(abort_all())
        await asyncio.wrap_future(future)

    async def close(self) -> None:
        """Ends the engine and its threads, and frees the model. Requests that run raise QuireError CANCELLED."""
        await asyncio.to_thread(self._thread.close)

    def shutdown(self) -> None:
        """As `close`, and blocks."""
        self._thread.close()
