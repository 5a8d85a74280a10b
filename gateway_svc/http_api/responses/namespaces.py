"""Functions in namespaces: the one name that a model has for each, and the two that clients have."""

from collections.abc import Iterable
from typing import Any

_SEPARATOR = "__"  # as in vLLM


def model_name(namespace: str | None, name: str) -> str:
    """The name that the model has for a function. Outside of namespaces it is that of the client."""
    return name if namespace is None else f"{namespace}{_SEPARATOR}{name}"


class Namespaces:
    """The namespaces among a response's tools, as these are stored."""

    def __init__(self, tools: Iterable[dict[str, Any]] = ()) -> None:
        self._names = {
            model_name(tool["name"], function["name"]): (tool["name"], function["name"])
            for tool in tools
            if tool["type"] == "namespace"
            for function in tool["tools"]
        }

    def fields(self, name: str) -> dict[str, str]:
        """The fields by which a client finds the function that the model calls by `name`."""
        if name not in self._names:
            return {"name": name}
        namespace, own_name = self._names[name]
        return {"name": own_name, "namespace": namespace}
