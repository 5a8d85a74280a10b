"""Sends the answers of HTTP calls, as JSON or as events of a stream; what takes long to render is made in threads."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from gateway_svc.client_call import Call
from gateway_svc.http_api.events import long_json, to_json
from gateway_svc.http_api.exchange import HttpExchange
from gateway_svc.output import Chunk
from gateway_svc.request_group import RequestGroup
from gateway_svc.tenant_threads import TenantThreads
from gateway_svc.work_costs import EVENT, LOGPROB, LONG, answer_cost, values_cost

Output = Sequence[tuple[int, Chunk]]
"""Chunks, each with its prompt index."""

PING_SECONDS = 15.0
"""A stream that sends nothing for so long sends a comment."""
_CHUNKS_AT_ONCE = 256  # are rendered in a few milliseconds; a step of a call may have tens of thousands


def rendering_cost(output: Output, event: float = EVENT) -> float:
    """Of the events of chunks, in microseconds; `event` is that of one without log-probabilities."""
    return event * len(output) + LOGPROB * sum([chunk.num_logprobs for _, chunk in output])


class AnswerSender:
    """`threads` are shared by tenants."""

    def __init__(self, threads: TenantThreads) -> None:
        self._threads = threads

    async def stream_events(
        self,
        exchange: HttpExchange,
        call: Call,
        group: RequestGroup,
        event: Callable[[int, Chunk], bytes],
        last_events: Callable[[], bytes],
        *,
        num_prompt_logprobs: int = 0,
        num_prompt_tokens: int = 0,
    ) -> None:
        """Streams the answer. `event` renders a chunk of a prompt by its index, `last_events` is called at the end. So
        many log-probabilities and tokens of prompts may be part of any event."""
        of_prompts = answer_cost(num_prompt_logprobs, num_prompt_tokens=num_prompt_tokens)

        def render(output: Output) -> bytes:
            return b"".join([event(prompt_index, chunk) for prompt_index, chunk in output])

        await exchange.start_events()
        async with exchange.keep_alive(PING_SECONDS):
            await self.send_output(exchange, call, group, render, lambda output: of_prompts + rendering_cost(output))
        await exchange.end_events(last_events())

    async def send_output(
        self,
        exchange: HttpExchange,
        call: Call,
        group: RequestGroup,
        render: Callable[[Output], bytes],
        cost: Callable[[Output], float],
    ) -> None:
        """Sends the output of a stream as it comes, all of a step at once if it is not much. To render a part takes
        `cost` microseconds; it is done in a thread if that is long. Raises as `group.next` does."""
        while output := await group.next():
            # There is much of a call with many choices, and for a client that reads slowly.
            for first in range(0, len(output), _CHUNKS_AT_ONCE):
                part = output[first : first + _CHUNKS_AT_ONCE]
                if data := await self._threads.run_if_long(call.tenant.name, cost(part), partial(render, part)):
                    await exchange.send_events(data)

    async def respond_with_output(
        self,
        exchange: HttpExchange,
        call: Call,
        make_body: Callable[[], Any],
        *,
        num_chunks: int,
        num_logprobs: int = 0,
        num_prompt_tokens: int = 0,
    ) -> None:
        """Answers with JSON of so many chunks, log-probabilities and tokens of prompts; made in a thread if these are
        many."""
        await self.respond(exchange, call, make_body, answer_cost(num_logprobs, num_chunks, num_prompt_tokens))

    async def respond_with_values(
        self,
        exchange: HttpExchange,
        call: Call,
        make_body: Callable[[], Any],
        *,
        num_values: int,
        num_characters: int = 0,
    ) -> None:
        """Answers with JSON of so many values, and so many characters of the request; made in a thread if these are
        many."""
        await self.respond(exchange, call, make_body, values_cost(num_values, num_characters))

    async def respond(self, exchange: HttpExchange, call: Call, make_body: Callable[[], Any], cost: float) -> None:
        """Answers with JSON that is made in about `cost` microseconds; in a thread if that is long."""
        if cost <= LONG:
            data = to_json(make_body())
        else:
            data = await self._threads.run(call.tenant.name, lambda: long_json(make_body()))
        await exchange.respond(data, "application/json")
