"""Routes of OpenAI's Responses API."""

import hashlib
import secrets
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace

import grpc

from gateway_svc.chats import ChatMessage, ChatPrompt
from gateway_svc.client_call import Call
from gateway_svc.common_fields import is_request_id
from gateway_svc.http_api.answer_sender import PING_SECONDS, Output, rendering_cost
from gateway_svc.http_api.calls import HttpCalls, PromptRequest
from gateway_svc.http_api.endpoint import GENERATION_HEADERS, HandlerDoc, HttpRoute
from gateway_svc.http_api.errors import HttpError
from gateway_svc.http_api.events import long_json
from gateway_svc.http_api.exchange import HttpExchange
from gateway_svc.http_api.json_body import invalid
from gateway_svc.http_api.openai.answer_models import ErrorAnswer
from gateway_svc.http_api.openai.errors import OPENAI_ERRORS
from gateway_svc.http_api.responses.answer_models import (
    DeletedResponse,
    InputTokens,
    ResponseAnswer,
    ResponseEvent,
    ResponseItems,
)
from gateway_svc.http_api.responses.conversation import Truncations
from gateway_svc.http_api.responses.events import ResponseEvents, error_event
from gateway_svc.http_api.responses.models import InputTokensBody, ResponsesBody
from gateway_svc.http_api.responses.output_items import Json
from gateway_svc.http_api.responses.records import ResponseRecords, rendered
from gateway_svc.http_api.responses.request import ResponseName, ResponseRequest
from gateway_svc.http_api.responses.stored_response import StoredResponse
from gateway_svc.request_group import RequestGroup
from gateway_svc.request_manager import RequestManager
from gateway_svc.tenant import Tenant
from gateway_svc.tracing import Operation
from gateway_svc.validated_request import ValidatedRequest
from gateway_svc.work_costs import RESPONSE_TOKEN, answer_cost
from quire.scheduler.v1 import scheduler_pb2
from svc_common.errors import QuireError, Reason

_MAX_NUMBER = 2**53
_DEFAULT_ITEMS = 20
_MAX_ITEMS = 100
_TIMER_SECONDS = 0.1  # by which a timer may be early

_RETRIEVAL: Mapping[str, tuple[Json, str]] = {
    "stream": ({"type": "boolean", "default": False}, "Whether the answer is a stream of events."),
    "starting_after": ({"type": "integer", "minimum": 0}, "The number of the event after which the stream begins."),
}
_LISTING: Mapping[str, tuple[Json, str]] = {
    "limit": (
        {"type": "integer", "minimum": 1, "maximum": _MAX_ITEMS, "default": _DEFAULT_ITEMS},
        "The most items of the page.",
    ),
    "order": ({"enum": ["asc", "desc"], "default": "desc"}, "Whether the oldest or the latest item is the first."),
    "after": ({"type": "string"}, "The id of the item before the page."),
    "before": ({"type": "string"}, "The id of the item after the page."),
}


class ResponsesRoutes:
    """Handlers. A response is a request whose name is the response's id, on any gateway."""

    def __init__(self, request_manager: RequestManager, calls: HttpCalls) -> None:
        self._request_manager = request_manager
        self._calls = calls
        self._records = ResponseRecords(request_manager, calls)

    def routes(self) -> list[HttpRoute]:
        one = "/v1/responses/{response_id}"
        created = HandlerDoc(ResponsesBody, ResponseAnswer, ResponseEvent, ErrorAnswer, headers=GENERATION_HEADERS)
        found = HandlerDoc(answer=ResponseAnswer, event=ResponseEvent, error=ErrorAnswer, query=_RETRIEVAL)
        cancelled = HandlerDoc(answer=ResponseAnswer, error=ErrorAnswer)
        deleted = HandlerDoc(answer=DeletedResponse, error=ErrorAnswer)
        listed = HandlerDoc(answer=ResponseItems, error=ErrorAnswer, query=_LISTING)
        counted = HandlerDoc(InputTokensBody, InputTokens, error=ErrorAnswer)
        return [
            HttpRoute("/v1/responses", {"POST": self.create}, OPENAI_ERRORS, {"POST": created}),
            # Before the routes with an id, of which it would be one.
            HttpRoute("/v1/responses/input_tokens", {"POST": self.input_tokens}, OPENAI_ERRORS, {"POST": counted}),
            HttpRoute(
                one,
                {"GET": self.retrieve, "DELETE": self.delete},
                OPENAI_ERRORS,
                {"GET": found, "DELETE": deleted},
            ),
            HttpRoute(f"{one}/cancel", {"POST": self.cancel}, OPENAI_ERRORS, {"POST": cancelled}),
            HttpRoute(f"{one}/input_items", {"GET": self.input_items}, OPENAI_ERRORS, {"GET": listed}),
        ]

    async def create(self, exchange: HttpExchange) -> None:
        """Makes a response: whole, as a stream of events, or in the background."""
        call = replace(self._calls.call(exchange, Operation.CHAT), chunk_per_token=True)
        stored, valid, is_streamed = await self._read(exchange, call)
        is_background = stored.is_background
        async with self._calls.run(exchange, call, [valid]) as group:
            record = None
            if any(one.was_joined for one in group.requests):  # its idempotency key is of an earlier call
                record, stored = await self._records.find(call.tenant, stored.id)
            events = ResponseEvents(stored, group.vocabulary)
            if is_streamed:
                await self._stream(exchange, call, group, events)
            elif is_background:
                if record is None:
                    await exchange.respond_json(events.response)
                else:
                    await self._respond(exchange, call.tenant, record, stored)
            else:
                chunks = await group.all()

                def whole() -> Json:
                    for _, chunk in chunks:
                        events.add(chunk, group.usage)
                    return events.response

                await self._calls.answers.respond(exchange, call, whole, RESPONSE_TOKEN * len(chunks))

    async def retrieve(self, exchange: HttpExchange) -> None:
        """A response as it is now, or with stream=true its events after number starting_after."""
        tenant, response_id = self._calls.tenant(exchange), exchange.path_params["response_id"]
        is_streamed, after = _flag(exchange, "stream"), _number(exchange, "starting_after")
        if after is not None and not is_streamed:
            raise invalid("starting_after", "needs stream to be true")
        record, stored = await self._records.find(tenant, response_id)
        exchange.model = record.attached.render_options.model
        if not is_streamed:
            await self._respond(exchange, tenant, record, stored)
            return
        if not record.HasField("ended_at"):
            call = Call(tenant, Operation.CHAT, chunk_per_token=True)
            with self._request_manager.resume(call, response_id, {}) as group:
                async with exchange.watch_disconnect(group.client_disconnected):
                    if await _is_attached(group):
                        await self._stream(exchange, call, group, ResponseEvents(stored, group.vocabulary), after)
                        return
            record, stored = await self._records.find(tenant, response_id)  # it has ended without all its tokens
        parts = self._records.parts(record, stored, after)
        part = await self._records.work(tenant, record, lambda: next(parts, b""))
        await exchange.start_events()
        while part:
            await exchange.send_events(part)
            part = await self._records.work(tenant, record, lambda: next(parts, b""))
        await exchange.end_events()

    async def cancel(self, exchange: HttpExchange) -> None:
        """Cancels a response that has not ended; answers with it as it is then."""
        tenant, response_id = self._calls.tenant(exchange, cancels=True), exchange.path_params["response_id"]
        record, stored = await self._records.find(tenant, response_id)
        has_ended = record.HasField("ended_at")
        if has_ended and not stored.is_background:
            raise invalid("response_id", "Cannot cancel a synchronous response.")
        if not has_ended:
            self._request_manager.cancel(tenant, response_id)
            record, stored = await self._records.find(tenant, response_id)
        await self._respond(exchange, tenant, record, stored)

    async def delete(self, exchange: HttpExchange) -> None:
        """Removes a response; one that has not ended is cancelled."""
        tenant, response_id = self._calls.tenant(exchange, cancels=True), exchange.path_params["response_id"]
        await self._records.find(tenant, response_id)
        await self._request_manager.delete(tenant, response_id)
        await exchange.respond_json({"id": response_id, "object": "response", "deleted": True})

    async def input_items(self, exchange: HttpExchange) -> None:
        """A page of the items that a response answers, with those of earlier responses."""
        tenant, response_id = self._calls.tenant(exchange), exchange.path_params["response_id"]
        order = exchange.query.get("order", "desc")
        if order not in ("asc", "desc"):
            raise invalid("order", "must be asc or desc")
        limit = _number(exchange, "limit", 1, _MAX_ITEMS) or _DEFAULT_ITEMS
        record, stored = await self._records.find(tenant, response_id)
        items = [*stored.history, *stored.input]
        if order == "desc":
            items.reverse()
        ids = [item["id"] for item in items]
        for name in ("after", "before"):
            if (place := exchange.query.get(name)) is not None:
                if place not in ids:
                    raise invalid(name, "is the id of no item")
                at = ids.index(place)
                items, ids = (items[at + 1 :], ids[at + 1 :]) if name == "after" else (items[:at], ids[:at])
        page = items[:limit]
        first_id, last_id = (page[0]["id"], page[-1]["id"]) if page else (None, None)
        ends = {"first_id": first_id, "last_id": last_id, "has_more": len(items) > limit}
        answer = {"object": "list", "data": page, **ends}
        body = await self._records.work(tenant, record, lambda: long_json(answer))
        await exchange.respond(body, "application/json")

    async def input_tokens(self, exchange: HttpExchange) -> None:
        """The number of tokens of a response's prompt; nothing is generated."""
        call = self._calls.call(exchange, Operation.CHAT)
        body, name = await self._calls.read(exchange, call, InputTokensBody, _read_counted, may_have_name=False)
        history = await self._records.history(call.tenant, body.previous_response_id)

        def converted() -> PromptRequest:
            request = ResponseRequest.counted(body, name, history.items)
            return request.prompt(request.messages)

        num_items = len(history.items) + _num_items(body)
        prompt = await self._calls.convert(
            exchange, call, converted, num_items=num_items, num_stored_bytes=history.num_bytes
        )
        if body.truncation == "auto":
            token_ids = (await self._validate(exchange, call, prompt, body.truncation)).prompt_token_ids
        else:
            chat, field_path = prompt.unvalidated.prompt, prompt.field_path
            assert isinstance(chat, ChatPrompt)
            found = self._calls.find_model(exchange, call, body.model, field_path)
            token_ids = await self._calls.encode(call, found, chat, field_path)
        await exchange.respond_json({"object": "response.input_tokens", "input_tokens": len(token_ids)})

    async def _read(self, exchange: HttpExchange, call: Call) -> tuple[StoredResponse, ValidatedRequest, bool]:
        """What a response to the body is made of, and whether it is a stream. The items of the conversation are in the
        valid request alone: what this returns is kept while the response is made. Raises QuireError."""
        body, name = await self._calls.read(exchange, call, ResponsesBody, _read_body)
        exchange.request_id = name.id
        history = await self._records.history(call.tenant, body.previous_response_id)
        num_items = len(history.items) + _num_items(body)

        def converted() -> tuple[ResponseRequest, PromptRequest]:
            request = ResponseRequest.of(body, name, history.items)
            return request, request.prompt(request.messages)

        request, prompt = await self._calls.convert(
            exchange, call, converted, num_items=num_items, num_stored_bytes=history.num_bytes
        )
        validated = await self._validate(exchange, call, prompt, body.truncation)

        def attached() -> tuple[StoredResponse, ValidatedRequest]:
            stored = request.stored(validated, int(time.time()))
            return stored, request.attached(validated, stored)

        stored, valid = await self._calls.convert(
            exchange, call, attached, num_items=num_items, num_stored_bytes=history.num_bytes
        )
        return replace(stored, history=[], input=[]), valid, bool(body.stream)

    async def _validate(
        self, exchange: HttpExchange, call: Call, prompt: PromptRequest, truncation: str | None
    ) -> ValidatedRequest:
        """The valid request. If that is asked for, it has as many of the latest messages as the context holds. Raises
        QuireError."""
        chat = prompt.unvalidated.prompt
        assert isinstance(chat, ChatPrompt)

        async def valid(messages: Sequence[ChatMessage]) -> ValidatedRequest:
            unvalidated = replace(prompt.unvalidated, prompt=replace(chat, messages=messages))
            [one] = await self._calls.validate(exchange, call, [replace(prompt, unvalidated=unvalidated)])
            return one

        try:
            return await valid(chat.messages)
        except QuireError as error:
            if error.reason is not Reason.CONTEXT_LENGTH_EXCEEDED or truncation != "auto":
                raise
        choices = Truncations.of(chat.messages)
        least, most = 0, len(choices) - 1
        while least < most:  # the first one that fits
            middle = (least + most) // 2
            try:
                await valid(choices.chat(middle))
                most = middle
            except QuireError as error:
                if error.reason is not Reason.CONTEXT_LENGTH_EXCEEDED:
                    raise
                least = middle + 1
        return await valid(choices.chat(least))

    async def _stream(
        self, exchange: HttpExchange, call: Call, group: RequestGroup, events: ResponseEvents, after: int | None = None
    ) -> None:
        """Streams the events of a request, from the one after number `after` on."""

        def render(output: Output) -> bytes:
            return rendered([event for _, chunk in output for event in events.add(chunk, group.usage)], after)

        def cost(output: Output) -> float:
            # The last events repeat the whole output.
            of_end = answer_cost(group.num_logprobs) if any(chunk.finish for _, chunk in output) else 0
            return rendering_cost(output, RESPONSE_TOKEN) + of_end

        exchange.is_durable = group.is_durable
        await exchange.start_events()
        async with exchange.keep_alive(PING_SECONDS):
            if begun := rendered(events.begin(), after):
                await exchange.send_events(begun)
            try:
                await self._calls.answers.send_output(exchange, call, group, render, cost)
                failure, last = None, b""
            except QuireError as error:
                failure = HttpError.of(error)
                if error.code is grpc.StatusCode.UNAVAILABLE or _is_own_deadline(call, group, error):  # it may go on
                    last = error_event(error, max(events.last_number, after or 0))
                else:
                    last = rendered(events.fail(error, group.usage), after)
        await (exchange.end_events() if failure is None else exchange.fail_events(failure, last))

    async def _respond(
        self, exchange: HttpExchange, tenant: Tenant, record: scheduler_pb2.Record, stored: StoredResponse
    ) -> None:
        """Answers with a response as it is now."""
        body = await self._records.work(tenant, record, lambda: long_json(self._records.response(record, stored)))
        await exchange.respond(body, "application/json")


def _read_body(body: ResponsesBody, name: str | None) -> tuple[ResponsesBody, ResponseName]:
    """The body, and the name of its response: that of the first call with the same idempotency key."""
    if name is None:
        return body, _new_name()
    if not is_request_id(name):
        raise invalid("Idempotency-Key", "must be 1 to 128 letters, digits, '.', '_', ':' or '-'")
    if body.store is False:
        raise invalid("Idempotency-Key", "needs store to be true")
    return body, ResponseName(f"resp_{hashlib.sha256(name.encode()).hexdigest()[:48]}", is_repeatable=True)


def _num_items(body: ResponsesBody) -> int:
    return len(body.input) if isinstance(body.input, list) else 1


def _read_counted(body: InputTokensBody, _: str | None) -> tuple[InputTokensBody, ResponseName]:
    return body, _new_name()


def _new_name() -> ResponseName:
    return ResponseName(f"resp_{secrets.token_hex(24)}")


async def _is_attached(group: RequestGroup) -> bool:
    """Waits until a request that exists is attached. False: it has ended without all its tokens, or was removed."""
    try:
        await group.accepted()
    except QuireError as error:
        if error.code is grpc.StatusCode.UNAVAILABLE:
            raise
        return False
    return True


def _is_own_deadline(call: Call, group: RequestGroup, error: QuireError) -> bool:
    """Whether the deadline of a call has passed that joined a response of an earlier one, and not the response's."""
    return (
        error.reason is Reason.DEADLINE_EXCEEDED
        and any(one.was_joined for one in group.requests)
        and call.deadline is not None
        and call.deadline - time.monotonic() < _TIMER_SECONDS
    )


def _flag(exchange: HttpExchange, name: str) -> bool:
    value = exchange.query.get(name, "false")
    if value not in ("true", "false"):
        raise invalid(name, "must be true or false")
    return value == "true"


def _number(exchange: HttpExchange, name: str, least: int = 0, most: int = _MAX_NUMBER) -> int | None:
    text = exchange.query.get(name)
    if text is None:
        return None
    if not (text.isascii() and text.isdigit() and len(text) < 17) or not least <= int(text) <= most:
        raise invalid(name, f"must be an integer from {least} to {most}")
    return int(text)
