"""A matcher is a function of its grammar and its tokens. Grammars are compiled once, and bound in work."""

import math
import random
import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from hashlib import sha256
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from llguidance import LLExecutor, LLMatcher, LLTokenizer
from numpy.typing import NDArray

from grammars import CASES, TOKENIZER, VOCAB, text_of, tiny_grammars
from svc_common import grammars as common
from svc_common.grammars import UnsupportedTokenizer
from tiny_model import EOS
from worker_svc import grammar as worker_grammar
from worker_svc import slow_masks
from worker_svc.grammar import GrammarCompiler
from worker_svc.grammar_matcher import GrammarMatcher, _consume
from worker_svc.step import FailureReason


@pytest.fixture(scope="module")
def grammars() -> GrammarCompiler:
    compiler = tiny_grammars()
    assert compiler.warm_up() is None
    return compiler


def _allowed(matchers: Sequence[GrammarMatcher]) -> NDArray[np.bool_]:
    """Whether each token may follow: [matchers, VOCAB]."""
    masks = matchers[0].compiler.start_masks(list(enumerate(matchers))).result()
    assert masks.rows.tolist() == list(range(len(matchers)))
    return masks.as_bools(VOCAB)


def _walk(matcher: GrammarMatcher, rng: random.Random, most: int = 40) -> list[int]:
    """Adds random tokens that may follow, until the text ends. Returns them."""
    tokens: list[int] = []
    while len(tokens) < most and (not tokens or tokens[-1] != EOS):
        (may_follow,) = np.nonzero(_allowed([matcher])[0])
        tokens.append(int(rng.choice(may_follow)))
        matcher.add(tokens[-1])
    return tokens


def _encoded(text: str) -> list[int]:
    return list(TOKENIZER.encode(text).ids)


@pytest.mark.parametrize("name", CASES)
def test_what_it_leads_to_matches(name: str, grammars: GrammarCompiler) -> None:
    case, num_complete = CASES[name], 0
    for seed in range(10):
        tokens = _walk(grammars.matcher(case.grammar), random.Random(seed))
        if tokens[-1] == EOS:
            num_complete += 1
            assert case.matches(text_of(tokens).decode()), text_of(tokens)
    assert num_complete or name == "any"


@pytest.mark.parametrize("name", CASES)
def test_one_that_is_rebuilt_at_any_token_allows_the_same(name: str, grammars: GrammarCompiler) -> None:
    grammar = CASES[name].grammar
    advanced = grammars.matcher(grammar)
    tokens = _walk(grammars.matcher(grammar), random.Random(name))
    for place in range(len(tokens) + 1):
        rebuilt = grammars.matcher(grammar, tokens[:place])
        masks = _allowed([advanced, rebuilt, advanced.copy()])
        assert (masks == masks[0]).all()
        assert masks[0].any()
        if place < len(tokens):
            assert masks[0, tokens[place]]
            advanced.add(tokens[place])


def test_a_copy_is_independent(grammars: GrammarCompiler) -> None:
    matcher = grammars.matcher(CASES["choice"].grammar)
    early = matcher.copy()
    for token in _encoded("ye"):
        matcher.add(token)
    late = matcher.copy()
    _allowed([matcher])
    advanced = matcher.copy()
    matcher.add(_encoded("s")[0])
    masks = _allowed([early, late, advanced, matcher])
    assert [sorted(np.nonzero(mask)[0].tolist()) for mask in masks] == [
        sorted(_encoded("y") + _encoded("n") + _encoded("p")),
        _encoded("s"),
        _encoded("s"),
        [EOS],
    ]


def test_tokens_that_may_follow_and_tokens_that_must(grammars: GrammarCompiler) -> None:
    matcher = grammars.matcher(CASES["choice"].grammar)
    assert matcher.forced_tokens(9) == []
    assert matcher.num_allowed(_encoded("yes")) == 3
    assert matcher.num_allowed([*_encoded("ye"), EOS]) == 2
    matcher.add(_encoded("p")[0])
    assert text_of(matcher.forced_tokens(9)) == b"erhaps"


def test_forced_text_is_computed_once(grammars: GrammarCompiler, monkeypatch: pytest.MonkeyPatch) -> None:
    advance, num_calls = GrammarMatcher.advance, 0

    def counted(matcher: GrammarMatcher) -> LLMatcher | None:
        nonlocal num_calls
        num_calls += 1
        return advance(matcher)

    monkeypatch.setattr(GrammarMatcher, "advance", counted)
    text = "perhaps " * 50
    matcher = grammars.matcher(f'start: "{text}" ("yes" | "no")')
    expected = matcher.forced_tokens(10_000)
    assert text_of(expected) == text.encode()
    for place, token in enumerate(expected):
        assert matcher.forced_tokens(3) == expected[place : place + 3]
        assert num_calls == 1
        matcher.add(token)
    assert matcher.forced_tokens(3) == []
    assert matcher.num_allowed(_encoded("yes")) == 3


@pytest.mark.parametrize("literal", ["<|im_start|>", "<|endoftext|>"])
def test_the_characters_of_a_control_token_force_no_control_token(literal: str, grammars: GrammarCompiler) -> None:
    matcher = grammars.matcher(f'start: "per{literal}haps" ("yes" | "no")')
    assert text_of(matcher.forced_tokens(9)) == b"per"
    for token in _encoded("per") + [token for character in literal for token in _encoded(character)]:
        matcher.add(token)
    assert text_of(matcher.forced_tokens(9)) == b"haps"


def test_other_tokens_than_the_forced_ones_have_others_after_them(grammars: GrammarCompiler) -> None:
    """A token may be a part of a longer one that is forced."""
    matcher = grammars.matcher('start: "perhaps" | "perhaps not"')
    whole = matcher.forced_tokens(9)
    assert text_of(whole) == b"perhaps"
    for token in _encoded("per"):
        matcher.add(token)
    assert text_of(matcher.forced_tokens(9)) == b"haps"


def test_another_thread_goes_on_while_tokens_are_matched() -> None:
    """llguidance keeps Python's lock while it adds a token, as `sum` does."""
    slow: Any = SimpleNamespace(consume_token=partial(sum, range(1_000_000)))
    with ThreadPoolExecutor(1) as pool:
        matching = pool.submit(_consume, slow, [1] * 20)
        num_turns = 0
        while not matching.done():
            num_turns += 1
            time.sleep(0.001)
    assert matching.result()
    assert num_turns >= 15


def test_tokens_beyond_the_limit_of_a_rule_may_not_follow(grammars: GrammarCompiler) -> None:
    end = _encoded("!")
    for num_known in range(4):
        matcher = grammars.matcher(CASES["counted"].grammar, [_encoded("h")[0]] * num_known)
        assert matcher.num_allowed(_encoded("h") * 9) == 3 - num_known
        assert matcher.num_allowed([*_encoded("h") * (3 - num_known), *end, EOS]) == 5 - num_known
    assert matcher.forced_tokens(9) == end


def test_a_grammar_is_compiled_once(grammars: GrammarCompiler, monkeypatch: pytest.MonkeyPatch) -> None:
    compiled: list[str] = []

    def compile_counted(tokenizer: LLTokenizer, text: str) -> LLMatcher:
        compiled.append(text)
        return common.compile_grammar(tokenizer, text)

    monkeypatch.setattr(worker_grammar, "compile_grammar", compile_counted)
    grammar = 'start: "once"'
    matchers = [grammars.matcher(grammar) for _ in range(5)]
    assert (_allowed(matchers).sum(1) == 1).all()
    assert len(compiled) == 1
    assert _allowed([grammars.matcher(grammar)]).sum() == 1
    assert len(compiled) == 1
    grammars._cache.drop(sha256(grammar.encode()).digest())
    assert _allowed([matchers[0]]).sum() == 1, "what is in use stays"
    assert _allowed([grammars.matcher(grammar)]).sum() == 1
    assert len(compiled) == 2


class _CountingExecutor:
    """llguidance's executor, with the number of masks of each call."""

    def __init__(self) -> None:
        self._executor = LLExecutor(2)
        self.num_masks: list[int] = []

    def unsafe_compute_mask_ptr(self, states: list[tuple[LLMatcher, int]], *where: int) -> None:
        self.num_masks.append(len(states))
        self._executor.unsafe_compute_mask_ptr(states, *where)


def test_equal_sequences_share_a_mask(monkeypatch: pytest.MonkeyPatch) -> None:
    """Their state too, of which each takes a copy when it goes on alone. One is rebuilt, as after a move."""
    compiler, executor, rng = tiny_grammars(), _CountingExecutor(), random.Random(5)
    monkeypatch.setattr(compiler, "_executor", executor)
    monkeypatch.setattr(slow_masks, "_STEP_SECONDS", math.inf)  # else they are made one by one on a busy machine
    grammar = CASES["object"].grammar
    siblings = [compiler.matcher(grammar) for _ in range(8)]
    output: list[int] = []
    for _ in range(6):
        (may_follow,) = np.nonzero(_allowed(siblings)[0])
        output.append(int(rng.choice(may_follow)))
        for matcher in siblings:
            matcher.add(output[-1])
    siblings[3] = compiler.matcher(grammar, output)
    masks = _allowed(siblings)
    assert (masks == masks[0]).all()
    assert executor.num_masks == [1] * 7

    executor.num_masks.clear()
    (may_follow,) = np.nonzero(masks[0])
    chosen = [int(may_follow[place % min(3, len(may_follow))]) for place in range(len(siblings))]
    for matcher, token in zip(siblings, chosen, strict=True):
        matcher.add(token)
    shared = _allowed([*siblings, compiler.matcher(CASES["choice"].grammar)])
    assert executor.num_masks == [len(set(chosen)) + 1]
    for mask, token in zip(shared, chosen, strict=False):
        assert (mask == _allowed([compiler.matcher(grammar, [*output, token])])[0]).all()


def test_equal_sequences_fail_together() -> None:
    compiler = tiny_grammars()
    matchers = [compiler.matcher('start: "a"', [100]) for _ in range(3)]
    assert not _allowed(matchers).any()
    assert all(matcher.failure is not None for matcher in matchers)


FAILING = {
    "not a grammar": ("start: (", [], FailureReason.INTERNAL),
    "too large": ("start: /" + "a" * common.MAX_GRAMMAR_BYTES + "/", [], FailureReason.GRAMMAR_TOO_COMPLEX),
    "other output": ('start: "a"', [100], FailureReason.INTERNAL),
    "forced text too long": (
        "start: a0\n" + "\n".join(f'a{n}: "a" a{n + 1}' for n in range(5000)) + '\na5000: "y"',
        _encoded("a"),
        FailureReason.GRAMMAR_TOO_COMPLEX,
    ),
    "a mask too large": ("start: /((a{1,100}){1,100}){1,100}/", _encoded("a") * 50, FailureReason.GRAMMAR_TOO_COMPLEX),
}


@pytest.mark.parametrize("kind", FAILING)
def test_a_failure_concerns_one_row(kind: str, grammars: GrammarCompiler) -> None:
    grammar, output, reason = FAILING[kind]
    failing, other = grammars.matcher(grammar, output), grammars.matcher(CASES["choice"].grammar)
    for _ in range(100):
        masks = _allowed([failing, other])
        assert masks[1].sum() == 3
        if failing.failure is not None:
            break
        failing.add(_encoded("a")[0])
    assert failing.failure is not None
    assert failing.failure.reason is reason
    assert not masks[0].any()
    assert "aaa" not in failing.failure.text
    assert failing.forced_tokens(9) == []
    assert failing.num_allowed([5]) == 0


def test_a_lexer_at_its_limit_is_replaced(grammars: GrammarCompiler, monkeypatch: pytest.MonkeyPatch) -> None:
    """All matchers of a grammar share llguidance's lexer, and with it the number of its states."""
    monkeypatch.setattr(common, "GRAMMAR_LIMITS", common.GrammarLimits(max_lexer_states=300))
    grammar = r"start: /([ab]*a[ab]{6}[xy]|[ab]*b[ab]{7}z)*/"
    matchers = [grammars.matcher(grammar) for _ in range(3)]
    rng = random.Random(3)
    for _ in range(150):
        masks = _allowed(matchers)
        assert all(matcher.failure is None for matcher in matchers)
        for matcher, mask in zip(matchers, masks, strict=True):
            (may_follow,) = np.nonzero(mask)
            matcher.add(int(rng.choice([token for token in may_follow if token != EOS])))
    assert any(matcher._num_lexers for matcher in matchers)


def _count_compilations(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The names of the threads that compile from now on."""
    compiled: list[str] = []

    def compile_counted(tokenizer: LLTokenizer, text: str) -> LLMatcher:
        compiled.append(threading.current_thread().name)
        return common.compile_grammar(tokenizer, text)

    monkeypatch.setattr(worker_grammar, "compile_grammar", compile_counted)
    return compiled


def test_a_limit_of_the_parser_fails_all_siblings_without_compiling_again(monkeypatch: pytest.MonkeyPatch) -> None:
    compiler, compiled = tiny_grammars(), _count_compilations(monkeypatch)
    grammar = 'start: "x" ' + " ".join(['("a" | /[a-z]{1,1}/)?'] * 100)
    matchers = [compiler.matcher(grammar, _encoded("x")) for _ in range(16)]
    monkeypatch.setattr(common, "GRAMMAR_LIMITS", common.GrammarLimits(step_max_items=300))
    assert not _allowed(matchers).any()
    assert {matcher.failure and matcher.failure.reason for matcher in matchers} == {FailureReason.GRAMMAR_TOO_COMPLEX}
    assert len(compiled) == 1


def test_siblings_whose_lexer_reaches_a_limit_share_a_new_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(common, "GRAMMAR_LIMITS", common.GrammarLimits(max_lexer_states=300))
    compiler, compiled = tiny_grammars(), _count_compilations(monkeypatch)
    matchers = [compiler.matcher(r"start: /([ab]*a[ab]{6}[xy]|[ab]*b[ab]{7}z)*/") for _ in range(16)]
    rng = random.Random(3)
    while len(compiled) < 2:
        for matcher, mask in zip(matchers, _allowed(matchers), strict=True):
            assert matcher.failure is None
            matcher.add(rng.choice([token for token in np.nonzero(mask)[0].tolist() if token != EOS]))
    assert len(compiled) <= 1 + worker_grammar._MAX_NEW_LEXERS


def test_drafts_compile_nothing_on_the_thread_of_the_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its stack is too small for the deepest grammars."""
    monkeypatch.setattr(common, "GRAMMAR_LIMITS", common.GrammarLimits(max_lexer_states=300))
    compiler, compiled = tiny_grammars(), _count_compilations(monkeypatch)
    matcher, rng = compiler.matcher(r"start: /([ab]*a[ab]{6}[xy]|[ab]*b[ab]{7}z)*/"), random.Random(3)
    while len(compiled) < 2:
        matcher.forced_tokens(9)
        matcher.num_allowed(_encoded("abababab"))
        (may_follow,) = np.nonzero(_allowed([matcher])[0])
        matcher.add(rng.choice([token for token in may_follow.tolist() if token != EOS]))
        assert matcher.failure is None
    assert threading.current_thread().name not in compiled


def test_without_a_tokenizer_sequences_with_grammars_fail() -> None:
    def load(vocab_size: int) -> LLTokenizer:
        raise UnsupportedTokenizer("no bytes")

    compiler = GrammarCompiler(load, VOCAB)
    assert compiler.warm_up() == "no bytes"
    matcher = compiler.matcher('start: "a"')
    assert not _allowed([matcher]).any()
    assert matcher.failure is not None
