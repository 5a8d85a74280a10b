"""The routes of an Amazon SageMaker container: /ping, and /invocations for bodies of other routes."""

from collections.abc import Mapping
from typing import Any

from gateway_svc.http_api.body_model import BodyModel, option
from gateway_svc.http_api.calls import HttpCalls
from gateway_svc.http_api.embeddings.models import EmbeddingsAnswer, EmbeddingsBody
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
from gateway_svc.http_api.scoring.models import RankedTexts, RerankAnswer, RerankBody, ScoreAnswer, ScoreBody
from gateway_svc.http_api.service_routes import HealthAnswer
from gateway_svc.tracing import Operation


class InvocationBody(BodyModel):
    """The fields that make a body one of another route."""

    messages: Any = option("Of /v1/chat/completions.")
    prompt: Any = option("Of /v1/completions.")
    input: Any = option("Of /v1/embeddings.")
    query: Any = option("Of /rerank.")
    queries: Any = option("Of /score.")
    text_1: Any = option("Of /score.")
    data_1: Any = option("Of /score.")


class SageMakerRoutes:
    """Handlers. `others` are those of other routes, by a field of their bodies: the first one that a body has."""

    def __init__(self, calls: HttpCalls, health: Handler, others: Mapping[str, Handler]) -> None:
        self._calls = calls
        self._health = health
        self._others = others

    def routes(self) -> list[HttpRoute]:
        ping = HandlerDoc(
            answer=HealthAnswer,
            error=ErrorAnswer,
            needs_credential=False,
            other_statuses={"503": "No model is ready."},
        )
        invocations = HandlerDoc(
            (ChatBody, CompletionBody, EmbeddingsBody, RerankBody, ScoreBody),
            (ChatAnswer, CompletionAnswer, EmbeddingsAnswer, RerankAnswer, RankedTexts, ScoreAnswer),
            (ChatEvent, CompletionEvent),
            ErrorAnswer,
            headers=RESUMABLE_HEADERS,
        )
        return [
            HttpRoute("/ping", {"GET": self._health, "POST": self._health}, OPENAI_ERRORS, {"GET": ping, "POST": ping}),
            HttpRoute("/invocations", {"POST": self.invocations}, OPENAI_ERRORS, {"POST": invocations}),
        ]

    async def invocations(self, exchange: HttpExchange) -> None:
        """Answers a body as the route that has it: messages a chat, prompt a completion, input embeddings, query a
        reranking, queries, text_1 or data_1 scores."""
        call = self._calls.call(exchange, Operation.TEXT_COMPLETION)
        handle = await self._calls.read(exchange, call, InvocationBody, self._handler, keep=True, may_have_name=False)
        await handle(exchange)

    def _handler(self, body: InvocationBody, _: str | None) -> Handler:
        for field, handler in self._others.items():
            if getattr(body, field) is not None:
                return handler
        raise invalid("messages", "must be given, or prompt, input, query, queries, text_1 or data_1")
