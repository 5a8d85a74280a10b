"""A sequence whose masks take long delays itself alone, and has the tokens that it has otherwise."""

import math
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from functools import partial
from itertools import cycle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from core_runner import CoreRunner, submission
from drafters import knowing
from grammars import CASES, TOKENIZER, VOCAB, config_for_grammars, tiny_grammars
from quire.scheduler.v1 import scheduler_pb2 as scheduler_v1
from runner_driver import make_runner
from runner_instance import make_instance
from runner_steps import new_sequence, run_step
from svc_common.grammars import load_grammar_tokenizer
from tiny_model import EOS
from worker_svc import slow_masks
from worker_svc.grammar import GrammarCompiler
from worker_svc.grammar_matcher import GrammarMatcher
from worker_svc.slow_masks import Mask, MaskPace, MaskTimer, SlowMasks
from worker_svc.step import NewSequence, SamplingParams, ScheduledSequence
from worker_svc.token_masks import TokenMasks

BLOCK = 8
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
AMBIGUOUS = 'start: e\ne: e e | e e e | "a" | ""'
"""Each token makes the next mask take longer, until a limit ends the sequence."""


@pytest.fixture(scope="module")
def model(save_model: Callable[..., Path]) -> Path:
    return save_model(config_for_grammars())


def _make_all_slow(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every mask but the first ones of a worker takes long."""
    monkeypatch.setattr(slow_masks, "_STEP_SECONDS", 0.0)
    monkeypatch.setattr(slow_masks, "_SLOW_SECONDS", 0.0)


def _make_none_slow(monkeypatch: pytest.MonkeyPatch) -> None:
    """No mask takes long, however busy the machine is."""
    monkeypatch.setattr(slow_masks, "_STEP_SECONDS", math.inf)
    monkeypatch.setattr(slow_masks, "_SLOW_SECONDS", math.inf)


class _Counting(GrammarCompiler):
    """Counts the masks that are made ahead, and in steps; makes those ahead when it is released."""

    def __init__(self, *, released: bool = True) -> None:
        super().__init__(partial(load_grammar_tokenizer, TOKENIZER.to_str(), [EOS]), VOCAB, num_threads=2)
        self.num_ahead = self.num_in_steps = 0
        self.released = threading.Event()
        if released:
            self.released.set()

    def start_mask_ahead(self, matcher: GrammarMatcher) -> "Future[Mask | None]":
        self.num_ahead += 1
        self._slow_masks._thread.submit(self.released.wait, 60)
        return super().start_mask_ahead(matcher)

    def start_masks(self, matchers: Sequence[tuple[int, GrammarMatcher]]) -> "Future[TokenMasks]":
        self.num_in_steps += sum(matcher.mask_ahead is None for _, matcher in matchers)
        return super().start_masks(matchers)


def _requests(rounds: int) -> list[scheduler_v1.Submit]:
    """With each grammar in each round, but every third one without."""
    made = []
    for place, name in enumerate([*CASES] * rounds):
        submit = submission(f"{name}/{place}", [5, 6, 7 + place], 30, 1 + place % 2, temperature=place % 3, seed=place)
        submit.sampling.grammar = CASES[name].grammar if place % 3 else ""
        submit.stop_token_ids.append(EOS)
        made.append(submit)
    return made


def _serve(model: Path, grammars: GrammarCompiler, kernels: str = "compiled", **options: Any) -> dict[str, list[Any]]:
    num_blocks, preemption = options.pop("num_blocks", 256), options.pop("preemption", "auto")
    requests = _requests(options.pop("rounds", 2))
    runner = make_runner(model, kernels, block_size=BLOCK, num_blocks=num_blocks, grammars=grammars, **options)
    served = CoreRunner(make_instance(runner), num_blocks, preemption).serve(requests)
    return {key: [one.token_ids for one in sequences] for key, sequences in served.items()}


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"max_step_tokens": 19},
        {"max_sequences": 3},
        {"num_blocks": 11, "preemption": "swap", "num_host_blocks": 64},
        {"num_blocks": 11, "preemption": "recompute"},
        {"kernels": "torch"},
        pytest.param(
            {"kernels": "triton", "device": DEVICE, "max_sequences": 4, "rounds": 2 if DEVICE == "cuda" else 1},
            marks=pytest.mark.large,
        ),
    ],
    ids=["plain", "in chunks", "few", "swapped", "computed again", "torch", "triton"],
)
def test_slow_masks_change_no_token(options: dict[str, Any], model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    usual, slow = _Counting(), _Counting()
    rounds = options.get("rounds", 2)
    expected = _serve(model, usual, rounds=rounds)
    _make_all_slow(monkeypatch)
    assert _serve(model, slow, **options) == expected
    assert slow.num_ahead > usual.num_ahead + 10 * rounds


def test_slow_masks_change_no_token_with_drafts(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = _serve(model, tiny_grammars())
    prompts = {submit.key: submit.prompt_token_ids for submit in _requests(2)}
    texts = [[*prompts[key], *tokens] for key, found in expected.items() for tokens in found]
    _make_all_slow(monkeypatch)
    slow = _Counting()
    assert _serve(model, slow, make_drafter=knowing(texts, VOCAB, 3)) == expected
    assert slow.num_ahead > 20


def test_others_go_on_while_a_slow_mask_is_made(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _make_all_slow(monkeypatch)
    grammars = _Counting(released=False)
    runner = make_runner(model, "compiled", block_size=BLOCK, num_blocks=16, grammars=grammars)
    params = SamplingParams(grammar=AMBIGUOUS)
    news = [new_sequence(0, [5], params), new_sequence(1, [9, 9])]
    first, second = run_step(runner, news, ScheduledSequence(0, 0, 1, [0, 1]), ScheduledSequence(1, 0, 2, [2, 3]))
    num_tokens = [len(first.token_ids), len(second.token_ids)]
    for _ in range(8):
        first, second = run_step(
            runner,
            [],
            ScheduledSequence(0, max(0, num_tokens[0]), 1, []),
            ScheduledSequence(1, 1 + num_tokens[1], 1, []),
        )
        assert first.failure is second.failure is None
        num_tokens = [before + len(one.token_ids) for before, one in zip(num_tokens, (first, second), strict=True)]
    assert num_tokens[0] <= 3
    assert num_tokens[1] == 9
    grammars.released.set()
    while not num_tokens[0] > 5:
        (first,) = run_step(runner, [], ScheduledSequence(0, num_tokens[0], 1, []))
        assert first.failure is None
        num_tokens[0] += len(first.token_ids)


def test_no_step_makes_the_first_masks_of_sequences_that_continue_here(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As after a restart of a worker with many sequences whose masks take long."""
    monkeypatch.setattr(slow_masks, "_SLOW_SECONDS", 0.0)
    grammars = _Counting(released=False)
    num_hostile, length = 12, 20
    runner = make_runner(model, "compiled", block_size=BLOCK, num_blocks=4 * num_hostile + 4, grammars=grammars)
    (letter,) = TOKENIZER.encode("a").ids
    news = [new_sequence(num_hostile, [9, 9])]
    scheduled = [ScheduledSequence(num_hostile, 0, 2, [4 * num_hostile, 4 * num_hostile + 1])]
    for number in range(num_hostile):
        grammar = f'{AMBIGUOUS} | "b"~{number + 1}'  # none shares another's mask
        news.append(NewSequence(number, [5] + [letter] * length, 1, 0, SamplingParams(grammar=grammar)))
        scheduled.append(ScheduledSequence(number, 0, length + 1, list(range(4 * number, 4 * number + 4))))
    run_step(runner, news, *scheduled)
    for num_of_other in range(1, 6):
        runs = [ScheduledSequence(number, length, 1, []) for number in range(num_hostile)]
        other, *hostile = run_step(runner, [], ScheduledSequence(num_hostile, 1 + num_of_other, 1, []), *runs)
        assert len(other.token_ids) == 1
        assert not any(one.token_ids or one.failure for one in hostile)
    end = time.monotonic() + 60
    while grammars.num_ahead < num_hostile:  # the others are still being compiled
        assert time.monotonic() < end
        hostile = run_step(runner, [], *(ScheduledSequence(number, length, 1, []) for number in range(num_hostile)))
        assert not any(one.token_ids or one.failure for one in hostile)
    grammars.released.set()
    waiting = set(range(num_hostile))
    while waiting:
        found = run_step(runner, [], *(ScheduledSequence(number, length, 1, []) for number in sorted(waiting)))
        assert not any(one.failure for one in found)
        waiting -= {one.sequence_id for one in found if one.token_ids}
    assert grammars.num_in_steps == 0


class _Paced:
    """A matcher whose masks take so many seconds each. Its name is noted with each one."""

    def __init__(self, pace: MaskPace, seconds: Iterable[float], name: str = "", made: list[str] | None = None) -> None:
        self.pace, self._seconds, self._name = pace, iter(seconds), name
        self._made = [] if made is None else made
        self.num_pending, self.matching = 0, 0.0

    def advance(self) -> None:
        _compute(self.matching)

    def fill(self, mask: Mask) -> bool:
        _compute(next(self._seconds))
        self._made.append(self._name)
        return True


def _compute(seconds: float) -> None:
    end = time.thread_time() + seconds
    while time.thread_time() < end:
        pass


def _not_called() -> None:
    raise AssertionError


def test_masks_that_take_long_only_at_times_make_a_grammar_slow() -> None:
    timer, pace, mask = MaskTimer(always_measures=False), MaskPace(), np.zeros(1, np.int32)
    rows = [(_Paced(pace, cycle([0.003, 0.0])), mask) for _ in range(16)]

    def fill_all() -> None:
        for matcher, _ in rows:
            matcher.fill(mask)

    for step in range(1, 5):
        assert not pace.is_slow
        timer.run(rows, fill_all)
        if step == 3:  # the first one that is measured, of those that take long
            break
    assert pace.is_slow


def test_only_the_grammars_that_a_step_waited_for_are_slow() -> None:
    timer, mask = MaskTimer(always_measures=True), np.zeros(1, np.int32)
    paces = [MaskPace() for _ in range(4)]
    seconds = [(0.0, 0.002, 0.02, 0.0), (0.03, 0.001, 0.03, 0.0)]
    rows = [(_Paced(pace, one), mask) for pace, one in zip(paces, zip(*seconds, strict=True), strict=True)]
    timer.run(rows, _not_called)
    assert [pace.is_slow for pace in paces] == [False, False, True, False]
    timer.run(rows, _not_called)
    assert [pace.is_slow for pace in paces] == [True, False, True, False]


def test_a_grammar_whose_first_mask_takes_too_long_is_slow_before_any_step(monkeypatch: pytest.MonkeyPatch) -> None:
    _make_none_slow(monkeypatch)
    grammars = tiny_grammars()
    quick = grammars.matcher('start: "b"')
    assert quick.advance() is not None  # it is compiled
    monkeypatch.setattr(slow_masks, "_STEP_SECONDS", 0.0)
    slow = grammars.matcher('start: "a"')
    assert slow.advance() is not None
    assert (quick.is_slow, slow.is_slow) == (False, True)


def test_slow_grammars_have_equal_shares_of_the_thread() -> None:
    masks, made = SlowMasks(1), list[str]()
    held = threading.Event()
    masks._thread.submit(held.wait, 60)
    hostile, other, last = MaskPace(), MaskPace(), MaskPace()
    matchers = [_Paced(hostile, [0.01], "hostile", made) for _ in range(6)]
    matchers += [_Paced(other, [0.025], "other", made) for _ in range(2)]
    waiting = [masks.start(matcher) for matcher in matchers]
    held.set()
    for one in waiting:
        one.result(60)
    assert made == ["hostile", "other", "hostile", "hostile", "other", *["hostile"] * 3]
    held.clear()
    masks._thread.submit(held.wait, 60)
    # It had nothing until now, and has no more than the others for that.
    matchers = [_Paced(last, [0.05], "last", made) for _ in range(3)]
    matchers += [_Paced(hostile, [0.01], "hostile", made) for _ in range(3)]
    waiting = [masks.start(matcher) for matcher in matchers]
    held.set()
    for one in waiting:
        one.result(60)
    assert made[8:] == ["last", "hostile", "hostile", "hostile", "last", "last"]


def test_no_mask_is_made_of_a_sequence_that_has_ended() -> None:
    masks, made = SlowMasks(1), list[str]()
    held = threading.Event()
    masks._thread.submit(held.wait, 60)
    matchers = {name: _Paced(MaskPace(), [0.0], name, made) for name in ("first", "ended", "last")}
    waiting = {name: masks.start(matcher) for name, matcher in matchers.items()}
    del matchers["ended"]
    held.set()
    waiting["first"].result(60)
    waiting["last"].result(60)
    masks._thread.submit(int).result(60)
    assert made == ["first", "last"]
    assert not waiting["ended"].done()


@pytest.mark.parametrize(("num_pending", "is_slow"), [(1, True), (400, False)])
def test_many_tokens_to_be_matched_do_not_make_a_grammar_slow(num_pending: int, is_slow: bool) -> None:
    """As after a recomputation. One token takes as long in a step."""
    masks, pace = SlowMasks(1), MaskPace()
    matcher = _Paced(pace, [0.0])
    matcher.num_pending, matcher.matching = num_pending, 0.05
    masks.start(matcher).result(60)
    assert pace.is_slow is is_slow
    assert pace.turn >= 0.05


def test_a_mask_that_is_being_made_is_not_waited_for_when_its_grammar_is_quick_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Nor is its matcher used for drafts."""
    _make_none_slow(monkeypatch)
    grammars = tiny_grammars()
    held = threading.Event()
    matchers = [grammars.matcher(AMBIGUOUS) for _ in range(2)]
    assert matchers[0].advance() is not None  # it is compiled
    matchers[0].pace.note_slow()
    grammars._slow_masks._thread.submit(held.wait, 60)
    assert not any(matcher.prepare() for matcher in matchers)
    while matchers[0].pace.is_slow:
        matchers[0].pace.note_quick()
    assert all(matcher.is_slow for matcher in matchers)
    assert not any(matcher.prepare() for matcher in matchers)
    held.set()
    for matcher in matchers:
        assert matcher.mask_ahead is not None
        assert matcher.prepare()
        assert not matcher.is_slow


def test_a_sequence_that_continues_is_slow_until_its_first_mask_is_made(monkeypatch: pytest.MonkeyPatch) -> None:
    _make_none_slow(monkeypatch)
    grammars = tiny_grammars()
    assert grammars.matcher(AMBIGUOUS).advance() is not None  # it is compiled
    (letter,) = TOKENIZER.encode("a").ids
    begun, held = threading.Event(), threading.Event()
    advance = GrammarMatcher.advance

    class Held:
        """llguidance's matcher, whose mask takes a while."""

        def __init__(self, state: Any) -> None:
            self._state, self.is_error = state, state.is_error

        def unsafe_compute_mask_ptr(self, *arguments: int) -> None:
            begun.set()
            held.wait(60)
            self._state.unsafe_compute_mask_ptr(*arguments)

    monkeypatch.setattr(GrammarMatcher, "advance", lambda self: Held(advance(self)))
    matcher = grammars.matcher(AMBIGUOUS, [letter] * 5)
    assert not matcher.prepare()
    begun.wait(60)
    assert matcher.is_slow
    assert not matcher.prepare()
    held.set()
    assert matcher.mask_ahead is not None
    assert matcher.prepare()
    assert not matcher.is_slow


def test_a_grammar_is_slow_until_many_of_its_masks_were_quick() -> None:
    pace = MaskPace()
    pace.note_slow()
    for enough in (64, 128, 256):
        for _ in range(enough - 1):
            pace.note_quick()
            assert pace.is_slow
        pace.note_slow()
        for _ in range(enough):
            assert pace.is_slow
            pace.note_quick()
        assert not pace.is_slow
        pace.note_slow()


def test_forced_text_that_takes_long_makes_a_grammar_slow(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(slow_masks, "_SLOW_SECONDS", 0.0)
    grammars = tiny_grammars()
    first, second = (grammars.matcher('start: "a long text"') for _ in range(2))
    assert first.forced_tokens(2)
    assert first.is_slow
    assert second.is_slow


def test_a_mask_that_is_made_ahead_is_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    _make_all_slow(monkeypatch)
    grammars = tiny_grammars()
    (letter,) = TOKENIZER.encode("a").ids
    slow = grammars.matcher(AMBIGUOUS)
    for _ in range(127):
        slow.add(letter)
    while not slow.prepare():
        time.sleep(0.001)
    same = grammars.matcher(AMBIGUOUS, [letter] * 127)
    expected = grammars.start_masks([(0, same)]).result().bits[0]
    assert expected.any()
    assert slow.mask_ahead is not None
    for mask in (slow.mask_ahead, grammars.start_masks([(0, slow)]).result().bits[0]):
        assert (mask == expected).all()
