"""Routes of OpenAI's API: models, completions and chat completions."""

import hashlib
import time
from dataclasses import replace
from datetime import UTC, datetime
from functools import cache

from gateway_svc.client_call import Call
from gateway_svc.field_paths import contract_field_path
from gateway_svc.http_api.calls import HttpCalls
from gateway_svc.http_api.endpoint import GENERATION_HEADERS, RESUMABLE_HEADERS, HandlerDoc, HttpRoute
from gateway_svc.http_api.exchange import HttpExchange
from gateway_svc.http_api.openai.answer_models import (
    ChatAnswer,
    ChatEvent,
    CompletionAnswer,
    CompletionEvent,
    ErrorAnswer,
    ModelCard,
    ModelCards,
)
from gateway_svc.http_api.openai.answer_options import AnswerOptions
from gateway_svc.http_api.openai.answers import ResponseBuilder
from gateway_svc.http_api.openai.bodies import (
    Delivery,
    ReadBody,
    read_chat_batch,
    read_chat_completion,
    read_completion,
)
from gateway_svc.http_api.openai.chat_models import ChatBatchBody, ChatBody
from gateway_svc.http_api.openai.choice_formats import ChatFormat, CompletionFormat, Format, Json
from gateway_svc.http_api.openai.cursor import LAST_EVENT_ID, MAX_CHOICES, Cursor
from gateway_svc.http_api.openai.errors import OPENAI_ERRORS
from gateway_svc.http_api.openai.generation_body import CompletionBody
from gateway_svc.http_api.service_routes import software_version
from gateway_svc.request_manager import RequestManager
from gateway_svc.tracing import Operation
from gateway_svc.validated_request import ModelInfo
from svc_common.errors import QuireError, Reason


class OpenAiRoutes:
    """Handlers; answers and errors are in the formats of the protocol."""

    def __init__(
        self,
        request_manager: RequestManager,
        calls: HttpCalls,
        *,
        always_has_usage: bool = False,
        names_tokens_by_id: bool = False,
    ) -> None:
        """With `always_has_usage` every event of a stream has the usage so far, and its last one the whole usage.
        `names_tokens_by_id` is the option of answers whose request leaves it open."""
        self._always_has_usage = always_has_usage
        self._names_tokens_by_id = names_tokens_by_id
        self._request_manager = request_manager
        self._calls = calls
        self._started_at = int(time.time())

    def routes(self) -> list[HttpRoute]:
        chat = HandlerDoc(ChatBody, ChatAnswer, ChatEvent, ErrorAnswer, headers=RESUMABLE_HEADERS)
        completion = HandlerDoc(
            CompletionBody, CompletionAnswer, CompletionEvent, ErrorAnswer, headers=RESUMABLE_HEADERS
        )
        batch = HandlerDoc(ChatBatchBody, ChatAnswer, error=ErrorAnswer, headers=GENERATION_HEADERS)
        cards, card = (HandlerDoc(answer=answer, error=ErrorAnswer) for answer in (ModelCards, ModelCard))
        return [
            HttpRoute("/v1/models", {"GET": self.models}, OPENAI_ERRORS, {"GET": cards}),
            HttpRoute("/v1/models/{model:path}", {"GET": self.get_model}, OPENAI_ERRORS, {"GET": card}),
            HttpRoute("/v1/completions", {"POST": self.completions}, OPENAI_ERRORS, {"POST": completion}),
            HttpRoute("/v1/chat/completions", {"POST": self.chat_completions}, OPENAI_ERRORS, {"POST": chat}),
            HttpRoute("/v1/chat/completions/batch", {"POST": self.chat_batch}, OPENAI_ERRORS, {"POST": batch}),
        ]

    async def models(self, exchange: HttpExchange) -> None:
        """The models that are ready, once for each of their names."""
        ready = self._request_manager.ready_models(self._calls.tenant(exchange))
        cards = [self._model_json(name, info) for model, info in ready for name in model.names]
        ids = [card["id"] for card in cards]
        page = {"has_more": False, "first_id": ids[0] if ids else None, "last_id": ids[-1] if ids else None}
        await exchange.respond_json({"object": "list", "data": cards, **page})

    async def get_model(self, exchange: HttpExchange) -> None:
        """One model that is ready."""
        tenant = self._calls.tenant(exchange)
        name = exchange.path_params["model"]
        model = self._request_manager.catalog.find(name, contract_field_path, tenant)
        await exchange.respond_json(self._model_json(name, self._request_manager.model_info(model)))

    async def completions(self, exchange: HttpExchange) -> None:
        """Continues prompts."""
        call = self._calls.call(exchange, Operation.TEXT_COMPLETION)
        body = await self._calls.read(exchange, call, CompletionBody, read_completion)
        await self._generate(exchange, call, body, CompletionFormat())

    async def chat_completions(self, exchange: HttpExchange) -> None:
        """Answers a chat."""
        call = self._calls.call(exchange, Operation.CHAT)
        body = await self._calls.read(exchange, call, ChatBody, read_chat_completion)
        form = ChatFormat(body.calls, body.echoed)
        await self._generate(exchange, call, body, form, has_message=bool(body.echoed))

    async def chat_batch(self, exchange: HttpExchange) -> None:
        """Answers several chats, whose choices come chat by chat, as in vLLM."""
        call = self._calls.call(exchange, Operation.CHAT)
        body = await self._calls.read(exchange, call, ChatBatchBody, read_chat_batch)
        await self._generate(exchange, call, body, ChatFormat(body.calls))

    async def _generate(
        self, exchange: HttpExchange, call: Call, body: ReadBody, form: Format, *, has_message: bool = False
    ) -> None:
        """Answers a body. With `has_message` choices begin with the last message of their prompt."""
        requests = await self._calls.validate(exchange, call, body.prompts)
        n = requests[0].n
        cursor = _cursor(exchange, body.delivery, len(requests) * n)
        resume_positions = cursor.resume_positions(n) if cursor else ()
        async with self._calls.run(exchange, call, requests, resume_positions) as group:
            answer = ResponseBuilder(
                form,
                group.renderings,
                group.vocabulary,
                int(time.time()),
                cursor,
                lambda prompt_index: group.requests[prompt_index].prompt_of(body.prompts[prompt_index].whole_text),
                self._options(body.options),
                [request.prompt_token_ids for request in requests],
                self._fingerprint(requests[0].model),
            )
            num_prompt_tokens = 0  # of all choices, as text or as ids
            for request, rendering in zip(requests, group.renderings, strict=True):
                num_copies = bool(rendering.prompt_token_ids) + body.options.has_token_ids + has_message
                num_prompt_tokens += num_copies * n * len(request.prompt_token_ids)
            if body.delivery is Delivery.WHOLE:
                chunks = await group.all()
                await self._calls.answers.respond_with_output(
                    exchange,
                    call,
                    lambda: answer.whole(chunks, group.usage),
                    num_chunks=len(chunks),
                    num_logprobs=group.num_logprobs,
                    num_prompt_tokens=num_prompt_tokens,
                )
            else:
                has_usage = self._always_has_usage or body.delivery is Delivery.STREAM_WITH_USAGE
                await self._calls.answers.stream_events(
                    exchange,
                    call,
                    group,
                    answer.event,
                    lambda: answer.last_events(group.usage if has_usage else None),
                    num_prompt_logprobs=sum(one.num_logprobs(0) for one in group.renderings),
                    num_prompt_tokens=num_prompt_tokens,
                )

    def _options(self, asked: AnswerOptions) -> AnswerOptions:
        """The options of a request, with the operator's."""
        by_id = asked.names_tokens_by_id
        return replace(
            asked,
            has_running_usage=asked.has_running_usage or self._always_has_usage,
            names_tokens_by_id=self._names_tokens_by_id if by_id is None else by_id,
        )

    def _fingerprint(self, name: str) -> str:
        """Names what may change the answer to a request with a seed: the release, and the model's tokenizer."""
        model = self._request_manager.catalog.get(name)
        tokenizer = b"" if model is None else model.tokenizer_fingerprint
        return _fingerprint(name, tokenizer)

    def _model_json(self, name: str, info: ModelInfo) -> Json:
        return {
            "id": name,
            "object": "model",
            "created": self._started_at,
            "owned_by": "quire",
            # As in vLLM.
            "root": info.name,
            "max_model_len": info.context_length,
            # As in Anthropic's API, which has the same paths.
            "type": "model",
            "display_name": name,
            "created_at": datetime.fromtimestamp(self._started_at, UTC).strftime("%Y-%m-%dT%H:%M:%SZ"),
        }


@cache
def _fingerprint(name: str, tokenizer: bytes) -> str:
    digest = hashlib.sha256(b"\0".join((software_version().encode(), name.encode(), tokenizer)))
    return f"fp_{digest.hexdigest()[:12]}"


def _cursor(exchange: HttpExchange, delivery: Delivery, num_choices: int) -> Cursor | None:
    """Where a stream begins that can be resumed: one whose client named it, of not too many choices."""
    last_event_id = exchange.header(LAST_EVENT_ID)
    is_lasting = delivery is not Delivery.WHOLE and "idempotency-key" in exchange.headers
    if last_event_id is None:
        return Cursor(num_choices) if is_lasting and num_choices <= MAX_CHOICES else None
    if not is_lasting:
        message = "continues a stream that has an Idempotency-Key"
        raise QuireError(Reason.INVALID_FIELD, message, field=LAST_EVENT_ID)
    if num_choices > MAX_CHOICES:
        message = f"continues a stream of at most {MAX_CHOICES} choices"
        raise QuireError(Reason.INVALID_FIELD, message, field=LAST_EVENT_ID)
    return Cursor.parse(last_event_id, num_choices)
