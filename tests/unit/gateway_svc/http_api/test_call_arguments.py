"""Arguments of calls as objects."""

from typing import Any

import pytest

from gateway_svc.http_api.call_arguments import arguments_of
from gateway_svc.http_api.events import to_json


def nested(depth: int) -> list[Any]:
    """Empty lists within each other."""
    value: list[Any] = []
    for _ in range(depth - 1):
        value = [value]
    return value


@pytest.mark.parametrize(
    ("text", "arguments"),
    [
        ('{"a": [1, "b"]}', {"a": [1, "b"]}),
        ('{"a": 1, "b": "x', {"a": 1, "b": "x"}),
        ("{", {}),
        ("", {}),
        ("[1]", {}),
        ('{"a": NaN}', {"a": None}),
        ('{"a": [1e999, 2.5], "b": {"c": -1e999', {"a": [None, 2.5], "b": {"c": None}}),
        ('{"a": 1, "b": ' + "7" * 5_000 + "}", {"a": 1, "b": None}),
        (r'{"a": "x\ud800y", "\udc00": 1}', {"a": "x?y", "?": 1}),
        ('{"a": ' + "[" * 300 + "]" * 300 + "}", {"a": nested(300)}),
        ('{"a": ' + "[" * 300 + "]" * 299, {}),
        ('{"a": ' + "[" * 100_000 + "]" * 100_000 + "}", {}),
    ],
    ids=lambda value: repr(value)[:40],
)
def test_arguments_that_were_cut_off_have_what_is_there(text: str, arguments: Any) -> None:
    assert arguments_of(text) == arguments
    to_json(arguments_of(text))  # what a model writes never fails the answer
