"""The routes of an Amazon SageMaker container: /ping, and /invocations for OpenAI's bodies."""

from typing import Any

from gateway_svc.http_api.body_model import BodyModel, option
from gateway_svc.http_api.calls import HttpCalls
from gateway_svc.http_api.endpoint import RESUMABLE_HEADERS, Handler, HandlerDoc, HttpRoute
from gateway_svc.http_api.exchange import HttpExchange
from gateway_svc.http_api.json_body import invalid
from gateway_svc.http_api.openai.answer_models import (
    ChatAnswer,
    ChatEvent,
    CompletionAnswer,
    CompletionEvent,
    ErrorAnswer,
)
from gateway_svc.http_api.openai.chat_models import ChatBody
from gateway_svc.http_api.openai.errors import OPENAI_ERRORS
from gateway_svc.http_api.openai.generation_body import CompletionBody
from gateway_svc.http_api.service_routes import HealthAnswer
from gateway_svc.tracing import Operation


class InvocationBody(BodyModel):
    """The fields that make a body one of /v1/chat/completions or of /v1/completions."""

    messages: Any = option("Of a chat.")
    prompt: Any = option("Of a completion.")


class SageMakerRoutes:
    """Handlers. `completions` and `chat_completions` are OpenAI's."""

    def __init__(self, calls: HttpCalls, health: Handler, completions: Handler, chat_completions: Handler) -> None:
        self._calls = calls
        self._health = health
        self._completions = completions
        self._chat_completions = chat_completions

    def routes(self) -> list[HttpRoute]:
        ping = HandlerDoc(
            answer=HealthAnswer,
            error=ErrorAnswer,
            needs_credential=False,
            other_statuses={"503": "No model is ready."},
        )
        invocations = HandlerDoc(
            (ChatBody, CompletionBody),
            (ChatAnswer, CompletionAnswer),
            (ChatEvent, CompletionEvent),
            ErrorAnswer,
            headers=RESUMABLE_HEADERS,
        )
        return [
            HttpRoute("/ping", {"GET": self._health, "POST": self._health}, OPENAI_ERRORS, {"GET": ping, "POST": ping}),
            HttpRoute("/invocations", {"POST": self.invocations}, OPENAI_ERRORS, {"POST": invocations}),
        ]

    async def invocations(self, exchange: HttpExchange) -> None:
        """Answers a body with messages as a chat, one with a prompt as a completion."""
        call = self._calls.call(exchange, Operation.TEXT_COMPLETION)
        handle = await self._calls.read(exchange, call, InvocationBody, self._handler, keep=True)
        await handle(exchange)

    def _handler(self, body: InvocationBody, _: str | None) -> Handler:
        if body.messages is not None:
            return self._chat_completions
        if body.prompt is not None:
            return self._completions
        raise invalid("messages", "must be given, or prompt")
