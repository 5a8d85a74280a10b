"""Routes of Anthropic's API: messages, and their numbers of tokens."""

import re

from gateway_svc.chats import ChatPrompt
from gateway_svc.client_call import Call
from gateway_svc.http_api.anthropic.answer_models import AnthropicError, MessageAnswer, MessageEvent, TokenCount
from gateway_svc.http_api.anthropic.answers import MessageBuilder
from gateway_svc.http_api.anthropic.errors import ANTHROPIC_ERRORS
from gateway_svc.http_api.anthropic.models import MessagesBody
from gateway_svc.http_api.anthropic.requests import read_count, read_messages
from gateway_svc.http_api.calls import HttpCalls
from gateway_svc.http_api.endpoint import GENERATION_HEADERS, HandlerDoc, HttpRoute
from gateway_svc.http_api.exchange import HttpExchange
from gateway_svc.http_api.json_body import invalid
from gateway_svc.tracing import Operation

_FIRST_VERSION = "2023-06-01"
_VERSION = re.compile(r"\d{4}-\d{2}-\d{2}", re.ASCII)


class AnthropicRoutes:
    """Handlers; answers and errors are in the formats of the protocol."""

    def __init__(self, calls: HttpCalls) -> None:
        self._calls = calls

    def routes(self) -> list[HttpRoute]:
        message = HandlerDoc(MessagesBody, MessageAnswer, MessageEvent, AnthropicError, headers=GENERATION_HEADERS)
        count = HandlerDoc(MessagesBody, TokenCount, error=AnthropicError)
        return [
            HttpRoute("/v1/messages", {"POST": self.messages}, ANTHROPIC_ERRORS, {"POST": message}),
            HttpRoute("/v1/messages/count_tokens", {"POST": self.count_tokens}, ANTHROPIC_ERRORS, {"POST": count}),
        ]

    async def messages(self, exchange: HttpExchange) -> None:
        """Answers a chat."""
        call = self._call(exchange)
        read = await self._calls.read(exchange, call, MessagesBody, read_messages)
        requests = await self._calls.validate(exchange, call, [read.prompt])
        async with self._calls.run(exchange, call, requests) as group:
            answer = MessageBuilder(group.renderings[0], lambda: group.usage)
            if read.is_streamed:
                await self._calls.answers.stream_events(exchange, call, group, answer.event, answer.last_events)
            else:
                chunks = await group.all()
                await self._calls.answers.respond_with_output(
                    exchange, call, lambda: answer.whole(chunks), num_chunks=len(chunks)
                )

    async def count_tokens(self, exchange: HttpExchange) -> None:
        """The number of tokens of a chat's prompt."""
        call = self._call(exchange)
        request = await self._calls.read(exchange, call, MessagesBody, read_count)
        unvalidated, field_path = request.unvalidated, request.field_path
        found = self._calls.find_model(exchange, call, unvalidated.model, field_path)
        assert isinstance(unvalidated.prompt, ChatPrompt)
        token_ids = await self._calls.encode(call, found, unvalidated.prompt, field_path)
        await exchange.respond_json({"input_tokens": len(token_ids)})

    def _call(self, exchange: HttpExchange) -> Call:
        exchange.id_headers = (*exchange.id_headers, "request-id")
        call = self._calls.call(exchange, Operation.CHAT)
        version = exchange.header("anthropic-version")
        # Later versions of the API kept the form of these answers.
        if version is not None and not (_VERSION.fullmatch(version) and version >= _FIRST_VERSION):
            raise invalid("anthropic-version", f"must be a date, {_FIRST_VERSION} or later")
        return call
