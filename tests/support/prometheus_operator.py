"""Schemas of the Prometheus operator's objects, with the fields that the chart uses and no others."""

from typing import Any

_TEXT = {"type": "string", "minLength": 1}
_DURATION = {"type": "string", "pattern": "^([0-9]+h)?([0-9]+m)?([0-9]+s)?([0-9]+ms)?$", "minLength": 2}
_TEXTS = {"type": "object", "additionalProperties": {"type": "string"}}


def _object(required: dict[str, Any], **optional: Any) -> dict[str, Any]:
    return {
        "type": "object",
        "additionalProperties": False,
        "required": list(required),
        "properties": required | optional,
    }


def _list(items: dict[str, Any]) -> dict[str, Any]:
    return {"type": "array", "minItems": 1, "items": items}


def _kind(spec: dict[str, Any]) -> dict[str, Any]:
    metadata = _object({"name": _TEXT, "namespace": _TEXT, "labels": _TEXTS})
    return _object(
        {"apiVersion": {"const": "monitoring.coreos.com/v1"}, "kind": _TEXT, "metadata": metadata, "spec": spec}
    )


_RULE = _object({"alert": _TEXT, "expr": _TEXT, "labels": _TEXTS, "annotations": _TEXTS}, **{"for": _DURATION})
SCHEMAS = {
    "PodMonitor": _kind(
        _object(
            {
                "selector": _object({"matchLabels": _TEXTS}),
                "podMetricsEndpoints": _list(_object({"port": _TEXT}, interval=_DURATION)),
            }
        )
    ),
    "PrometheusRule": _kind(_object({"groups": _list(_object({"name": _TEXT, "rules": _list(_RULE)}))})),
}
