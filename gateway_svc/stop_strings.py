"""Searches streamed text for stop strings, in time linear in the text for each string."""

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class StopString:
    """A string to search for. `fallback[k]` is where a search that has matched k characters continues after a
    mismatch (Knuth, Morris, Pratt: the longest proper prefix of the first k characters that also ends them)."""

    text: str
    fallback: tuple[int, ...]

    @classmethod
    def compile(cls, text: str) -> "StopString":
        """Prepares a string of at least one character."""
        fallback = [0] * (len(text) + 1)
        matched = 0
        for length in range(2, len(text) + 1):
            char = text[length - 1]
            while matched and text[matched] != char:
                matched = fallback[matched]
            matched += text[matched] == char
            fallback[length] = matched
        return cls(text, tuple(fallback))


@dataclass(frozen=True, slots=True)
class StopMatch:
    """A stop string that was found, at characters `start` to `end` of the text held back and the text fed."""

    stop: str
    start: int
    end: int


class StopSearch:
    """The state of a search for several strings at once."""

    __slots__ = ("_matched", "_stops")

    def __init__(self, stops: Sequence[StopString]) -> None:
        self._stops = stops
        self._matched = [0] * len(stops)

    @property
    def num_pending(self) -> int:
        """How many characters at the end of the text may be the beginning of a stop string."""
        return max(self._matched, default=0)

    def feed(self, text: str) -> StopMatch | None:
        """Searches more text. Of several matches the one that begins first counts, then the shortest.

        Must not be called after a match.
        """
        num_pending = self.num_pending
        matches = [
            StopMatch(stop.text, num_pending + end - len(stop.text), num_pending + end)
            for which, stop in enumerate(self._stops)
            if (end := self._advance(which, stop, text)) is not None
        ]
        return min(matches, key=lambda match: (match.start, match.end), default=None)

    def skip(self, text: str) -> None:
        """Searches text in which a match does not count unless it ends later."""
        for which, stop in enumerate(self._stops):
            rest = text
            while (end := self._advance(which, stop, rest)) is not None:
                self._matched[which] = stop.fallback[len(stop.text)]
                rest = rest[end:]

    def _advance(self, which: int, stop: StopString, text: str) -> int | None:
        """Where the string is first complete in `text`."""
        wanted, fallback = stop.text, stop.fallback
        matched = self._matched[which]
        for position, char in enumerate(text, 1):
            while matched and wanted[matched] != char:
                matched = fallback[matched]
            if wanted[matched] == char:
                matched += 1
                if matched == len(wanted):
                    self._matched[which] = matched
                    return position
        self._matched[which] = matched
        return None
