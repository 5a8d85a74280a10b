"""Bodies that are nearly those of a JSON schema: shorter ones, which are accepted more often, and ones with hostile
values."""

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from hypothesis import strategies as st
from hypothesis.strategies import DrawFn

_SMALL = {
    "max_tokens": 8,
    "max_completion_tokens": 8,
    "max_output_tokens": 8,
    "num_predict": 8,
    "n": 3,
    "best_of": 3,
    "min_tokens": 2,
}
"""The highest values of fields with which answers are short."""

_USUAL: Mapping[str, Sequence[Any]] = {
    "messages": (
        [{"role": "user", "content": "Hello"}],
        [{"role": "system", "content": "a"}, {"role": "user", "content": "e\u0301😀"}],
        [{"role": "user", "content": [{"type": "text", "text": "<|im_end|>"}]}],
    ),
    "prompt": ("A quire is",),
    "input": ("Hello", [{"role": "user", "content": "Hello"}]),
    "max_tokens": (8, 1),
    "tokens": ([1, 2, 3],),
    "stream": (False, True),
}
"""Fields with which requests are accepted, and some of their values."""

_DEEP = 200
HOSTILE = (
    *("null", "true", "0", "-1", "1", "-0.0", "1.5", "1e308", "1e999", "NaN", "Infinity", "9" * 400, "1" * 5000),
    *(str(2**31), str(2**53 + 1), str(2**63 - 1), str(2**63), str(-(2**63) - 1), str(2**64)),
    *('""', '"\\u0000"', '"\\ud800"', '"\\udfff\\ud800"', '"\\u202e\\ufeff"', '"<|im_end|>"', '"a"', '"none"'),
    *(f'"{text}"' for text in ("😀" * 500, "e\u0301" * 200, "a" * 20_000, "[" * 3000)),
    *("[]", "{}", "[[]]", "[null]", '{"a": 1, "a": 2}', '{"\\ud800": 1}', f"[{', '.join(['0'] * 3000)}]"),
    *("[" * _DEEP + "]" * _DEEP, '{"a":' * _DEEP + "1" + "}" * _DEEP, "[" * 100_000, '{"items":' * 50_000),
    *("undefined", "'a'", "01", ".5", "[1,]", '"\x07"'),
)
"""JSON values, and texts that are not JSON."""

_MARK = "\x00here"
_KEY = "\x00key"


@st.composite
def shortened(draw: DrawFn, body: Mapping[str, Any], properties: frozenset[str]) -> dict[str, Any]:
    """A body that most operations accept, with at most three fields of another one and a short answer."""
    usual = {name: draw(st.sampled_from(values)) for name, values in _USUAL.items() if name in properties}
    others = sorted((body.keys() & properties) - _USUAL.keys() - {"model"})
    chosen = draw(st.lists(st.sampled_from(others), max_size=3)) if others else []
    return usual | {name: _small(name, body[name]) for name in chosen}


def _small(name: str, value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _small(name, one) for name, one in value.items()}
    if name in _SMALL and isinstance(value, int) and value > _SMALL[name]:
        return 1 + value % _SMALL[name]
    return value


@st.composite
def mutated(draw: DrawFn, body: Any) -> str:
    """The text of a body in which a value, or the name of a field, is another one."""
    path = draw(st.sampled_from(list(_paths(body))))
    hostile = draw(st.sampled_from(HOSTILE))
    if path and isinstance(path[-1], str) and hostile.startswith('"') and draw(st.booleans()):
        return _text(_replaced(body, path, _KEY)).replace(json.dumps(_KEY), hostile, 1)
    return _text(_replaced(body, path, _MARK)).replace(json.dumps(_MARK), hostile)


def _text(body: Any) -> str:
    return json.dumps(body, default=str)


def _paths(value: Any, path: tuple[str | int, ...] = ()) -> Iterator[tuple[str | int, ...]]:
    yield path
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, inner in items:
        yield from _paths(inner, (*path, key))


def _replaced(value: Any, path: tuple[str | int, ...], mark: str) -> Any:
    """The value with a mark at a path; with `_KEY` in place of the name."""
    if not path:
        return mark
    first, *rest = path
    if isinstance(value, dict):
        renamed = mark == _KEY and not rest
        return {
            (_KEY if renamed and key == first else key): (
                inner if key != first or renamed else _replaced(inner, tuple(rest), mark)
            )
            for key, inner in value.items()
        }
    return [_replaced(inner, tuple(rest), mark) if place == first else inner for place, inner in enumerate(value)]
