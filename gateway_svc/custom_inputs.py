"""The texts that custom tools take, read from the arguments of calls while these are written."""

import json
import re
from collections.abc import Iterable, Iterator

from gateway_svc.message_formats.description import CUSTOM_INPUT
from gateway_svc.message_formats.events import MessageEvent, ToolArgumentsDelta, ToolCallBegin, ToolCallEnd

_OPENING = f'{{"{CUSTOM_INPUT}":"'
_BEFORE_SPACE = ("", "{", f'{{"{CUSTOM_INPUT}"', f'{{"{CUSTOM_INPUT}":')
"""Parts of it after which white space may stand."""
_PLAIN = re.compile(r'[^"\\]+')
_ESCAPE = re.compile(
    r'\\(?:["\\/bfnrt]|u[dD][89abAB][0-9a-fA-F]{2}\\u[dD][c-fC-F][0-9a-fA-F]{2}|u(?![dD][89a-fA-F])[0-9a-fA-F]{4})'
)
_LONE_SURROGATE = re.compile(r"\\u[dD][89a-fA-F][0-9a-fA-F]{2}")
_PART_OF_ESCAPE = re.compile(r"\\(?:u(?:[0-9a-fA-F]{0,3}|[dD][89abAB][0-9a-fA-F]{2}(?:\\(?:u[0-9a-fA-F]{0,3})?)?))?")
_REPLACEMENT = "\N{REPLACEMENT CHARACTER}"


class CustomInputs:
    """Replaces the arguments of calls of custom tools, a JSON object, by the text in it.

    Each event depends on the events before it alone.
    """

    def __init__(self, names: Iterable[str]) -> None:
        """`names` are those of the custom tools."""
        self._names = frozenset(names)
        self._text: _InputText | None = None

    @property
    def is_reading(self) -> bool:
        """Whether the event that was returned last belongs to a call of a custom tool."""
        return self._text is not None

    def read(self, events: Iterable[MessageEvent]) -> Iterator[MessageEvent]:
        """The same events, with pieces of texts instead of arguments."""
        for event in events:
            match event:
                case ToolCallBegin(_, name):
                    self._text = _InputText() if name in self._names else None
                    yield event
                case ToolArgumentsDelta(index, fragment) if self._text is not None:
                    if text := self._text.feed(fragment):
                        yield ToolArgumentsDelta(index, text)
                case ToolCallEnd(index, is_cut) if self._text is not None:
                    if not is_cut and (text := self._text.end()):
                        yield ToolArgumentsDelta(index, text)
                    yield event
                case _:
                    yield event


class _InputText:
    """The text of one call. Arguments of another form than `{"input": "…"}` are the text as they were written."""

    def __init__(self) -> None:
        self._fragments: list[str] = []
        """The arguments, as long as the text has not begun."""
        self._opening = ""
        """Their beginning without white space: of that of the text, or of another form."""
        self._rest = ""
        """What was not read of the text."""
        self._is_closed = False

    @property
    def _is_open(self) -> bool:
        return self._opening == _OPENING

    def feed(self, fragment: str) -> str:
        """More of the text, from more of the arguments."""
        if self._is_closed:
            return ""
        if not self._is_open:
            self._fragments.append(fragment)
            fragment = self._after_opening(fragment)
            if not self._is_open:
                return ""
        self._rest += fragment
        return self._unescaped()

    def end(self) -> str:
        """The rest of the text, when no more arguments follow."""
        return "" if self._is_open else "".join(self._fragments)

    def _after_opening(self, fragment: str) -> str:
        """What follows the beginning of the text; empty where that is not complete."""
        for at, character in enumerate(fragment, 1):
            if not _OPENING.startswith(self._opening):
                break
            if character.isspace() and self._opening in _BEFORE_SPACE:
                continue
            self._opening += character
            if self._is_open:
                return fragment[at:]
        return ""

    def _unescaped(self) -> str:
        """What can be read of the string; its rest stays."""
        parts: list[str] = []
        at, text = 0, self._rest
        while at < len(text) and _PART_OF_ESCAPE.fullmatch(text, at) is None:
            if text[at] == '"':
                self._is_closed = True
                break
            if (plain := _PLAIN.match(text, at)) is not None:
                parts.append(plain[0])
                at = plain.end()
            elif (escape := _ESCAPE.match(text, at)) is not None:
                parts.append(json.loads(f'"{escape[0]}"'))
                at = escape.end()
            elif (surrogate := _LONE_SURROGATE.match(text, at)) is not None:
                parts.append(_REPLACEMENT)
                at = surrogate.end()
            else:  # a backslash that escapes nothing
                parts.append(text[at])
                at += 1
        self._rest = text[at:]
        return "".join(parts)
