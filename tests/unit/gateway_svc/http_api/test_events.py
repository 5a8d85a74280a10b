"""JSON as bytes."""

import json
from typing import Any

import pytest

from gateway_svc.http_api import events
from gateway_svc.http_api.events import PLACEHOLDER, TextEventTemplate, long_json, to_json


@pytest.mark.parametrize("length", [0, 1, 32, 33, 64, 100])
def test_long_json_is_the_same_json(length: int) -> None:
    numbers, objects = list(range(length)), [{"a": [1, "\u2200"], "b": None}] * length
    mixed: dict[str, Any] = {"a": [], "b": {}, "c": [[], {}, None, [1.5, [True]]], "d": '"'}
    for body in (mixed, numbers, objects, {"a": numbers, "b": {"c": objects}}, "text", None):
        assert long_json(body) == to_json(body)


@pytest.mark.parametrize("end", ["\n", "\r", "\v", "\f", "\x1c", "\x1d", "\x1e", "\x85", "\u2028", "\u2029"])
def test_json_is_one_line_for_every_reader(end: str) -> None:
    body = {"text": f"é{end}b\\{end}", end: 1}
    for encode in (to_json, long_json):
        encoded = encode(body).decode()
        assert len(encoded.splitlines()) == 1
        assert json.loads(encoded) == body
    event = TextEventTemplate({"delta": PLACEHOLDER}).with_text(f"é{end}").decode()
    assert event.splitlines() == [event.removesuffix("\n\n"), ""]


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
