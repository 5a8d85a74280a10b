"""The routes of an Amazon SageMaker container: /ping, and /invocations for bodies of other routes."""

from collections.abc import Mapping
from functools import partial
from typing import Any

from gateway_svc.field_paths import NamedFields
from gateway_svc.http_api.body_model import BodyModel, option
from gateway_svc.http_api.calls import HttpCalls
from gateway_svc.http_api.classifying.models import ClassifyAnswer, ClassifyBody
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
from gateway_svc.model_catalog import ModelCatalog
from gateway_svc.tenant import Tenant
from gateway_svc.tracing import Operation


class InvocationBody(BodyModel):
    """The fields that make a body one of another route."""

    model: str | None = option("Name or alias of the model; absent: the first model.")
    messages: Any = option("Of /v1/chat/completions.")
    prompt: Any = option("Of /v1/completions.")
    input: Any = option("Of /v1/embeddings; for a model with a head for labels of /classify.")
    query: Any = option("Of /rerank.")
    queries: Any = option("Of /score.")
    text_1: Any = option("Of /score.")
    data_1: Any = option("Of /score.")


class SageMakerRoutes:
    """Handlers. `others` are those of other routes, by a field of their bodies: the first one that a body has.
    `classify` takes the place of that for `input` where the model has labels.
    """

    def __init__(
        self,
        catalog: ModelCatalog,
        calls: HttpCalls,
        health: Handler,
        others: Mapping[str, Handler],
        classify: Handler,
    ) -> None:
        self._catalog = catalog
        self._calls = calls
        self._health = health
        self._others = others
        self._classify = classify

    def routes(self) -> list[HttpRoute]:
        ping = HandlerDoc(
            answer=HealthAnswer,
            error=ErrorAnswer,
            needs_credential=False,
            other_statuses={"503": "No model is ready."},
        )
        invocations = HandlerDoc(
            (ChatBody, CompletionBody, EmbeddingsBody, ClassifyBody, RerankBody, ScoreBody),
            (ChatAnswer, CompletionAnswer, EmbeddingsAnswer, ClassifyAnswer, RerankAnswer, RankedTexts, ScoreAnswer),
            (ChatEvent, CompletionEvent),
            ErrorAnswer,
            headers=RESUMABLE_HEADERS,
        )
        return [
            HttpRoute("/ping", {"GET": self._health, "POST": self._health}, OPENAI_ERRORS, {"GET": ping, "POST": ping}),
            HttpRoute("/invocations", {"POST": self.invocations}, OPENAI_ERRORS, {"POST": invocations}),
        ]

    async def invocations(self, exchange: HttpExchange) -> None:
        """Answers a body as the route that has it: messages a chat, prompt a completion, input embeddings or
        classifications, query a reranking, queries, text_1 or data_1 scores."""
        call = self._calls.call(exchange, Operation.TEXT_COMPLETION)
        read = partial(self._handler, call.tenant)
        handle = await self._calls.read(exchange, call, InvocationBody, read, keep=True, may_have_name=False)
        await handle(exchange)

    def _handler(self, tenant: Tenant, body: InvocationBody, _: str | None) -> Handler:
        for field, handler in self._others.items():
            if getattr(body, field) is None:
                continue
            if field == "input" and self._catalog.find(body.model, NamedFields({}), tenant).labels:
                return self._classify
            return handler
        raise invalid("messages", "must be given, or prompt, input, query, queries, text_1 or data_1")
