"""The process that checks constraints, and the results that are kept for each tenant."""

import faulthandler
import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest
from llguidance import LLTokenizer

from gateway_requests import VOCAB_SIZE, over_http, refused
from gateway_svc import grammar_checker, grammar_process
from gateway_svc.constraints import ConstraintProblem, UnvalidatedConstraint
from gateway_svc.field_paths import Field, contract_field_path
from gateway_svc.grammar_checker import MAX_CACHED, CheckResults, GrammarChecker
from gateway_svc.tokenizer import ModelTokenizer
from svc_common.errors import QuireError, Reason
from tiny_model import EOS


async def test_a_result_is_not_shared_with_another_tenant(
    grammars: GrammarChecker, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The time of a check would show that another tenant has sent the same constraint."""
    asked: list[dict[str, Any]] = []
    ask = grammars._ask

    def counted(request: dict[str, Any], vocab_size: int) -> dict[str, Any]:
        asked.append(request)
        return ask(request, vocab_size)

    monkeypatch.setattr(grammars, "_ask", counted)
    constraint = UnvalidatedConstraint(Field.REGEX, "not sent before")

    for tenant in ("a", "b", "a", "b"):
        assert await grammars.grammar(constraint, VOCAB_SIZE, contract_field_path, tenant)

    assert len(asked) == 2


async def test_the_oldest_results_are_forgotten(grammars: GrammarChecker, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grammars, "_ask", lambda request, _: {"grammar": request["text"]})
    for number in range(MAX_CACHED + 10):
        constraint = UnvalidatedConstraint(Field.REGEX, f"r{number}")
        assert await grammars.grammar(constraint, VOCAB_SIZE, contract_field_path) == f"r{number}"

    assert len(grammars._results) == MAX_CACHED


def test_a_tenant_without_results_takes_no_memory() -> None:
    results = CheckResults()
    for number in range(MAX_CACHED + 10):
        results.put(f"tenant {number}", b"digest", {})

    assert len(results) == len(results._of_tenants) == MAX_CACHED


async def test_a_tenant_displaces_no_result_of_another(
    grammars: GrammarChecker, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[str] = []

    def ask(request: dict[str, Any], vocab_size: int) -> dict[str, Any]:
        asked.append(request["text"])
        return {"grammar": request["text"]}

    async def check(text: str, tenant: str) -> None:
        await grammars.grammar(UnvalidatedConstraint(Field.REGEX, text), VOCAB_SIZE, contract_field_path, tenant)

    monkeypatch.setattr(grammars, "_ask", ask)
    await check("of the other", "small")
    for number in range(MAX_CACHED + 10):
        await check(f"s{number}", "large")
    asked.clear()
    await check("of the other", "small")
    await check("s0", "large")

    assert asked == ["s0"]


def test_a_check_that_waits_is_ended(monkeypatch: pytest.MonkeyPatch, vocabulary: LLTokenizer) -> None:
    monkeypatch.setattr(grammar_process, "_check", lambda *_: time.sleep(3600))
    monkeypatch.setattr(grammar_process, "CHECK_DEADLINE_SECONDS", 0.1)
    assert "took too long" in grammar_process._check_in_fork({}, vocabulary)["unavailable"]


def end_by(number: int) -> None:
    """Sends a signal to this process."""
    faulthandler.disable()  # pytest's writes stacks
    os.kill(os.getpid(), number)


@pytest.mark.parametrize("number", [signal.SIGPROF, signal.SIGABRT, signal.SIGSEGV])
def test_a_check_that_a_limit_ends_refuses_the_constraint(
    number: int, monkeypatch: pytest.MonkeyPatch, vocabulary: LLTokenizer
) -> None:
    monkeypatch.setattr(grammar_process, "_check", lambda *_: end_by(number))
    assert grammar_process._check_in_fork({}, vocabulary)["problem"] == ConstraintProblem.TOO_COMPLEX.value


def test_a_check_whose_result_exceeds_its_memory_refuses_the_constraint(
    monkeypatch: pytest.MonkeyPatch, vocabulary: LLTokenizer
) -> None:
    monkeypatch.setattr(grammar_process, "_check", lambda *_: [bytearray(2 * grammar_process.CHECK_BYTES)])
    assert grammar_process._check_in_fork({}, vocabulary)["problem"] == ConstraintProblem.TOO_COMPLEX.value


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_a_check_that_something_else_ends_says_nothing_of_the_constraint(
    number: int, monkeypatch: pytest.MonkeyPatch, vocabulary: LLTokenizer
) -> None:
    """Linux kills a check when memory runs out."""
    monkeypatch.setattr(grammar_process, "_check", lambda *_: end_by(number))
    assert "was ended" in grammar_process._check_in_fork({}, vocabulary)["unavailable"]


async def test_a_check_without_a_result_may_be_tried_again(
    model_directory: Path, tokenizer: ModelTokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    checker = GrammarChecker(model_directory / "tokenizer.json", [EOS])
    try:
        await over_http(tokenizer, grammars=checker, prompt="a", regex="a")
        with monkeypatch.context() as patched:
            patched.setattr(
                grammar_checker, "receive", lambda stream: grammar_process.receive(stream) and {"unavailable": "why"}
            )
            reason, _ = await refused(over_http(tokenizer, grammars=checker, prompt="a", regex="b"))
        assert reason is Reason.CAPACITY_EXHAUSTED
        assert (await over_http(tokenizer, grammars=checker, prompt="a", regex="b")).grammar
    finally:
        checker.close()


async def test_a_check_that_fails_in_an_unexpected_way_is_made_again(
    grammars: GrammarChecker, monkeypatch: pytest.MonkeyPatch
) -> None:
    failed = {"problem": "invalid", "message": "cannot be checked", "field": None, "unexpected": "RuntimeError"}
    answers = [failed, {"grammar": "checked"}]
    monkeypatch.setattr(grammars, "_ask", lambda request, vocab_size: answers.pop(0))
    constraint = UnvalidatedConstraint(Field.REGEX, "fails once")
    with pytest.raises(QuireError):
        await grammars.grammar(constraint, VOCAB_SIZE, contract_field_path)

    assert await grammars.grammar(constraint, VOCAB_SIZE, contract_field_path) == "checked"


async def test_a_check_that_fails_in_an_unexpected_way_is_logged_without_the_text(
    grammars: GrammarChecker, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    # The tokens of a constraint that no client can send.
    constraint = UnvalidatedConstraint(Field.REGEX, "secret")
    monkeypatch.setattr("gateway_svc.grammar_checker.request_of", lambda _: {"field": "constraint.regex", "text": 7,
        "choices": [], "whitespace": "", "closes_objects": False})  # fmt: skip
    with pytest.raises(QuireError) as error:
        await grammars.grammar(constraint, VOCAB_SIZE, contract_field_path)

    assert error.value.reason is Reason.GRAMMAR_INVALID
    assert "could not be checked" in caplog.text
    assert "secret" not in caplog.text


async def test_a_checker_whose_process_ended_starts_another(model_directory: Path, tokenizer: ModelTokenizer) -> None:
    checker = GrammarChecker(model_directory / "tokenizer.json", [EOS])
    try:
        await over_http(tokenizer, grammars=checker, prompt="a", regex="a")
        assert checker._process is not None
        checker._process.kill()
        checker._process.wait()
        assert (await over_http(tokenizer, grammars=checker, prompt="a", regex="b")).grammar
    finally:
        checker.close()


async def test_a_model_without_end_of_text_has_no_constraints(model_directory: Path, tokenizer: ModelTokenizer) -> None:
    checker = GrammarChecker(model_directory / "tokenizer.json", [])
    try:
        for _ in range(2):
            reason, field = await refused(over_http(tokenizer, grammars=checker, prompt="a", regex="a"))
            assert (reason, field) == (Reason.FEATURE_UNSUPPORTED, None)
    finally:
        checker.close()
