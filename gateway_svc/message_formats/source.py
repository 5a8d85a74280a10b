"""What parsers of calls read: the units of a turn, one at a time, with what was read kept until it is certain."""

import re
from collections.abc import Collection, Generator
from typing import NoReturn, TypeVar

T = TypeVar("T")

Run = re.Pattern[str]
Parse = Generator[Run | None, str, T]
"""A parser in the middle of its work. It yields when it needs the next unit, and is sent it. A unit is a character, a
marker (ControlMarker), or, where a pattern is yielded, one or more characters that it matches. What a parser does must
not depend on how such characters are divided into units."""

_SPACE = re.compile(r"[ \t\r\n]+")


class ControlMarker(str):
    """A marker that came as a token of its own."""

    __slots__ = ()


class NotACall(Exception):  # noqa: N818
    """The text is not a call, or not one any more. Units that were read and not accepted are text."""


class TurnSource:
    """The units of a turn."""

    def __init__(self, control_markers: Collection[str], hidden: Collection[str]) -> None:
        """`control_markers` are the markers that are tokens; `hidden` those tokens that contribute no text."""
        self._control_markers = control_markers
        self._hidden = hidden
        self._held: list[str] = []
        self._unread: list[str] = []
        self.last = ""
        """The last unit that was read."""
        self.num_chars = 0
        """The visible characters of what was accepted or rejected."""

    def read(self, run: Run | None = None) -> Parse[str]:
        """The next unit."""
        unit = self._unread.pop() if self._unread else (yield run)
        self._held.append(unit)
        self.last = unit
        return unit

    def read_text(self, run: Run | None = None) -> Parse[str]:
        """The next unit. Raises NotACall where it is a marker."""
        unit = yield from self.read(run)
        if isinstance(unit, ControlMarker):
            self.refuse()
        return unit

    def unread(self) -> None:
        """Puts a unit back that was read and not accepted: the last one, then the one before it."""
        self._unread.append(self._held.pop())

    def unread_marker(self, marker: str) -> None:
        """Puts the units of a marker back that was matched last."""
        for _ in range(1 if isinstance(marker, ControlMarker) else len(marker)):
            self.unread()

    def accept(self) -> None:
        """What was read so far is emitted as events, or has no text."""
        self._take_held()

    def reject(self) -> str:
        """The text of what was read and not accepted."""
        return self._take_held()

    def _take_held(self) -> str:
        """The visible text of what was read."""
        text = "".join(unit for unit in self._held if not (isinstance(unit, ControlMarker) and unit in self._hidden))
        self._held.clear()
        self.num_chars += len(text)
        return text

    def match(self, markers: Collection[str]) -> Parse[str | None]:
        """The one of these markers that the last unit begins; None: there is none, and only that unit has been read.

        No marker may be the beginning of another.
        """
        unit = self.last
        if isinstance(unit, ControlMarker):
            return unit if unit in markers else None
        spelled = [marker for marker in markers if marker not in self._control_markers]
        found = unit
        num_read = 1
        while any(marker.startswith(found) for marker in spelled):
            if found in spelled:
                return found
            unit = yield from self.read()
            num_read += 1
            if isinstance(unit, ControlMarker):
                break
            found += unit
        for _ in range(num_read - 1):
            self.unread()
        return None

    def refuse(self) -> NoReturn:
        """The last unit does not belong to a call: it is read again, as text or as the beginning of a marker."""
        self.unread()
        raise NotACall

    def read_visible(self) -> Parse[str]:
        """The next unit that is not white space: a character or a marker."""
        while True:
            unit = yield from self.read()
            if not _SPACE.fullmatch(unit):
                return unit

    def expect(self, *literals: str) -> Parse[str]:
        """Reads one of these literals, after any white space. Raises NotACall."""
        yield from self.read_visible()
        found = yield from self.match(literals)
        if found is None:
            self.refuse()
        return found

    def read_run(self, run: Run) -> Parse[str]:
        """All characters that a pattern matches; empty where the next unit is another."""
        text = ""
        while True:
            unit = yield from self.read(run)
            if isinstance(unit, ControlMarker) or not run.fullmatch(unit):
                self.unread()
                return text
            text += unit


def run_without(markers: Collection[str]) -> Run:
    """Matches text that no marker begins in."""
    firsts = {marker[0] for marker in markers}
    return re.compile(f"[^{''.join(map(re.escape, sorted(firsts)))}]+" if firsts else r"[\s\S]+")
