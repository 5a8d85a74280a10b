"""JSON as bytes."""

import json
import time
from typing import Any

import pytest

from gateway_svc.http_api import events
from gateway_svc.http_api.events import PLACEHOLDER, TextEventTemplate, long_json, to_json


@pytest.mark.parametrize("length", [0, 1, 32, 33, 64, 100])
def test_long_json_is_the_same_json(length: int) -> None:
    numbers, objects = list(range(length)), [{"a": [1, "\u2200"], "b": None}] * length
    mixed: dict[str, Any] = {"a": [], "b": {}, "c": [[], {}, None, [1.5, [True]]], "d": '"'}
    texts = ['"é\n'] * length
    vectors: list[Any] = [{"a": [0.5] * length, "b": ["", *texts]}] * length
    for body in (mixed, numbers, objects, texts, vectors, {"a": numbers, "b": {"c": objects}}, "text", None):
        assert long_json(body) == to_json(body)


@pytest.mark.parametrize("text", ["a", '"', "\\", "\n", "é", "\u2028", "😀"])
def test_a_long_text_is_the_same_json(text: str) -> None:
    assert long_json({"a": text * 40_000, "b": [f"{text}b"] * 40_000}) == to_json(
        {"a": text * 40_000, "b": [f"{text}b"] * 40_000}
    )


@pytest.mark.parametrize("end", ["\n", "\r", "\v", "\f", "\x1c", "\x1d", "\x1e", "\x85", "\u2028", "\u2029"])
def test_json_is_one_line_for_every_reader(end: str) -> None:
    body = {"text": f"é{end}b\\{end}", end: 1}
    for encode in (to_json, long_json):
        encoded = encode(body).decode()
        assert len(encoded.splitlines()) == 1
        assert json.loads(encoded) == body
    event = TextEventTemplate({"delta": PLACEHOLDER}).with_text(f"é{end}").decode()
    assert event.splitlines() == [event.removesuffix("\n\n"), ""]


@pytest.mark.parametrize(
    ("body", "num_bytes", "longest"),
    [
        ({"tokens": list(range(100_000))}, 500_000, 1_000),
        ({"data": [{"index": 0, "embedding": [0.5] * 4_096}] * 33}, 500_000, 1_000),
        ({"float": [[0.5] * 4_096] * 33}, 500_000, 1_000),
        ({"texts": ["a" * 500_000]}, 500_000, 20_000),
        ({"results": [{"index": 0, "document": {"text": "a" * 16_000}}] * 40}, 500_000, 20_000),
    ],
    ids=["numbers", "vectors in objects", "vectors", "a text", "texts"],
)
def test_long_json_is_made_of_short_pieces(
    body: Any, num_bytes: int, longest: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The encoder of one piece holds Python's lock: a thread alone does not let streams go on."""
    lengths: list[int] = []

    def measured(body: Any) -> bytes:
        encoded = to_json(body)
        lengths.append(len(encoded))
        return encoded

    monkeypatch.setattr(events, "to_json", measured)
    assert len(long_json(body)) > num_bytes
    assert max(lengths) < longest


def test_ends_of_lines_in_a_text_take_no_longer_than_other_characters() -> None:
    def seconds(text: str) -> float:
        started = time.thread_time()
        to_json(text)
        return time.thread_time() - started

    ordinary, ends = (min(seconds(character * 200_000) for _ in range(5)) for character in ("\u2027", "\u2028"))
    assert ends < 20 * ordinary
