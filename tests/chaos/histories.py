"""What a client saw of one request, entry by entry."""

import math
from collections import defaultdict
from collections.abc import Hashable, Mapping
from dataclasses import dataclass, field
from time import monotonic

Item = Hashable
"""One token as a protocol shows it: its id, its text, or, where a protocol tells of text alone, a character."""


@dataclass(frozen=True)
class Entry:
    """Something that came, or, with a `note`, that happened to the connection. `at` is `monotonic`."""

    at: float
    fault: int
    """The number of faults that there were so far."""
    index: int = 0
    offset: int | None = None
    """Place of the first item in its sequence; None where the protocol does not tell."""
    items: tuple[Item, ...] = ()
    text: str = ""
    logprobs: tuple[float, ...] = ()
    finish: str | None = None
    note: str = ""


@dataclass
class History:
    """One request from its start to its end. `fault` is the number of faults so far, kept by whoever injects them."""

    name: str
    case: str
    """Which of the requests that are asked again and again."""
    faults: "FaultCount"
    entries: list[Entry] = field(default_factory=list)
    num_items: int = 0
    fed_at: float = -math.inf
    """When the last of them came, by `monotonic`."""
    num_resumes: int = 0
    usage: "Usage | None" = None
    """What is said at the end; None until it came."""
    is_over: bool = False
    """The request came to its end, by its last message or by an error."""
    error: str | None = None

    def came(
        self,
        index: int,
        offset: int | None,
        items: tuple[Item, ...],
        text: str,
        logprobs: tuple[float, ...] = (),
        finish: str | None = None,
    ) -> None:
        """A piece of a sequence."""
        now = monotonic()
        if items:
            self.num_items += len(items)
            self.fed_at = now
        self.entries.append(Entry(now, self.faults.count, index, offset, items, text, logprobs, finish))

    def note(self, note: str) -> None:
        """Something about the connection."""
        self.entries.append(Entry(monotonic(), self.faults.count, note=note))

    def resumed(self, note: str) -> None:
        """The client goes on over another connection."""
        self.num_resumes += 1
        self.note(note)


@dataclass
class FaultCount:
    """How many faults there were."""

    count: int = 0


@dataclass(frozen=True)
class Usage:
    """Tokens that a request is told to have cost, the generated ones of all its sequences together."""

    prompt_tokens: int
    completion_tokens: int


@dataclass(frozen=True)
class Sequence:
    """All that one sequence should be."""

    items: tuple[Item, ...]
    text: str
    logprobs: tuple[float, ...]
    finish: str | None


@dataclass(frozen=True)
class Expected:
    """All that a request's answer should be, its sequences by index."""

    sequences: Mapping[int, Sequence]
    usage: Usage


def fold(history: History) -> Expected:
    """What an undisturbed history, which told its usage, says that every other one of its case should say."""
    assert history.usage is not None, f"{history.name}: the usage did not come"
    pieces = defaultdict[int, list[Entry]](list)
    for entry in history.entries:
        if not entry.note:
            pieces[entry.index].append(entry)
    sequences = {
        index: Sequence(
            items=tuple(item for entry in entries for item in entry.items),
            text="".join(entry.text for entry in entries),
            logprobs=tuple(logprob for entry in entries for logprob in entry.logprobs),
            finish=next((entry.finish for entry in entries if entry.finish), None),
        )
        for index, entries in pieces.items()
    }
    return Expected(sequences, history.usage)
