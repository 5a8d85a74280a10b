"""The document of the HTTP API, OpenAPI 3.1: of all routes, from the models of their bodies and answers."""

import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from pydantic import TypeAdapter
from pydantic.json_schema import GenerateJsonSchema, JsonSchemaMode

from gateway_svc.http_api.endpoint import HandlerDoc, HttpRoute
from gateway_svc.http_api.exchange import OWN_ID_HEADER, REQUEST_ID_HEADER
from gateway_svc.http_api.undefined_fields import IGNORED_FIELDS_HEADER

Json = dict[str, Any]

_REFERENCE = "#/components/schemas/{model}"
_PATH_PARAMETER = re.compile(r"{(\w+)(?::\w+)?}")

_ABOUT = (
    "Routes of Quire's HTTP API. In bodies a null counts as an absent field. A sampling parameter "
    "without a default has that of the model's generation_config.json or of the operator. Fields listed as not served "
    "accept only values that turn the feature off. OpenAI's routes (models, completions, chat, embeddings, responses) "
    "are also found without /v1."
)
_SECURITY_SCHEMES: Json = {
    "bearer": {"type": "http", "scheme": "bearer", "description": "An API key, or a token of an issuer."},
    "xApiKey": {"type": "apiKey", "in": "header", "name": "x-api-key"},
    "apiKey": {"type": "apiKey", "in": "header", "name": "api-key"},
}
_REQUEST_HEADERS: Mapping[str, tuple[Json, str]] = {
    "Idempotency-Key": (
        {"type": "string", "pattern": "^[A-Za-z0-9._:-]{1,128}$"},
        "The request's name, by which it can be retried and resumed.",
    ),
    "Last-Event-ID": ({"type": "string"}, "Continues the stream of a named request after this event."),
    "x-request-timeout": (
        {"type": "number", "exclusiveMinimum": 0, "maximum": 86_400},
        "The deadline in seconds.",
    ),
    REQUEST_ID_HEADER: (
        {"type": "string", "pattern": "^[!-~]{1,128}$"},
        "The client's or a proxy's id of the call, which the answer repeats.",
    ),
    "traceparent": ({"type": "string"}, "The W3C trace that the request belongs to."),
}
_RESPONSE_HEADERS: Mapping[str, str] = {
    REQUEST_ID_HEADER: "That of the request; if it has none, the request's name, or an id that the gateway makes.",
    OWN_ID_HEADER: "The request's name, or an id that the gateway makes, where the request has an x-request-id.",
    "x-request-durable": "true if all requests of the call are recorded, so that they survive any one process.",
    IGNORED_FIELDS_HEADER: "Fields of the body that have no effect, separated by commas.",
}
_ERROR_HEADERS: Mapping[str, str] = {
    "retry-after": "Seconds to wait before the request is repeated.",
    "x-should-retry": "false where a repeated request fails again.",
}
_ERRORS = {
    "4XX": "400: a bad request, whose field the error names. 401, 403: the credential. 404: no such model or request. "
    "408: the body is late. 409: the name is in use. 413: the body is too large. 415: the body's type or encoding. "
    "421: the Host header. 429: a quota.",
    "5XX": "500: a defect, or the request is lost. 503: not now; retry-after has the time. 504: the deadline.",
}


class _SchemaGenerator(GenerateJsonSchema):
    """Without a title for each field, which repeats its name."""

    def field_title_should_be_set(self, schema: Any) -> bool:
        return False


def api_document(routes: Iterable[HttpRoute], *, requires_credential: bool, root_path: str = "") -> Json:
    """The document of these routes."""
    described = list(_handlers(routes))
    schemas, components = _schemas(doc for _, _, doc in described)
    paths: dict[str, Json] = {}
    for route, method, doc in described:
        operation = _operation(route, method, doc, schemas)
        operation["security"] = [{name: []} for name in _SECURITY_SCHEMES] if doc.needs_credential else []
        if doc.needs_credential and not requires_credential:
            operation["security"].insert(0, {})
        paths.setdefault(_PATH_PARAMETER.sub(r"{\1}", route.path), {})[method.lower()] = operation
    return {
        "openapi": "3.1.0",
        # The version of the API, as in its paths. That of the software is no matter of clients without a credential.
        "info": {"title": "Quire", "version": "1", "description": _ABOUT},
        "servers": [{"url": root_path or "/"}],
        "paths": paths,
        "components": {"schemas": components, "securitySchemes": _SECURITY_SCHEMES},
    }


def _handlers(routes: Iterable[HttpRoute]) -> Iterator[tuple[HttpRoute, str, HandlerDoc]]:
    for route in routes:
        for method in route.handlers:
            yield route, method, route.docs.get(method, HandlerDoc())


def _schemas(docs: Iterable[HandlerDoc]) -> tuple[Mapping[Any, Json], Json]:
    """The schema of each model, and the parts to which they refer."""
    models = {model for doc in docs for one in (doc.body, doc.answer, doc.event, doc.error) for model in _models(one)}
    mode: JsonSchemaMode = "validation"
    ordered = sorted(models, key=lambda model: str(model.__name__))
    by_key, parts = TypeAdapter.json_schemas(
        [(model, mode, TypeAdapter(model)) for model in ordered],
        ref_template=_REFERENCE,
        schema_generator=_SchemaGenerator,
    )
    return {model: schema for (model, _), schema in by_key.items()}, parts.get("$defs", {})


def _models(one: Any) -> tuple[Any, ...]:
    """The models of a handler's body or answer, none of which it may have."""
    if one is None:
        return ()
    return one if isinstance(one, tuple) else (one,)


def _schema(one: Any, schemas: Mapping[Any, Json]) -> Json:
    found = [schemas[model] for model in _models(one)]
    return found[0] if len(found) == 1 else {"anyOf": found}


def _operation(route: HttpRoute, method: str, doc: HandlerDoc, schemas: Mapping[Any, Json]) -> Json:
    about = " ".join((route.handlers[method].__doc__ or "").split())
    operation: Json = {
        "operationId": "_".join([method.lower(), *re.findall(r"\w+", _PATH_PARAMETER.sub(r"\1", route.path))]),
        "summary": about.partition(". ")[0].removesuffix(".") or f"{method} {route.path}",
        "parameters": [
            {"name": name, "in": "path", "required": True, "schema": {"type": "string"}}
            for name in _PATH_PARAMETER.findall(route.path)
        ],
        "responses": {
            status: _answer(doc, schemas, text) for status, text in {"200": "The answer.", **doc.other_statuses}.items()
        },
    }
    operation["parameters"] += [
        {"name": name, "in": "query", "schema": schema, "description": text}
        for name, (schema, text) in doc.query.items()
    ]
    if about:
        operation["description"] = about
    if doc.body is not None:
        operation["requestBody"] = {
            "required": True,
            "content": {"application/json": {"schema": _schema(doc.body, schemas)}},
        }
        operation["parameters"] += [
            {"name": name, "in": "header", "schema": schema, "description": text}
            for name, (schema, text) in _REQUEST_HEADERS.items()
            if name in doc.headers
        ]
    if doc.error is not None:
        content = {"application/json": {"schema": schemas[doc.error]}}
        for status, text in _ERRORS.items():
            operation["responses"][status] = {
                "description": text, "headers": _headers(_ERROR_HEADERS), "content": content,
            }  # fmt: skip
    return operation


def _answer(doc: HandlerDoc, schemas: Mapping[Any, Json], about: str) -> Json:
    content: Json = {}
    if doc.answer is not None:
        content[doc.content_type] = {"schema": _schema(doc.answer, schemas)}
    elif doc.content_type != "application/json":
        content[doc.content_type] = {"schema": {"type": "string"}}
    if doc.event is not None:
        content[doc.event_type] = {"schema": _schema(doc.event, schemas)}
    answer: Json = {"description": about}
    headers = {REQUEST_ID_HEADER, OWN_ID_HEADER}
    if doc.body is not None:
        headers.add(IGNORED_FIELDS_HEADER)
        if "Idempotency-Key" in doc.headers:
            headers.add("x-request-durable")
    answer["headers"] = _headers({name: text for name, text in _RESPONSE_HEADERS.items() if name in headers})
    return {**answer, "content": content} if content else answer


def _headers(about: Mapping[str, str]) -> Json:
    return {name: {"description": text, "schema": {"type": "string"}} for name, text in about.items()}
