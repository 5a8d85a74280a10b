"""Checks a client's history: it has each expected token once, in order, and no other token.

One that its case allows to end early may lack the last ones.
"""

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum
from itertools import zip_longest

from tests.chaos.histories import Entry, Expected, History, Sequence

LOGPROB_TOLERANCE = 1e-3


class ViolationKind(StrEnum):
    """The values are printed in the summary."""

    LOST = "lost"
    DUPLICATED = "duplicated"
    CHANGED = "changed"
    INCOMPLETE = "incomplete"


@dataclass(frozen=True)
class Violation:
    """A violation by `count` tokens. `position` is the index of the entry in the history."""

    kind: ViolationKind
    count: int
    position: int
    text: str


def check(history: History, expected: Expected) -> list[Violation]:
    """The violations of a history whose request has ended."""
    violations: list[Violation] = []
    end = len(history.entries) - 1
    for index, sequence in sorted(expected.sequences.items()):
        violations += _check_sequence(history, index, sequence)
    for position, entry in enumerate(history.entries):
        if not entry.note and entry.index not in expected.sequences:
            violations.append(
                Violation(ViolationKind.CHANGED, len(entry.items), position, f"there is no sequence {entry.index}")
            )
    if history.error is not None:
        if not history.may_end_so:
            violations.append(Violation(ViolationKind.INCOMPLETE, 1, end, history.error))
    elif history.usage is None:
        violations.append(Violation(ViolationKind.INCOMPLETE, 1, end, "there is no usage"))
    elif history.usage != expected.usage:
        violations.append(
            Violation(ViolationKind.CHANGED, 1, end, f"the usage is {history.usage}, not {expected.usage}")
        )
    return violations


def counts(violations: list[Violation]) -> Counter[ViolationKind]:
    """Tokens by kind; for INCOMPLETE, requests."""
    totals = Counter[ViolationKind]()
    for violation in violations:
        totals[violation.kind] += 1 if violation.kind is ViolationKind.INCOMPLETE else violation.count
    totals[ViolationKind.INCOMPLETE] = min(totals[ViolationKind.INCOMPLETE], 1)
    return totals


def excerpt(history: History, position: int, around: int = 6) -> str:
    """The entries around a position, one per line."""
    first = history.entries[0].at if history.entries else 0.0
    lines = []
    for i in range(max(0, position - around), min(len(history.entries), position + around + 1)):
        entry = history.entries[i]
        mark = ">" if i == position else " "
        lines.append(f"  {mark} {entry.at - first:8.3f} s, fault {entry.fault}: {_describe(entry)}")
    return "\n".join(lines)


def _check_sequence(history: History, index: int, expected: Sequence) -> Iterator[Violation]:
    next_offset, text, logprobs = 0, "", list[float]()
    ended_at: int | None = None
    position = -1
    for position, entry in enumerate(history.entries):
        if entry.note or entry.index != index:
            continue
        if ended_at is not None:
            yield Violation(ViolationKind.DUPLICATED, max(1, len(entry.items)), position, f"sequence {index} had ended")
            continue
        offset = next_offset if entry.offset is None else entry.offset
        if offset > next_offset:
            gap = offset - next_offset
            yield Violation(
                ViolationKind.LOST, gap, position, f"sequence {index}: {gap} tokens from {next_offset} on are missing"
            )
        elif offset < next_offset and entry.items:
            num_repeated = min(next_offset - offset, len(entry.items))
            yield Violation(
                ViolationKind.DUPLICATED,
                num_repeated,
                position,
                f"sequence {index}: {num_repeated} tokens from {offset} on repeated",
            )
        for at, item in enumerate(entry.items, offset):
            wanted = expected.items[at] if at < len(expected.items) else None
            if item != wanted:
                message = f"sequence {index}: token {at} is {item!r} instead of {wanted!r}"
                yield Violation(ViolationKind.CHANGED, 1, position, message)
        next_offset = max(next_offset, offset + len(entry.items))
        text += entry.text
        logprobs += entry.logprobs
        if entry.finish:
            ended_at = position
            if entry.finish != expected.finish:
                message = f"sequence {index} ended by {entry.finish}, not {expected.finish}"
                yield Violation(ViolationKind.CHANGED, 1, position, message)
    if history.error is not None:
        return  # check() reports the error; missing tokens are not reported again
    if ended_at is None:
        yield Violation(ViolationKind.INCOMPLETE, 1, position, f"sequence {index} has no end")
    if missing := len(expected.items) - next_offset:
        kind, count = (ViolationKind.LOST, missing) if missing > 0 else (ViolationKind.CHANGED, -missing)
        yield Violation(kind, count, position, f"sequence {index} has {next_offset} tokens, not {len(expected.items)}")
    else:
        if text != expected.text:
            yield Violation(
                ViolationKind.CHANGED, 1, position, f"sequence {index}: the text is {text!r}, not {expected.text!r}"
            )
        for at, (ours, wanted) in enumerate(zip_longest(logprobs, expected.logprobs)):
            if ours is None or wanted is None or abs(ours - wanted) > LOGPROB_TOLERANCE:
                message = f"sequence {index}: the log-probability of token {at} is {ours}, not {wanted}"
                yield Violation(ViolationKind.CHANGED, 1, position, message)
                break


def _describe(entry: Entry) -> str:
    if entry.note:
        return entry.note
    where = "" if entry.offset is None else f" from {entry.offset}"
    finish = f", ended by {entry.finish}" if entry.finish else ""
    return f"sequence {entry.index}{where}: {list(entry.items)} {entry.text!r}{finish}"
