"""Routes for the scores of pairs of texts: vLLM's /score, and /rerank as Jina, Cohere, vLLM and TEI have it."""

import time
from collections.abc import Sequence
from typing import Any

from gateway_svc.http_api.calls import HttpCalls, prompt_usage
from gateway_svc.http_api.endpoint import HandlerDoc, HttpRoute
from gateway_svc.http_api.exchange import HttpExchange
from gateway_svc.http_api.openai.answer_models import ErrorAnswer
from gateway_svc.http_api.openai.errors import OPENAI_ERRORS
from gateway_svc.http_api.scoring.models import RankedTexts, RerankAnswer, RerankBody, ScoreAnswer, ScoreBody
from gateway_svc.http_api.scoring.requests import RankingForm, RerankRequest, read_rerank, read_score
from gateway_svc.output import Usage
from gateway_svc.tracing import Operation

Json = dict[str, Any]


def score_answer(answer_id: str, created: int, scores: Sequence[float], model: str, usage: Usage) -> Json:
    """The answer of /score."""
    return {
        "id": answer_id,
        "object": "list",
        "created": created,
        "model": model,
        "data": [{"index": index, "object": "score", "score": score} for index, score in enumerate(scores)],
        "usage": prompt_usage(usage),
    }


def rerank_answer(
    answer_id: str, read: RerankRequest, scores: Sequence[float], model: str, usage: Usage
) -> Json | list[Json]:
    """The answer of /rerank. Of equal scores, the first document's comes first."""
    ranked = sorted(range(len(scores)), key=lambda index: -scores[index])[: read.top_n]
    if read.form is RankingForm.LIST:
        return [
            {
                "index": index,
                "score": scores[index],
                **({} if read.texts is None else {"text": read.texts[index]}),
            }
            for index in ranked
        ]
    return {
        "id": answer_id,
        "model": model,
        "usage": prompt_usage(usage),
        "results": [
            {
                "index": index,
                **({} if read.texts is None else {"document": {"text": read.texts[index]}}),
                "relevance_score": scores[index],
            }
            for index in ranked
        ],
    }


class ScoringRoutes:
    """The handlers; errors are in OpenAI's format."""

    def __init__(self, calls: HttpCalls) -> None:
        self._calls = calls

    def routes(self) -> list[HttpRoute]:
        score = HandlerDoc(ScoreBody, ScoreAnswer, error=ErrorAnswer)
        rerank = HandlerDoc(RerankBody, (RerankAnswer, RankedTexts), error=ErrorAnswer)
        return [
            *(
                HttpRoute(path, {"POST": self.score}, OPENAI_ERRORS, {"POST": score})
                for path in ("/score", "/v1/score")
            ),
            *(
                HttpRoute(path, {"POST": self.rerank}, OPENAI_ERRORS, {"POST": rerank})
                for path in ("/rerank", "/v1/rerank", "/v2/rerank")
            ),
        ]

    async def score(self, exchange: HttpExchange) -> None:
        """Scores pairs of texts."""
        call = self._calls.call(exchange, Operation.SCORE)
        unvalidated = await self._calls.read(exchange, call, ScoreBody, read_score, may_have_name=False)
        scored = await self._calls.score(exchange, call, unvalidated)
        answer_id, created = f"score-{exchange.request_id}", int(time.time())

        def answer() -> Json:
            return score_answer(answer_id, created, scored.scores(), scored.model, scored.usage)

        await self._calls.answers.respond_with_values(exchange, call, answer, num_values=scored.num_numbers)

    async def rerank(self, exchange: HttpExchange) -> None:
        """Sorts documents by their scores with a query."""
        call = self._calls.call(exchange, Operation.SCORE)
        read = await self._calls.read(exchange, call, RerankBody, read_rerank, may_have_name=False)
        scored = await self._calls.score(exchange, call, read.unvalidated)
        answer_id = f"rerank-{exchange.request_id}"

        def answer() -> Json | list[Json]:
            return rerank_answer(answer_id, read, scored.scores(), scored.model, scored.usage)

        await self._calls.answers.respond_with_values(
            exchange,
            call,
            answer,
            num_values=scored.num_numbers,
            num_characters=sum(map(len, read.texts or ())),
        )
