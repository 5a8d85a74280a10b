"""The text of calls in a format's usual layout: what the grammar admits, and what is written for a model to read."""

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from gateway_svc.message_formats.description import (
    BraceCalls,
    CallSyntax,
    JsonCalls,
    Listing,
    NamedCalls,
    PythonCalls,
    Slot,
    XmlCalls,
)

BRACE_KEY = re.compile(r"[^\s:,{}\[\]<>\"]+")
"""Keys that may stand bare in braces."""

Part = str | Slot
"""A literal, or the place of the arguments or a number."""


@dataclass(frozen=True, slots=True)
class Layout:
    """The parts around all calls of a turn, and between two. A marker is a part of its own."""

    opening: tuple[str, ...] = ()
    separator: tuple[str, ...] = ()
    closing: tuple[str, ...] = ()


def layout_of(calls: CallSyntax) -> Layout:
    match calls:
        case JsonCalls(listing=Listing.ARRAY):
            begin = () if calls.begin is None else (calls.begin,)
            end = () if calls.end is None else (calls.end,)
            before, between, after = calls.array
            return Layout((*begin, calls.space + before), (between,), (after + calls.space, *end))
        case JsonCalls():
            return Layout(separator=(calls.separator,))
        case NamedCalls():
            opening, end = ((), ()) if calls.end is None else ((calls.begin,), (calls.end,))
            return Layout(opening, (calls.separator,) if calls.separator else (), end)
        case XmlCalls(is_grouped=True):
            return Layout((calls.begin, "\n"), (), (calls.end,))
        case XmlCalls():
            return Layout(separator=("\n",))
        case PythonCalls(is_list=False):
            return Layout((calls.begin, "\n"), ("\n",), ("\n", calls.end))
        case PythonCalls(is_bare=False):
            return Layout((calls.begin, "["), (", ",), ("]", calls.end))
        case PythonCalls():
            return Layout(("[",), (", ",), ("]",))
        case BraceCalls():
            return Layout()


def call_layout(calls: CallSyntax, name: str) -> tuple[Part, ...]:
    """The parts of one call of a function."""
    match calls:
        case JsonCalls():
            key = (
                f'"{calls.name_key}": {_dump(name)}, "{calls.arguments_key}": '
                if calls.name_key
                else f"{_dump(name)}: "
            )
            json_call: tuple[Part, ...] = (f"{{{key}", Slot.ARGUMENTS, "}")
            if calls.number_key:
                json_call = (f'{{"{calls.number_key}": "', Slot.NUMBER, f'", {key}', Slot.ARGUMENTS, "}")
            if calls.listing is Listing.ARRAY or calls.begin is None or calls.is_bare:
                return json_call
            end = () if calls.end is None else (calls.space, calls.end)
            return (calls.begin, calls.space, *json_call, *end)
        case NamedCalls():
            begin = (calls.begin,) if calls.end is None else ()
            named: tuple[Part, ...] = (f"{calls.namespace}{name}",)
            if calls.is_numbered:
                named = (f"{calls.namespace}{name}:", Slot.NUMBER)
            return (*begin, *(one for part in calls.call for one in (named if part is Slot.NAME else (part,))))
        case XmlCalls():
            function = f"{calls.function}{name}{calls.name_end}\n"
            if calls.is_grouped:
                return (function, Slot.ARGUMENTS, f"{calls.function_end}\n")
            if not calls.function:
                return (calls.begin, function, Slot.ARGUMENTS, calls.end)
            return (calls.begin, f"\n{function}", Slot.ARGUMENTS, f"{calls.function_end}\n", calls.end)
        case PythonCalls():
            return (f"{name}(", Slot.ARGUMENTS, ")")
        case BraceCalls():
            return (calls.begin, f"{calls.prefix}{name}{{", Slot.ARGUMENTS, "}", calls.end)


def write_calls(calls: CallSyntax, written: Sequence[tuple[str, Mapping[str, Any]]]) -> str:
    """The text of calls: pairs of a function's name and its arguments."""
    layout = layout_of(calls)
    texts = [
        "".join(
            str(number) if part is Slot.NUMBER else _write(calls, part, arguments) for part in call_layout(calls, name)
        )
        for number, (name, arguments) in enumerate(written)
    ]
    return "".join((*layout.opening, "".join(layout.separator).join(texts), *layout.closing))


def _write(calls: CallSyntax, part: Part, arguments: Mapping[str, Any]) -> str:
    if isinstance(part, str):
        return part
    if isinstance(calls, XmlCalls):
        return "".join(
            f"{calls.opening(name)}{value if isinstance(value, str) else _dump(value)}{calls.closing}"
            for name, value in arguments.items()
        )
    if isinstance(calls, PythonCalls):
        return ", ".join(f"{name}={python_literal(value)}" for name, value in arguments.items())
    if isinstance(calls, BraceCalls):
        return in_braces(calls, arguments)[1:-1]
    return _dump(arguments)


def in_braces(calls: BraceCalls, value: Any) -> str:
    """A JSON value as such calls have it. Keys that cannot be bare stand between quotes, as strings do."""
    match value:
        case str():
            return f"{calls.quote}{value}{calls.quote}"
        case list():
            return f"[{','.join(in_braces(calls, item) for item in value)}]"
        case Mapping():
            keys = (key if BRACE_KEY.fullmatch(key) else in_braces(calls, key) for key in value)
            items = (in_braces(calls, item) for item in value.values())
            return f"{{{','.join(f'{key}:{item}' for key, item in zip(keys, items, strict=True))}}}"
        case _:
            return _dump(value)


def python_literal(value: Any) -> str:
    """A JSON value as Python writes it, with strings as JSON writes them."""
    match value:
        case str():
            return _dump(value)
        case list():
            return f"[{', '.join(map(python_literal, value))}]"
        case Mapping():
            return f"{{{', '.join(f'{_dump(name)}: {python_literal(item)}' for name, item in value.items())}}}"
        case _:
            return repr(value)


def _dump(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)
