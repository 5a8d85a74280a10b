"""Judges a client's history: each token once, in order, complete, and none other than expected."""

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum
from itertools import zip_longest

from tests.chaos.histories import Entry, Expected, History, Sequence

LOGPROB_TOLERANCE = 1e-3


class Wrong(StrEnum):
    """What can be wrong. The values are the words of the last line."""

    LOST = "lost"
    DUPLICATED = "duplicated"
    CHANGED = "changed"
    INCOMPLETE = "incomplete"


@dataclass(frozen=True)
class Violation:
    """One thing that is wrong, `count` tokens of it. `place` is that of the history's entry where it shows."""

    kind: Wrong
    count: int
    place: int
    text: str


def check(history: History, expected: Expected) -> list[Violation]:
    """All that is wrong with a history that is over."""
    found: list[Violation] = []
    end = len(history.entries) - 1
    for index, sequence in sorted(expected.sequences.items()):
        found += _check_sequence(history, index, sequence)
    for place, entry in enumerate(history.entries):
        if not entry.note and entry.index not in expected.sequences:
            found.append(Violation(Wrong.CHANGED, len(entry.items), place, f"there is no sequence {entry.index}"))
    if history.error is not None:
        found.append(Violation(Wrong.INCOMPLETE, 1, end, history.error))
    elif history.usage is None:
        found.append(Violation(Wrong.INCOMPLETE, 1, end, "the usage did not come"))
    elif history.usage != expected.usage:
        found.append(Violation(Wrong.CHANGED, 1, end, f"the usage is {history.usage}, not {expected.usage}"))
    return found


def counts(violations: list[Violation]) -> Counter[Wrong]:
    """Tokens, or for what is incomplete requests, by kind."""
    totals = Counter[Wrong]()
    for violation in violations:
        totals[violation.kind] += 1 if violation.kind is Wrong.INCOMPLETE else violation.count
    totals[Wrong.INCOMPLETE] = min(totals[Wrong.INCOMPLETE], 1)
    return totals


def excerpt(history: History, place: int, around: int = 6) -> str:
    """The entries around a place, a line each."""
    first = history.entries[0].at if history.entries else 0.0
    lines = []
    for i in range(max(0, place - around), min(len(history.entries), place + around + 1)):
        entry = history.entries[i]
        mark = ">" if i == place else " "
        lines.append(f"  {mark} {entry.at - first:8.3f} s, fault {entry.fault}: {_describe(entry)}")
    return "\n".join(lines)


def _check_sequence(history: History, index: int, expected: Sequence) -> Iterator[Violation]:
    next_offset, text, logprobs = 0, "", list[float]()
    ended_at: int | None = None
    place = -1
    for place, entry in enumerate(history.entries):
        if entry.note or entry.index != index:
            continue
        if ended_at is not None:
            yield Violation(Wrong.DUPLICATED, max(1, len(entry.items)), place, f"sequence {index} had ended")
            continue
        offset = next_offset if entry.offset is None else entry.offset
        if offset > next_offset:
            gap = offset - next_offset
            yield Violation(
                Wrong.LOST, gap, place, f"sequence {index}: {gap} tokens from {next_offset} on are not there"
            )
        elif offset < next_offset and entry.items:
            again = min(next_offset - offset, len(entry.items))
            yield Violation(Wrong.DUPLICATED, again, place, f"sequence {index}: {again} tokens from {offset} on again")
        for at, item in enumerate(entry.items, offset):
            right = expected.items[at] if at < len(expected.items) else None
            if item != right:
                told = f"sequence {index}: token {at} is {item!r} instead of {right!r}"
                yield Violation(Wrong.CHANGED, 1, place, told)
        next_offset = max(next_offset, offset + len(entry.items))
        text += entry.text
        logprobs += entry.logprobs
        if entry.finish:
            ended_at = place
            if entry.finish != expected.finish:
                told = f"sequence {index} ended by {entry.finish}, not {expected.finish}"
                yield Violation(Wrong.CHANGED, 1, place, told)
    if history.error is not None:
        return  # what came is judged above; that not all came is said once
    if ended_at is None:
        yield Violation(Wrong.INCOMPLETE, 1, place, f"sequence {index} has no end")
    if missing := len(expected.items) - next_offset:
        kind, much = (Wrong.LOST, missing) if missing > 0 else (Wrong.CHANGED, -missing)
        yield Violation(kind, much, place, f"sequence {index} has {next_offset} tokens, not {len(expected.items)}")
    else:
        if text != expected.text:
            yield Violation(Wrong.CHANGED, 1, place, f"sequence {index}: the text is {text!r}, not {expected.text!r}")
        for at, (ours, right) in enumerate(zip_longest(logprobs, expected.logprobs)):
            if ours is None or right is None or abs(ours - right) > LOGPROB_TOLERANCE:
                told = f"sequence {index}: the log-probability of token {at} is {ours}, not {right}"
                yield Violation(Wrong.CHANGED, 1, place, told)
                break


def _describe(entry: Entry) -> str:
    if entry.note:
        return entry.note
    where = "" if entry.offset is None else f" from {entry.offset}"
    finish = f", ended by {entry.finish}" if entry.finish else ""
    return f"sequence {entry.index}{where}: {list(entry.items)} {entry.text!r}{finish}"
