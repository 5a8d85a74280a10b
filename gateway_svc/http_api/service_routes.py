"""Routes about the gateway itself: health, version and metrics."""

from importlib.metadata import PackageNotFoundError, version
from typing import Literal

from prometheus_client.exposition import CONTENT_TYPE_LATEST
from pydantic import Field

from gateway_svc.http_api.answer_model import AnswerModel
from gateway_svc.http_api.calls import HttpCalls
from gateway_svc.http_api.endpoint import HandlerDoc, HttpRoute
from gateway_svc.http_api.errors import ErrorFormat
from gateway_svc.http_api.exchange import HttpExchange
from gateway_svc.request_manager import RequestManager


class HealthAnswer(AnswerModel):
    """Whether requests are accepted."""

    status: Literal["ready", "not ready"]
    durable: bool = Field(description="Whether requests are recorded, so that they survive any one process.")
    memory_pressure: Literal["none", "high", "critical"] = Field(
        description="How short memory is at the worker where it is shortest: `high` from QUIRE_MEMORY_HIGH of its "
        "limit on, `critical` from QUIRE_MEMORY_CRITICAL on."
    )
    workers_set_apart: int = Field(
        description="How many workers get no steps until they are restarted. `/health` on the scheduler's metrics "
        "port, and `quire explain`, name them."
    )


class LiveAnswer(AnswerModel):
    """The process answers."""

    status: Literal["live"]


class VersionAnswer(AnswerModel):
    """The version of this software."""

    version: str


class ServiceRoutes:
    def __init__(
        self, request_manager: RequestManager, calls: HttpCalls, errors: ErrorFormat, error: type[AnswerModel]
    ) -> None:
        """`error` is the model of errors in the format `errors`."""
        self._request_manager = request_manager
        self._calls = calls
        self._errors = errors
        self._error = error

    def routes(self, *, has_metrics: bool) -> list[HttpRoute]:
        health = HandlerDoc(
            answer=HealthAnswer,
            error=self._error,
            needs_credential=False,
            other_statuses={"503": "No model is ready."},
        )
        live = HandlerDoc(answer=LiveAnswer, error=self._error, needs_credential=False)
        version = HandlerDoc(answer=VersionAnswer, error=self._error)
        routes = [
            HttpRoute("/health", {"GET": self.health}, self._errors, {"GET": health}),
            HttpRoute("/live", {"GET": self.live}, self._errors, {"GET": live}),
            HttpRoute("/version", {"GET": self.version}, self._errors, {"GET": version}),
        ]
        if has_metrics:
            doc = HandlerDoc(error=self._error, needs_credential=False, content_type="text/plain")
            routes.append(HttpRoute("/metrics", {"GET": self.metrics}, self._errors, {"GET": doc}))
        return routes

    async def health(self, exchange: HttpExchange) -> None:
        """200 where a request would be accepted now; also whether it would survive its scheduler, and whether workers
        are short of memory.
        """
        is_ready = self._request_manager.is_ready
        body = {
            "status": "ready" if is_ready else "not ready",
            "durable": self._request_manager.is_durable,
            "memory_pressure": self._request_manager.memory_pressure.value,
            "workers_set_apart": self._request_manager.num_workers_set_apart,
        }
        await exchange.respond_json(body, 200 if is_ready else 503)

    async def live(self, exchange: HttpExchange) -> None:
        """200 as long as the process answers."""
        await exchange.respond_json({"status": "live"})

    async def version(self, exchange: HttpExchange) -> None:
        """The version of this software."""
        self._calls.tenant(exchange)
        await exchange.respond_json({"version": software_version()})

    async def metrics(self, exchange: HttpExchange) -> None:
        """Metrics in Prometheus' text format."""
        await exchange.respond(self._request_manager.metrics.exposition(), CONTENT_TYPE_LATEST)


def software_version() -> str:
    """The installed version, or a version for a source tree that is not installed."""
    try:
        return version("quire")
    except PackageNotFoundError:
        return "0+source"
