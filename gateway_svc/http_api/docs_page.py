"""A page that shows the document of the HTTP API: plain HTML, without scripts or files from elsewhere."""

from collections.abc import Iterator, Mapping
from html import escape
from typing import Any

from gateway_svc.http_api.events import to_json

Json = Mapping[str, Any]

CONTENT_SECURITY_POLICY = "default-src 'none'; style-src 'unsafe-inline'; frame-ancestors 'none'"

_STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; margin: 2rem auto; max-width: 62rem; padding: 0 1rem; color: #222; }
h2 { margin-top: 2.5rem; border-top: 1px solid #ccc; padding-top: 1rem; }
code { font: 13px ui-monospace, monospace; background: #f3f3f3; padding: 0 .2rem; }
table { border-collapse: collapse; width: 100%; }
td, th { text-align: left; vertical-align: top; padding: .2rem .6rem .2rem 0; border-bottom: 1px solid #eee; }
"""


def docs_page(document: Json) -> bytes:
    """The page of an OpenAPI document."""
    return "\n".join(_page(document)).encode()


def _page(document: Json) -> Iterator[str]:
    info = document["info"]
    title = escape(info["title"])
    yield f'<!doctype html><html lang="en"><head><meta charset="utf-8"><title>{title}: HTTP API</title>'
    yield f"<style>{_STYLE}</style></head><body><h1>{title}: HTTP API</h1><p>{escape(info['description'])} "
    yield 'The document itself is <a href="openapi.json">openapi.json</a>.</p><ul>'
    for method, path, _ in _operations(document):
        yield f'<li><a href="#{_anchor(method, path)}"><code>{method} {escape(path)}</code></a></li>'
    yield "</ul>"
    for method, path, operation in _operations(document):
        yield from _operation(method, path, operation)
    yield "<h2>Objects</h2>"
    for name, schema in document["components"]["schemas"].items():
        yield f'<h3 id="{escape(name)}">{escape(name)}</h3><p>{escape(schema.get("description", ""))}</p>'
        yield from _fields(schema)
    yield "</body></html>"


def _operations(document: Json) -> Iterator[tuple[str, str, Json]]:
    for path, methods in document["paths"].items():
        for method, operation in methods.items():
            yield method.upper(), path, operation


def _operation(method: str, path: str, operation: Json) -> Iterator[str]:
    yield f'<h2 id="{_anchor(method, path)}"><code>{method} {escape(path)}</code></h2>'
    yield f"<p>{escape(operation.get('description', ''))}</p><table>"
    for parameter in operation["parameters"]:
        where = f"{escape(parameter['in'])} <code>{escape(parameter['name'])}</code>"
        yield f"<tr><td>{where}</td><td>{escape(parameter.get('description', ''))}</td></tr>"
    if "requestBody" in operation:
        yield f"<tr><td>body</td><td>{_contents(operation['requestBody'])}</td></tr>"
    for status, response in operation["responses"].items():
        text = f"{escape(response['description'])} {_contents(response)}"
        yield f"<tr><td>{escape(status)}</td><td>{text}</td></tr>"
    yield "</table>"


def _contents(holder: Json) -> str:
    contents = holder.get("content", {})
    return ", ".join(f"{escape(kind)}: {_type(content['schema'])}" for kind, content in contents.items())


def _fields(schema: Json) -> Iterator[str]:
    required = schema.get("required", ())
    yield "<table>"
    for name, field in schema.get("properties", {}).items():
        note = " (required)" if name in required else ""
        about = escape(field.get("description", "")) + _bounds(field)
        yield f"<tr><td><code>{escape(name)}</code>{note}</td><td>{_type(field)}</td><td>{about}</td></tr>"
    yield "</table>"


def _bounds(field: Json) -> str:
    names = {
        "minimum": "at least",
        "exclusiveMinimum": "above",
        "maximum": "at most",
        "minItems": "items at least",
        "maxItems": "items at most",
        "maxLength": "characters at most",
    }
    texts = [f"{text} {escape(str(field[name]))}" for name, text in names.items() if name in field]
    if field.get("default") is not None:
        texts.append(f"default <code>{escape(_json(field['default']))}</code>")
    return f" <i>{'; '.join(texts)}</i>" if texts else ""


def _type(schema: Json) -> str:
    """A schema in words, with links to objects. null, which stands for absent, is left out."""
    match schema:
        case {"$ref": reference}:
            name = escape(reference.rpartition("/")[2])
            return f'<a href="#{name}">{name}</a>'
        case {"anyOf": kinds} | {"oneOf": kinds}:
            return " or ".join(_type(kind) for kind in kinds if kind != {"type": "null"})
        case {"enum": values}:
            return " or ".join(f"<code>{escape(_json(value))}</code>" for value in values if value is not None)
        case {"const": value}:
            return f"<code>{escape(_json(value))}</code>"
        case {"type": "array", "items": items}:
            return f"list of {_type(items)}"
        case {"type": [*kinds]}:
            return " or ".join(map(escape, kinds))
        case {"type": kind}:
            return escape(kind)
    return "any"


def _json(value: Any) -> str:
    return to_json(value).decode()


def _anchor(method: str, path: str) -> str:
    return escape(f"{method}{path}")
