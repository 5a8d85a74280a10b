"""The checker accepts what is right, however it was cut into pieces, and tells each kind of wrong."""

import pytest

from tests.chaos.checker import Wrong, check, counts, excerpt
from tests.chaos.histories import Entry, Expected, FaultCount, History, Sequence, Usage, fold

USAGE = Usage(prompt_tokens=3, completion_tokens=6)
EXPECTED = Expected(
    {
        0: Sequence((10, 11, 12, 13), "abcd", (), "length"),
        1: Sequence((20, 21), "xy", (), "stop"),
    },
    USAGE,
)


def piece(index: int, offset: int, items: tuple[int, ...], text: str, finish: str | None = None) -> Entry:
    return Entry(0.0, 0, index, offset, items, text, (), finish)


RIGHT = [
    piece(0, 0, (10,), "a"),
    piece(1, 0, (20,), "x"),
    piece(0, 1, (11, 12), "bc"),
    Entry(0.0, 1, note="resumed"),
    piece(1, 1, (21,), "y", "stop"),
    piece(0, 3, (13,), "d", "length"),
]


def judged(entries: list[Entry], expected: Expected = EXPECTED, usage: Usage = USAGE) -> dict[Wrong, int]:
    history = History("r", "case", FaultCount(), entries, usage=usage, is_over=True)
    return {kind: count for kind, count in counts(check(history, expected)).items() if count}


def changed(place: int, *entries: Entry) -> list[Entry]:
    """RIGHT with one entry replaced."""
    return [*RIGHT[:place], *entries, *RIGHT[place + 1 :]]


def test_what_is_right_is_accepted() -> None:
    assert judged(RIGHT) == {}


@pytest.mark.parametrize(
    ("entries", "wrong"),
    [
        pytest.param(changed(2, piece(0, 2, (12,), "bc")), {Wrong.LOST: 1}, id="a token left out"),
        pytest.param(changed(2, RIGHT[2], RIGHT[2]), {Wrong.DUPLICATED: 2, Wrong.CHANGED: 1}, id="a piece twice"),
        pytest.param(changed(2, piece(0, 1, (11, 99), "bc")), {Wrong.CHANGED: 1}, id="another token"),
        pytest.param(changed(2, piece(0, 1, (11, 12), "bC")), {Wrong.CHANGED: 1}, id="another text"),
        pytest.param(changed(4, piece(1, 1, (21,), "y", "length")), {Wrong.CHANGED: 1}, id="another reason to end"),
        pytest.param(changed(5, piece(0, 3, (13,), "d")), {Wrong.INCOMPLETE: 1}, id="no end"),
        pytest.param(RIGHT[:-1], {Wrong.LOST: 1, Wrong.INCOMPLETE: 1}, id="the end left out"),
        pytest.param([*RIGHT, piece(1, 2, (22,), "z")], {Wrong.DUPLICATED: 1}, id="more after the end"),
        pytest.param([*RIGHT, RIGHT[-1]], {Wrong.DUPLICATED: 1}, id="the end twice"),
        pytest.param([*RIGHT, piece(2, 0, (5,), "q")], {Wrong.CHANGED: 1}, id="a sequence that nobody asked for"),
        pytest.param(changed(5, piece(0, 3, (13, 14), "d", "length")), {Wrong.CHANGED: 2}, id="one token too many"),
    ],
)
def test_each_kind_of_wrong_is_told(entries: list[Entry], wrong: dict[Wrong, int]) -> None:
    assert judged(entries) == wrong


def test_without_offsets_a_piece_that_comes_twice_has_changed_what_follows() -> None:
    bare = [Entry(0.0, 0, 0, None, tuple(text), text) for text in ("ab", "ab")]
    expected = Expected({0: Sequence(tuple("abc"), "abc", (), None)}, USAGE)
    assert judged(bare, expected)[Wrong.CHANGED] > 0


def test_an_error_is_one_request_that_is_incomplete() -> None:
    history = History("r", "case", FaultCount(), RIGHT[:3], is_over=True, error="UNAVAILABLE")
    assert dict(counts(check(history, EXPECTED))) == {Wrong.INCOMPLETE: 1}


def test_a_usage_that_did_not_come_is_incomplete() -> None:
    history = History("r", "case", FaultCount(), RIGHT, is_over=True)
    assert dict(counts(check(history, EXPECTED))) == {Wrong.INCOMPLETE: 1}


@pytest.mark.parametrize("usage", [Usage(3, 5), Usage(4, 6)])
def test_another_usage_is_told(usage: Usage) -> None:
    assert judged(RIGHT, usage=usage) == {Wrong.CHANGED: 1}


def test_log_probabilities_are_compared_as_numbers() -> None:
    expected = Expected({0: Sequence((1, 2), "ab", (-0.5, -1.0), "length")}, USAGE)
    for second, wrong in ((-1.0 + 1e-6, {}), (-1.1, {Wrong.CHANGED: 1})):
        assert judged([Entry(0.0, 0, 0, 0, (1, 2), "ab", (-0.5, second), "length")], expected) == wrong
    assert judged([Entry(0.0, 0, 0, 0, (1, 2), "ab", (-0.5,), "length")], expected) == {Wrong.CHANGED: 1}


def test_an_undisturbed_history_is_what_others_should_be() -> None:
    history = History("r", "case", FaultCount(), RIGHT, usage=USAGE, is_over=True)
    assert fold(history) == EXPECTED


def test_an_excerpt_shows_what_came_around_the_place() -> None:
    history = History("r", "case", FaultCount(), RIGHT)
    assert "resumed" in excerpt(history, 3, around=1)
    assert "sequence 0 from 1: [11, 12] 'bc'" in excerpt(history, 3, around=1)
    assert "'a'" not in excerpt(history, 3, around=1)
