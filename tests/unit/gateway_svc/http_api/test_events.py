"""JSON as bytes."""

from typing import Any

import pytest

from gateway_svc.http_api import events
from gateway_svc.http_api.events import long_json, to_json


@pytest.mark.parametrize("length", [0, 1, 32, 33, 64, 100])
def test_long_json_is_the_same_json(length: int) -> None:
    numbers, objects = list(range(length)), [{"a": [1, "\u2200"], "b": None}] * length
    mixed: dict[str, Any] = {"a": [], "b": {}, "c": [[], {}, None, [1.5, [True]]], "d": '"'}
    for body in (mixed, numbers, objects, {"a": numbers, "b": {"c": objects}}, "text", None):
        assert long_json(body) == to_json(body)


def test_long_json_is_made_of_short_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    """The encoder of one piece holds Python's lock: a thread alone does not let streams go on."""
    lengths: list[int] = []

    def measured(body: Any) -> bytes:
        encoded = to_json(body)
        lengths.append(len(encoded))
        return encoded

    monkeypatch.setattr(events, "to_json", measured)
    assert len(long_json({"tokens": list(range(100_000))})) > 500_000
    assert max(lengths) < 1_000
