"""What a sequence with a grammar returns matches it, whatever else happens: other sequences, preemption, drafts."""

import random
import threading
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from llguidance import LLMatcher
from safetensors.torch import load_file, save_file

from core_runner import CoreRunner, Served, submission
from drafters import knowing
from grammars import CASES, TOKENIZER, VOCAB, config_for_grammars, is_prefix, text_of, tiny_grammars
from quire.scheduler.v1 import scheduler_pb2 as scheduler_v1
from runner_driver import make_runner
from runner_instance import make_instance
from runner_steps import FixedDrafter, new_sequence, run_step
from svc_common.grammars import MAX_GRAMMAR_BYTES, load_grammar_tokenizer
from tiny_model import EOS
from worker_svc.grammar import GrammarCompiler
from worker_svc.step import FailureReason, SamplingParams, ScheduledSequence, Step, StepOutcome
from worker_svc.wire import outcome_to_proto

BLOCK, PLENTY = 8, 256
_KINDS: list[dict[str, Any]] = [
    {},
    {"temperature": 1.0, "logprobs": 2},
    {"temperature": 1.5, "top_k": 20, "top_p": 0.9, "min_p": 0.01},
    {"temperature": 1.0, "typical_p": 0.9, "frequency_penalty": 0.5, "repetition_penalty": 1.2},
    {"temperature": 1.0, "logit_bias": {40: 5.0, 50: -100.0}},
    {"presence_penalty": 1.0, "logprobs": 0},
]


@pytest.fixture(scope="module")
def model(save_model: Callable[..., Path]) -> Path:
    return save_model(config_for_grammars())


@pytest.fixture(scope="module")
def grammars() -> GrammarCompiler:
    return tiny_grammars()


def _requests(seed: int, count: int) -> dict[str, scheduler_v1.Submit]:
    """Requests with grammars, and every third one without, with all kinds of sampling. Keys name the grammar."""
    rng = random.Random(seed)
    made = {}
    for place in range(count):
        name = "" if place % 3 == 2 else rng.choice(list(CASES))
        options = dict(_KINDS[place % len(_KINDS)]) | {"seed": rng.randrange(2**40)}
        logit_bias = options.pop("logit_bias", {})
        prompt = [rng.randrange(3, 250) for _ in range(rng.choice([1, 7, BLOCK, 20]))]
        submit = submission(f"{name}/{place}", prompt, rng.choice([8, 30, 60]), rng.choice([1, 1, 3]), **options)
        submit.sampling.logit_bias.update(logit_bias)
        submit.sampling.grammar = CASES[name].grammar if name else ""
        submit.stop_token_ids.append(EOS)
        made[submit.key] = submit
    return made


def _serve(
    asked: dict[str, scheduler_v1.Submit], model: Path, grammars: GrammarCompiler, kernels: str, **options: Any
) -> tuple[dict[str, list[Served]], CoreRunner]:
    num_blocks, preemption = options.pop("num_blocks", PLENTY), options.pop("preemption", "auto")
    runner = make_runner(model, kernels, block_size=BLOCK, num_blocks=num_blocks, grammars=grammars, **options)
    core_runner = CoreRunner(make_instance(runner), num_blocks, preemption)
    return core_runner.serve(asked.values()), core_runner


def _tokens(served: dict[str, list[Served]]) -> dict[str, list[list[int]]]:
    return {key: [one.token_ids for one in sequences] for key, sequences in served.items()}


@pytest.mark.parametrize("kernels", ["compiled", "torch"])
def test_every_output_matches_its_grammar(kernels: str, model: Path, grammars: GrammarCompiler) -> None:
    asked = _requests(1, 30)
    served, _ = _serve(asked, model, grammars, kernels)
    num_complete = 0
    for key, sequences in served.items():
        case = CASES.get(key.partition("/")[0])
        for one in sequences if case is not None else ():
            assert case is not None
            if one.token_ids[-1] == EOS:
                num_complete += 1
                assert case.matches(text_of(one.token_ids).decode()), (key, text_of(one.token_ids))
            else:
                assert len(one.token_ids) == asked[key].max_tokens
            assert is_prefix(grammars, case, one.token_ids)
    assert num_complete > 3


def test_others_sample_what_they_do_without_grammars(model: Path, grammars: GrammarCompiler) -> None:
    asked = _requests(2, 24)
    served, _ = _serve(asked, model, grammars, "compiled")
    plain = {key: submit for key, submit in asked.items() if not submit.sampling.grammar}
    alone, _ = _serve(plain, model, grammars, "compiled")
    assert _tokens(alone) == {key: tokens for key, tokens in _tokens(served).items() if key in plain}


class _SlowGrammars(GrammarCompiler):
    """Compiles a grammar when it is released."""

    def __init__(self) -> None:
        super().__init__(partial(load_grammar_tokenizer, TOKENIZER.to_str(), [EOS]), VOCAB)
        assert self.warm_up() is None
        self.released = threading.Event()

    def _compile(self, grammar: str) -> LLMatcher:
        if hasattr(self, "released"):
            assert self.released.wait(60)
        return super()._compile(grammar)


@pytest.mark.parametrize("num_drafts", [0, 2])
@pytest.mark.parametrize("prompt", [[5], list(range(5, 14))], ids=["one token", "nine tokens"])
def test_a_sequence_waits_alone_for_its_grammar(
    prompt: list[int], num_drafts: int, model: Path, grammars: GrammarCompiler
) -> None:
    slow = _SlowGrammars()
    drafter: dict[str, Any] = (
        {"make_drafter": lambda: FixedDrafter(7), "max_draft_tokens": num_drafts} if num_drafts else {}
    )
    runner = make_runner(model, "compiled", block_size=BLOCK, num_blocks=16, grammars=slow, **drafter)
    params = SamplingParams(grammar=CASES["choice"].grammar)
    news = [new_sequence(0, prompt, params), new_sequence(1, [9, 9])]
    end = len(prompt)
    steps = [
        Step([], news, [ScheduledSequence(0, 0, end, [0, 1]), ScheduledSequence(1, 0, 2, [2, 3])], step_id=0),
        # As the scheduler plans it before it knows that the first step returned nothing.
        Step([], [], [ScheduledSequence(0, end, 1, []), ScheduledSequence(1, 2, 1, [])], step_id=1),
    ]
    launched = [runner.launch(step) for step in steps]
    for each in launched:
        first, second = runner.finish(each).sequences
        assert (first.token_ids, first.failure, len(second.token_ids)) == ([], None, 1)
    slow.released.set()
    tokens: list[int] = []
    for _ in range(1000):
        (result,) = run_step(runner, [], ScheduledSequence(0, end + max(0, len(tokens) - 1), 1, []))
        assert result.failure is None
        tokens += result.token_ids
        if len(tokens) == 3:
            break
    runner = make_runner(model, "compiled", block_size=BLOCK, num_blocks=16, grammars=grammars)
    (result,) = run_step(runner, news[:1], ScheduledSequence(0, 0, end, [0, 1]))
    expected = result.token_ids
    while len(expected) < 3:
        (result,) = run_step(runner, [], ScheduledSequence(0, end + len(expected) - 1, 1, []))
        expected = [*expected, *result.token_ids]
    assert tokens == expected


CIRCUMSTANCES: dict[str, dict[str, Any]] = {
    "in chunks": {"max_step_tokens": 19},
    "few beside each other": {"max_sequences": 3},
    "swapped": {"num_blocks": 11, "preemption": "swap", "num_host_blocks": 64},
    "computed again": {"num_blocks": 11, "preemption": "recompute"},
}


@pytest.mark.parametrize("drafts", [False, True], ids=["plain", "drafts"])
@pytest.mark.parametrize("name", CIRCUMSTANCES)
def test_circumstances_change_no_token(name: str, drafts: bool, model: Path, grammars: GrammarCompiler) -> None:
    asked = _requests(3, 40)
    expected, _ = _serve(asked, model, grammars, "compiled")
    options = dict(CIRCUMSTANCES[name])
    if drafts:
        texts = [[*asked[key].prompt_token_ids, *one.token_ids] for key, found in expected.items() for one in found]
        options["make_drafter"] = knowing(texts, VOCAB, 3)
    served, core_runner = _serve(asked, model, tiny_grammars(), "compiled", **options)
    assert _tokens(served) == _tokens(expected)
    assert (core_runner.core.totals.preemptions > 3) == ("preemption" in CIRCUMSTANCES[name])
    if drafts:
        assert sum(core_runner.num_results[count] for count in range(2, 6)) > 5


@pytest.mark.parametrize("native", [True, False])
def test_a_device_samples_what_the_host_does(native: bool, model: Path, grammars: GrammarCompiler) -> None:
    """Prompts are computed kernel by kernel, decodes by graphs; also by transformers' own modules."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    asked = {key: submit for key, submit in _requests(5, 6).items() if submit.n == 1}
    for submit in asked.values():
        submit.max_tokens = min(6, submit.max_tokens)
    expected, _ = _serve(asked, model, grammars, "torch", native=native)
    options = {"device": device, "cuda_graphs": True, "max_sequences": 2, "native": native}
    served, _ = _serve(asked, model, tiny_grammars(), "triton", **options)
    assert _tokens(served) == _tokens(expected)


def test_a_device_verifies_drafts(model: Path, grammars: GrammarCompiler) -> None:
    device = "cuda" if torch.cuda.is_available() else "cpu"
    submit = submission("date", [5, 6, 7], 20, temperature=1.0, seed=3)
    submit.sampling.grammar = CASES["date"].grammar
    submit.stop_token_ids.append(EOS)
    expected, _ = _serve({"date": submit}, model, grammars, "torch")
    drafter = knowing([[5, 6, 7, *expected["date"][0].token_ids]], VOCAB, 3)
    options = {"device": device, "max_sequences": 4, "make_drafter": drafter}
    served, core_runner = _serve({"date": submit}, model, tiny_grammars(), "triton", **options)
    assert _tokens(served) == _tokens(expected)
    assert sum(core_runner.num_results[count] for count in range(2, 6)) > 0


def compiled(grammars: GrammarCompiler, grammar: str) -> SamplingParams:
    """With a grammar whose compilation has ended: a step waits for it only a short time."""
    matcher = grammars.matcher(grammar)
    while not matcher.is_compiled:
        time.sleep(0.001)
    return SamplingParams(grammar=grammar)


@pytest.mark.parametrize("kernels", ["compiled", "torch", "triton"])
def test_a_grammar_that_fails_ends_its_sequence(kernels: str, model: Path, grammars: GrammarCompiler) -> None:
    device = "cuda" if kernels == "triton" and torch.cuda.is_available() else "cpu"
    runner = make_runner(model, kernels, device=device, grammars=grammars, max_sequences=4)
    too_large = compiled(grammars, "start: /" + "a" * MAX_GRAMMAR_BYTES + "/")
    (failed,) = run_step(runner, [new_sequence(1, [5], too_large)], ScheduledSequence(1, 0, 1, [0]))
    assert (failed.token_ids, failed.failure_reason) == ([], FailureReason.GRAMMAR_TOO_COMPLEX)
    new = [new_sequence(2, [5], compiled(grammars, "start: (")), new_sequence(3, [5])]
    failed, other = run_step(runner, new, ScheduledSequence(2, 0, 1, [1]), ScheduledSequence(3, 0, 1, [2]))
    assert (failed.failure, failed.failure_reason) == ("its grammar cannot be compiled", FailureReason.INTERNAL)
    assert len(other.token_ids) == 1
    assert outcome_to_proto(StepOutcome([failed, other], 0.0)).failures[0].message == failed.failure


def test_a_worker_without_grammars_refuses_the_sequence(model: Path) -> None:
    runner = make_runner(model, "torch")
    sequence = new_sequence(1, [5], SamplingParams(grammar=CASES["date"].grammar))
    (failed,) = run_step(runner, [sequence], ScheduledSequence(1, 0, 1, [0]))
    assert failed.failure == "this worker applies no grammars"


class _Silent:
    """Never drafts."""

    def draft(self, tokens: object, max_tokens: int) -> list[int]:
        return []


def test_tokens_that_a_grammar_forces_are_drafted(model: Path, grammars: GrammarCompiler) -> None:
    submit = submission("k", [5, 6, 7], 30)
    submit.sampling.grammar = 'start: "hello" ("," | ";") "a fixed text\\n" ("." | "!")'
    submit.stop_token_ids.append(EOS)
    expected, without = _serve({"k": submit}, model, grammars, "compiled")
    served, core_runner = _serve({"k": submit}, model, grammars, "compiled", make_drafter=_Silent)
    assert _tokens(served) == _tokens(expected)
    assert sum(core_runner.num_results.values()) * 2 < sum(without.num_results.values())


@pytest.mark.parametrize("kernels", ["compiled", "torch", "triton"])
def test_a_sequence_without_numbers_fails_also_where_its_grammar_forces_tokens(
    kernels: str, save_model: Callable[..., Path], grammars: GrammarCompiler
) -> None:
    directory = save_model(config_for_grammars())
    tensors = load_file(directory / "model.safetensors")
    tensors["model.embed_tokens.weight"][13] = torch.nan
    save_file(tensors, directory / "model.safetensors")
    device = "cuda" if kernels == "triton" and torch.cuda.is_available() else "cpu"
    options: dict[str, Any] = {"grammars": grammars, "make_drafter": _Silent, "max_sequences": 4}
    runner = make_runner(directory, kernels, device=device, block_size=BLOCK, **options)
    new = [new_sequence(1, [13], compiled(grammars, 'start: "a fixed text"'))]
    launched = runner.launch(Step([], new, [ScheduledSequence(1, 0, 1, [0], max_extra_tokens=2)]))
    outcome = runner.finish(launched)
    (first,) = outcome.sequences
    assert (first.token_ids, first.failure, outcome.draft_tokens) == ([], None, 2)
    (second,) = run_step(runner, [], ScheduledSequence(1, 1, 1, [], max_extra_tokens=2))
    assert second.failure == "there is no token to sample: the logits are not finite, or all tokens are suppressed"


def test_what_a_grammar_refuses_is_not_computed(model: Path, grammars: GrammarCompiler) -> None:
    runner = make_runner(model, "compiled", grammars=grammars, make_drafter=lambda: FixedDrafter(*b"20"))
    params = SamplingParams(grammar='start: /[ab]/ /[a-z]{0,5}/ "."', temperature=1.0, seed=2)
    run_step(runner, [new_sequence(1, [5], params)], ScheduledSequence(1, 0, 1, [0]))
    launched = runner.launch(Step([], [], [ScheduledSequence(1, 1, 1, [], max_extra_tokens=2)]))
    assert runner.finish(launched).draft_tokens == 0
