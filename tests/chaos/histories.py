"""Histories: what a client received for one request, in order."""

import math
from collections import defaultdict
from collections.abc import Hashable, Mapping
from dataclasses import dataclass, field
from time import monotonic

Item = Hashable
"""One token as its id, or as its text. Where a protocol has neither, one character of the text."""


@dataclass(frozen=True)
class Entry:
    """One chunk of a sequence, or, with a `note`, an event of the connection. `at` is in seconds, by `monotonic`."""

    at: float
    fault: int
    """Number of the latest fault."""
    index: int = 0
    offset: int | None = None
    """Position of the first item in its sequence; None if the protocol does not send it."""
    items: tuple[Item, ...] = ()
    text: str = ""
    logprobs: tuple[float, ...] = ()
    finish: str | None = None
    note: str = ""


@dataclass
class History:
    """One request from its start to its end. `faults` is shared with the code that injects faults."""

    name: str
    case: str
    """Name of the case."""
    faults: "FaultCount"
    entries: list[Entry] = field(default_factory=list)
    num_items: int = 0
    last_item_at: float = -math.inf
    """When the last item arrived, by `monotonic`."""
    num_resumes: int = 0
    usage: "Usage | None" = None
    """None until it arrives, at the end of the stream."""
    is_done: bool = False
    """The request has ended, by its last message or by an error."""
    error: str | None = None
    may_end_so: bool = False
    """The case allows the error: the request had a deadline, or it had no name and its connection broke."""

    def add_chunk(
        self,
        index: int,
        offset: int | None,
        items: tuple[Item, ...],
        text: str,
        logprobs: tuple[float, ...] = (),
        finish: str | None = None,
    ) -> None:
        """Adds a chunk of a sequence."""
        now = monotonic()
        if items:
            self.num_items += len(items)
            self.last_item_at = now
        self.entries.append(Entry(now, self.faults.count, index, offset, items, text, logprobs, finish))

    def note(self, note: str) -> None:
        """Adds an event of the connection."""
        self.entries.append(Entry(monotonic(), self.faults.count, note=note))

    def add_resume(self, note: str) -> None:
        """Adds a resumption over another connection."""
        self.num_resumes += 1
        self.note(note)


@dataclass
class FaultCount:
    """Number of the latest fault, shared by its writer and the histories."""

    count: int = 0


@dataclass(frozen=True)
class Usage:
    """The usage that the server reports. Completion tokens are the sum over all sequences."""

    prompt_tokens: int
    completion_tokens: int


@dataclass(frozen=True)
class Sequence:
    """The expected content of one sequence."""

    items: tuple[Item, ...]
    text: str
    logprobs: tuple[float, ...]
    finish: str | None


@dataclass(frozen=True)
class Expected:
    """The expected response to a request, its sequences by index."""

    sequences: Mapping[int, Sequence]
    usage: Usage


def expected_from(history: History) -> Expected:
    """The expected response of a case, taken from a history of a run without faults, which has a usage."""
    assert history.usage is not None, f"{history.name}: there is no usage"
    chunks = defaultdict[int, list[Entry]](list)
    for entry in history.entries:
        if not entry.note:
            chunks[entry.index].append(entry)
    sequences = {
        index: Sequence(
            items=tuple(item for entry in entries for item in entry.items),
            text="".join(entry.text for entry in entries),
            logprobs=tuple(logprob for entry in entries for logprob in entry.logprobs),
            finish=next((entry.finish for entry in entries if entry.finish), None),
        )
        for index, entries in chunks.items()
    }
    return Expected(sequences, history.usage)
