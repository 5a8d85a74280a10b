"""Routes that describe the HTTP API."""

from collections.abc import Sequence
from functools import cached_property

from gateway_svc.http_api.answer_model import AnswerModel
from gateway_svc.http_api.api_document import api_document
from gateway_svc.http_api.docs_page import CONTENT_SECURITY_POLICY, docs_page
from gateway_svc.http_api.endpoint import HandlerDoc, HttpRoute
from gateway_svc.http_api.errors import ErrorFormat
from gateway_svc.http_api.events import to_json
from gateway_svc.http_api.exchange import HttpExchange


class DocumentRoutes:
    """The document of other routes, and a page that shows it. Both need no credential: they name no tenant or model."""

    def __init__(
        self,
        described: Sequence[HttpRoute],
        errors: ErrorFormat,
        error: type[AnswerModel],
        *,
        requires_credential: bool,
        root_path: str,
    ) -> None:
        """`error` is the model of errors in the format `errors`."""
        self._described = described
        self._errors = errors
        self._error = error
        self._requires_credential = requires_credential
        self._root_path = root_path

    def routes(self) -> list[HttpRoute]:
        document = HandlerDoc(error=self._error, needs_credential=False)
        page = HandlerDoc(error=self._error, needs_credential=False, content_type="text/html")
        return [
            HttpRoute("/openapi.json", {"GET": self.openapi}, self._errors, {"GET": document}),
            HttpRoute("/docs", {"GET": self.docs}, self._errors, {"GET": page}),
        ]

    async def openapi(self, exchange: HttpExchange) -> None:
        """This document."""
        await exchange.respond(self._rendered[0], "application/json")

    async def docs(self, exchange: HttpExchange) -> None:
        """A page that shows this document."""
        headers = {"content-security-policy": CONTENT_SECURITY_POLICY}
        await exchange.respond(self._rendered[1], "text/html; charset=utf-8", headers=headers)

    @cached_property
    def _rendered(self) -> tuple[bytes, bytes]:
        """The document and the page, made once."""
        routes = [*self._described, *self.routes()]
        document = api_document(routes, requires_credential=self._requires_credential, root_path=self._root_path)
        return to_json(document), docs_page(document)
