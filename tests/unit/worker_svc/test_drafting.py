"""A drafter is found by its name and cannot break a step."""

import logging
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from distributions import install
from worker_svc.drafters.ngram import NgramDrafter
from worker_svc.drafting import DrafterFactory, Drafting, find_drafter
from worker_svc.errors import StartupFailed
from worker_svc.sequences import Sequence
from worker_svc.step import NewSequence, SamplingParams

VOCAB = 50


def _sequence(*tokens: int) -> Sequence:
    return Sequence(NewSequence(0, list(tokens), 1, 0, SamplingParams()))


def test_a_drafter_of_quire_is_found_by_its_module() -> None:
    assert find_drafter("ngram") is NgramDrafter


def test_an_unknown_name_is_refused_with_those_that_there_are() -> None:
    with pytest.raises(StartupFailed, match=r"^QUIRE_DRAFTER is eagle; known drafters are .*ngram"):
        find_drafter("eagle")


_CONSTANT = """
class Constant:
    def draft(self, tokens, max_tokens):
        return [7] * max_tokens
"""


def _install(monkeypatch: pytest.MonkeyPatch, site: Path, source: str) -> None:
    install(monkeypatch, site, "constants", "quire.drafters", "constant = constant_drafter:Constant", source)


def test_one_of_another_package_is_found_by_its_entry_point(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    _install(monkeypatch, tmp_path / "site", _CONSTANT)
    assert Drafting(find_drafter("constant"), VOCAB).draft(_sequence(1), 3) == (7, 7, 7)


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("Constant = 7", "must be a function or class that makes a Drafter, not of the type int"),
        ("class Constant: ...", "failed: AttributeError: 'Constant' object has no attribute 'draft'"),
        (_CONSTANT + "    def __init__(self, model): ...", "failed: TypeError: .*'model'"),
        (_CONSTANT.replace("[7] * max_tokens", "open('/gone')"), "failed: FileNotFoundError: .*/gone.*"),
        (_CONSTANT.replace("[7] * max_tokens", "'word'"), "failed: ValueError: .*'w'"),
    ],
    ids=["value", "method", "arguments", "draft", "texts"],
)
def test_one_that_cannot_draft_is_refused_by_its_package(
    source: str, message: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    _install(monkeypatch, tmp_path / "site", source)
    with pytest.raises(StartupFailed, match=f"^quire.drafters: constant of the package constants {message}$"):
        find_drafter("constant")


class Recording:
    """Drafts given tokens, and records its calls."""

    def __init__(self, answer: Any) -> None:
        self.answer = answer
        self.asked: list[tuple[list[int], int]] = []

    def draft(self, tokens: Any, max_tokens: int) -> Iterable[int]:
        self.asked.append((tokens.tolist(), max_tokens))
        if isinstance(self.answer, Exception):
            raise self.answer
        answer: Iterable[int] = self.answer
        return answer


def test_each_sequence_has_a_drafter_that_is_asked_with_its_tokens() -> None:
    made: list[Recording] = []

    def make() -> Recording:
        made.append(Recording(iter([3, 4, 5])))
        return made[-1]

    drafting, first, second = Drafting(make, VOCAB), _sequence(1, 2), _sequence(8)
    assert drafting.draft(first, 2) == (3, 4), "no more than it was asked for"
    first.append_placeholder(3)
    assert drafting.draft(first, 3) == ()
    assert drafting.draft(second, 5) == (3, 4, 5)
    assert [drafter.asked for drafter in made] == [[([1, 2], 2), ([1, 2, 3], 3)], [([8], 5)]]


def test_a_drafter_is_dropped_with_its_sequence() -> None:
    drafting, sequence = Drafting(NgramDrafter, VOCAB), _sequence(1, 1, 1)
    assert drafting.draft(sequence, 2) == (1, 1)
    assert len(drafting._drafters) == 1
    del sequence
    assert len(drafting._drafters) == 0


class Writing:
    def draft(self, tokens: Any, max_tokens: int) -> list[int]:
        tokens[0] = 9
        return []


@pytest.mark.parametrize(
    "make",
    [
        lambda: Recording(ValueError("token 17")),
        lambda: Recording([3, VOCAB]),
        lambda: Recording([-1]),
        lambda: Recording(["x"]),
        lambda: Recording(None),
        lambda: Recording(np.array([2**40])),
        Writing,
        lambda: 1 / 0,
    ],
    ids=["raises", "beyond", "negative", "text", "none", "large", "writes", "not made"],
)
def test_one_that_fails_is_logged_without_tokens_and_not_asked_again(
    make: DrafterFactory, caplog: pytest.LogCaptureFixture
) -> None:
    sequence = _sequence(1, 2)
    drafting = Drafting(make, VOCAB)
    with caplog.at_level(logging.WARNING):
        assert [drafting.draft(sequence, 4) for _ in range(3)] == [()] * 3
    assert sequence.tokens.values.tolist() == [1, 2]
    (record,) = caplog.records
    assert record.getMessage() == "drafter failed"
    assert ".py:" in vars(record)["where"]
    assert "17" not in vars(record)["why"]
