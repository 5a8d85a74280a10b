"""The checker accepts a correct history, in chunks of any size, and reports each kind of violation."""

import pytest

from tests.chaos.checker import ViolationKind, check, counts, excerpt
from tests.chaos.histories import Entry, Expected, FaultCount, History, Sequence, Usage, expected_from

USAGE = Usage(prompt_tokens=3, completion_tokens=6)
EXPECTED = Expected(
    {
        0: Sequence((10, 11, 12, 13), "abcd", (), "length"),
        1: Sequence((20, 21), "xy", (), "stop"),
    },
    USAGE,
)


def chunk(index: int, offset: int, items: tuple[int, ...], text: str, finish: str | None = None) -> Entry:
    return Entry(0.0, 0, index, offset, items, text, (), finish)


RIGHT = [
    chunk(0, 0, (10,), "a"),
    chunk(1, 0, (20,), "x"),
    chunk(0, 1, (11, 12), "bc"),
    Entry(0.0, 1, note="resumed"),
    chunk(1, 1, (21,), "y", "stop"),
    chunk(0, 3, (13,), "d", "length"),
]


def violations(entries: list[Entry], expected: Expected = EXPECTED, usage: Usage = USAGE) -> dict[ViolationKind, int]:
    history = History("r", "case", FaultCount(), entries, usage=usage, is_done=True)
    return {kind: count for kind, count in counts(check(history, expected)).items() if count}


def changed(position: int, *entries: Entry) -> list[Entry]:
    """RIGHT with one entry replaced."""
    return [*RIGHT[:position], *entries, *RIGHT[position + 1 :]]


def test_a_correct_history_has_no_violations() -> None:
    assert violations(RIGHT) == {}


@pytest.mark.parametrize(
    ("entries", "expected_counts"),
    [
        pytest.param(changed(2, chunk(0, 2, (12,), "bc")), {ViolationKind.LOST: 1}, id="a missing token"),
        pytest.param(
            changed(2, RIGHT[2], RIGHT[2]),
            {ViolationKind.DUPLICATED: 2, ViolationKind.CHANGED: 1},
            id="a repeated chunk",
        ),
        pytest.param(changed(2, chunk(0, 1, (11, 99), "bc")), {ViolationKind.CHANGED: 1}, id="another token"),
        pytest.param(changed(2, chunk(0, 1, (11, 12), "bC")), {ViolationKind.CHANGED: 1}, id="another text"),
        pytest.param(
            changed(4, chunk(1, 1, (21,), "y", "length")), {ViolationKind.CHANGED: 1}, id="another finish reason"
        ),
        pytest.param(changed(5, chunk(0, 3, (13,), "d")), {ViolationKind.INCOMPLETE: 1}, id="no end"),
        pytest.param(RIGHT[:-1], {ViolationKind.LOST: 1, ViolationKind.INCOMPLETE: 1}, id="a missing end"),
        pytest.param([*RIGHT, chunk(1, 2, (22,), "z")], {ViolationKind.DUPLICATED: 1}, id="more after the end"),
        pytest.param([*RIGHT, RIGHT[-1]], {ViolationKind.DUPLICATED: 1}, id="the end twice"),
        pytest.param(
            [*RIGHT, chunk(2, 0, (5,), "q")], {ViolationKind.CHANGED: 1}, id="a sequence that nobody asked for"
        ),
        pytest.param(
            changed(5, chunk(0, 3, (13, 14), "d", "length")), {ViolationKind.CHANGED: 2}, id="one token too many"
        ),
    ],
)
def test_each_kind_of_violation_is_reported(entries: list[Entry], expected_counts: dict[ViolationKind, int]) -> None:
    assert violations(entries) == expected_counts


def test_without_offsets_a_repeated_chunk_counts_as_changed() -> None:
    bare = [Entry(0.0, 0, 0, None, tuple(text), text) for text in ("ab", "ab")]
    expected = Expected({0: Sequence(tuple("abc"), "abc", (), None)}, USAGE)
    assert violations(bare, expected)[ViolationKind.CHANGED] > 0


def test_an_error_is_one_incomplete_request() -> None:
    history = History("r", "case", FaultCount(), RIGHT[:3], is_done=True, error="UNAVAILABLE")
    assert dict(counts(check(history, EXPECTED))) == {ViolationKind.INCOMPLETE: 1}


def test_a_missing_usage_is_incomplete() -> None:
    history = History("r", "case", FaultCount(), RIGHT, is_done=True)
    assert dict(counts(check(history, EXPECTED))) == {ViolationKind.INCOMPLETE: 1}


@pytest.mark.parametrize("usage", [Usage(3, 5), Usage(4, 6)])
def test_another_usage_is_reported(usage: Usage) -> None:
    assert violations(RIGHT, usage=usage) == {ViolationKind.CHANGED: 1}


def test_log_probabilities_are_compared_as_numbers() -> None:
    expected = Expected({0: Sequence((1, 2), "ab", (-0.5, -1.0), "length")}, USAGE)
    for second, expected_counts in ((-1.0 + 1e-6, {}), (-1.1, {ViolationKind.CHANGED: 1})):
        assert violations([Entry(0.0, 0, 0, 0, (1, 2), "ab", (-0.5, second), "length")], expected) == expected_counts
    assert violations([Entry(0.0, 0, 0, 0, (1, 2), "ab", (-0.5,), "length")], expected) == {ViolationKind.CHANGED: 1}


def test_the_expected_response_is_taken_from_a_history_without_faults() -> None:
    history = History("r", "case", FaultCount(), RIGHT, usage=USAGE, is_done=True)
    assert expected_from(history) == EXPECTED


def test_an_excerpt_shows_the_entries_around_the_position() -> None:
    history = History("r", "case", FaultCount(), RIGHT)
    assert "resumed" in excerpt(history, 3, around=1)
    assert "sequence 0 from 1: [11, 12] 'bc'" in excerpt(history, 3, around=1)
    assert "'a'" not in excerpt(history, 3, around=1)
