"""vLLM's route /classify."""

import time
from collections.abc import Sequence
from typing import Any

from gateway_svc.classifications import UnvalidatedClassifications
from gateway_svc.http_api.calls import ClassifiedInputs, HttpCalls, prompt_usage
from gateway_svc.http_api.classifying.models import ClassifyAnswer, ClassifyBody
from gateway_svc.http_api.embeddings.inputs import InputsRequest, read_chat, read_options
from gateway_svc.http_api.endpoint import HandlerDoc, HttpRoute
from gateway_svc.http_api.exchange import HttpExchange
from gateway_svc.http_api.json_body import invalid
from gateway_svc.http_api.openai.answer_models import ErrorAnswer
from gateway_svc.http_api.openai.errors import OPENAI_ERRORS
from gateway_svc.tracing import Operation
from gateway_svc.value_inputs import Vector


def read_classify(body: ClassifyBody, _: str | None = None) -> InputsRequest[UnvalidatedClassifications]:
    """The inputs and options of a body. Raises QuireError."""
    if None not in (body.use_activation, body.raw_scores) and body.use_activation == body.raw_scores:
        raise invalid("raw_scores", "is the opposite of use_activation")
    is_raw = bool(body.raw_scores) or body.use_activation is False
    return InputsRequest(UnvalidatedClassifications(**read_options(body), is_raw=is_raw), read_chat(body))


def classify_answer(answer_id: str, created: int, classified: ClassifiedInputs) -> dict[str, Any]:
    """The body of the answer."""
    return {
        "id": answer_id,
        "object": "list",
        "created": created,
        "model": classified.model,
        "data": [_classified(index, value, classified.labels) for index, value in enumerate(classified.values)],
        "usage": prompt_usage(classified.usage),
    }


def _classified(index: int, value: Vector, labels: Sequence[str]) -> dict[str, Any]:
    numbers = value.tolist()
    return {
        "index": index,
        "label": labels[numbers.index(max(numbers))],
        "probs": numbers,
        "num_classes": len(numbers),
    }


class ClassifyingRoutes:
    """The handler; errors are in OpenAI's format, as in vLLM."""

    def __init__(self, calls: HttpCalls) -> None:
        self._calls = calls

    def routes(self) -> list[HttpRoute]:
        doc = HandlerDoc(ClassifyBody, ClassifyAnswer, error=ErrorAnswer)
        return [HttpRoute("/classify", {"POST": self.classify}, OPENAI_ERRORS, {"POST": doc})]

    async def classify(self, exchange: HttpExchange) -> None:
        """Classifies inputs, or a chat: each gets a number for each label of the model's head."""
        call = self._calls.call(exchange, Operation.CLASSIFY)
        read = await self._calls.read(exchange, call, ClassifyBody, read_classify, may_have_name=False)
        classified = await self._calls.classify(exchange, call, await read.tokenized(self._calls, exchange, call))
        answer_id, created = f"classify-{exchange.request_id}", int(time.time())
        await self._calls.answers.respond_with_values(
            exchange,
            call,
            lambda: classify_answer(answer_id, created, classified),
            num_values=classified.num_numbers,
        )
