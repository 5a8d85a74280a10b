"""Steps on the device sample what the host samples, also if one is launched behind another."""

import random
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from core_runner import CoreRunner, submission
from drafters import knowing
from large import large_but
from llama_models import VARIANTS, VOCAB
from ordered_dots import order_dots
from prompt_scores import reference_scores, run_prompts, scored
from quire.scheduler.v1.scheduler_pb2 import Submit
from runner_driver import GREEDY, Driver, make_runner
from runner_instance import make_instance
from worker_svc.gpu.logprobs import ReportedRows
from worker_svc.gpu.sample_handle import DeviceSampleHandle
from worker_svc.runner import Runner
from worker_svc.step import NewSequence, SamplingParams, ScheduledSequence, SequenceResult, Step

SCALARS = ("temperature", "top_p", "top_k", "min_p", "typical_p", "presence_penalty", "frequency_penalty",
           "repetition_penalty", "seed", "min_tokens")  # fmt: skip
_rng = random.Random(4)
PROMPTS = [[_rng.randrange(VOCAB) for _ in range(length)] for length in (9, 1, 17)]


@pytest.fixture
def make(device: torch.device) -> Callable[..., Runner]:
    """Makes a runner of a model on the device. It holds few sequences, so graphs are captured quickly."""

    def make(directory: Path, **options: Any) -> Runner:
        return make_runner(directory, "triton", device=device.type, **{"max_sequences": 4, **options})

    return make


Make = Callable[..., Runner]


@pytest.mark.parametrize("cuda_graphs", [False, True])
# Kernels are slow without a GPU. The test of sampled tokens is one step ahead, too, with and without graphs.
@pytest.mark.parametrize("ahead", [0, 1] if torch.cuda.is_available() else [0])
def test_tokens_are_those_of_transformers(
    cuda_graphs: bool,
    ahead: int,
    make: Make,
    tiny_llama: Path,
    reference: Callable[[Path, list[list[int]], int], list[list[int]]],
) -> None:
    driver = Driver(make(tiny_llama, cuda_graphs=cuda_graphs), chunk=7, ahead=ahead)
    assert driver.generate(PROMPTS, 6) == reference(tiny_llama, PROMPTS, 6)


SAMPLED = [
    SamplingParams(temperature=1.0, seed=-5, top_p=0.9, logprobs=3),
    SamplingParams(temperature=0.8, seed=2, top_k=20, repetition_penalty=1.3, frequency_penalty=0.2, logprobs=0),
    SamplingParams(temperature=1.5, seed=7, typical_p=0.4, frequency_penalty=0.3, logprobs=1),
    SamplingParams(presence_penalty=1.5, logit_bias={5: 4.0, 6: -100.0}, min_tokens=3, suppressed_token_ids=(5, 7)),
]
# Few tokens, so that bad words would be completed often.
NAMED = [
    SamplingParams(temperature=1.0, seed=3, allowed_token_ids=(3, 4, 9), bad_words=((3,), (4, 9), (9, 9, 4)),
                   logprobs=1, logprob_token_ids=(4, 90)),
    SamplingParams(temperature=1.0, seed=4, allowed_token_ids=(3, 4, 9), typical_p=0.9, logprobs=0),
    SamplingParams(temperature=1.0, seed=5, allowed_token_ids=(3, 4), bad_words=((3, 3), (3, 4, 3)),
                   frequency_penalty=0.1),
]  # fmt: skip


@pytest.mark.parametrize("cuda_graphs", large_but([False, True], True))
def test_sampled_tokens_equal_those_of_the_host_for_all_parameters(
    cuda_graphs: bool, make: Make, tiny_llama: Path
) -> None:
    on_host = Driver(make_runner(tiny_llama))
    driver = Driver(make(tiny_llama, cuda_graphs=cuda_graphs), chunk=7, ahead=1)
    prompts = [*PROMPTS, PROMPTS[0][:5]]
    assert driver.generate(prompts, 8, SAMPLED) == on_host.generate(prompts, 8, SAMPLED)
    assert list(map(len, driver.logprobs.values())) == [8, 8, 8, 0]
    for sequence_id, expected in on_host.logprobs.items():
        for reported, by_host in zip(driver.logprobs[sequence_id], expected, strict=True):
            assert reported.logprob == pytest.approx(by_host.logprob, abs=1e-4)
            assert [token for token, _ in reported.top] == [token for token, _ in by_host.top]
            assert [value for _, value in reported.top] == pytest.approx([value for _, value in by_host.top], abs=1e-4)


def test_named_tokens_are_barred_and_reported_as_on_the_host(make: Make, tiny_llama: Path) -> None:
    on_host = Driver(make_runner(tiny_llama))
    driver = Driver(make(tiny_llama, cuda_graphs=True), chunk=7, ahead=1)
    tokens = driver.generate(PROMPTS, 12, NAMED)
    assert tokens == on_host.generate(PROMPTS, 12, NAMED)
    first, _, last = (list(pairwise(one)) for one in tokens)
    assert 3 not in tokens[0]
    assert (4, 9) not in first
    assert (3, 3) not in last
    for reported, by_host in zip(driver.logprobs[1], on_host.logprobs[1], strict=True):
        assert list(reported.requested) == pytest.approx(list(by_host.requested), abs=1e-4)
    assert len(driver.logprobs[1][0].requested) == 2
    assert len(driver.logprobs[2][0].requested) == 0


@pytest.mark.parametrize("deterministic", large_but([False, True], False))
def test_log_probabilities_of_prompts_are_those_of_transformers(
    deterministic: bool, make: Make, tiny_llama: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if deterministic:
        order_dots(monkeypatch)
    runner = make(tiny_llama, cuda_graphs=True, deterministic=deterministic)
    prompts = [*PROMPTS, PROMPTS[2] * (5 if torch.cuda.is_available() else 2)]
    new = [scored(place, prompt, 2 * place, logprobs=1) for place, prompt in enumerate(prompts)]
    first, again = (run_prompts(runner, new, chunk) for chunk in (100, 7))
    for place, (logprobs, tokens) in enumerate(first):
        expected = reference_scores(tiny_llama, prompts[place])
        wanted = [float(expected[row, token]) for row, token in enumerate(prompts[place][1:])]
        assert [one.logprob for one in logprobs] == pytest.approx(wanted, abs=1e-4)
        for row, one in enumerate(logprobs):
            assert [value for _, value in one.top] == pytest.approx(
                expected[row].topk(2 * place).values.tolist(), abs=1e-4
            )
        assert again[place][1] == tokens
        assert [one.logprob for one in again[place][0]] == pytest.approx(wanted, abs=1e-4)
    assert not deterministic or again == first


@pytest.mark.parametrize("cuda_graphs", large_but([False, True], True))
def test_a_drafter_changes_no_sampled_token(cuda_graphs: bool, make: Make, tiny_llama: Path) -> None:
    prompts = [*PROMPTS, PROMPTS[0][:5], [7] * 20]
    params = [*SAMPLED, SamplingParams(temperature=1.0, seed=9, min_tokens=4, suppressed_token_ids=(1, 2, 3),
                                       logit_bias={4: 2.0}, logprobs=2)]  # fmt: skip
    params[2] = replace(params[2], frequency_penalty=0.0, allowed_token_ids=(3, 4, 9), bad_words=((3,), (4, 9)))
    on_host = Driver(make_runner(tiny_llama))
    expected = on_host.generate(prompts, 9, params)
    texts = [prompt + tokens for prompt, tokens in zip(prompts, expected, strict=True)]
    runner = make(tiny_llama, cuda_graphs=cuda_graphs, make_drafter=knowing(texts, VOCAB), max_draft_tokens=3)
    core_runner = CoreRunner(make_instance(runner), runner.limits.num_blocks)
    served = core_runner.serve(_submission(i, prompts[i], 9, params[i]) for i in range(len(prompts)))
    for place, tokens in enumerate(expected):
        (one,) = served[str(place)]
        assert one.token_ids == tokens
        logprobs = on_host.logprobs[1 + place]
        assert [value for value, _ in one.logprobs] == pytest.approx(
            [reported.logprob for reported in logprobs], abs=1e-4
        )
    assert core_runner.num_results[2] + core_runner.num_results[3] + core_runner.num_results[4] > 3


def _submission(place: int, prompt: list[int], max_tokens: int, params: SamplingParams) -> Submit:
    options = {name: getattr(params, name) for name in SCALARS}
    submit = submission(str(place), prompt, max_tokens, logprobs=params.logprobs, **options)
    submit.sampling.logit_bias.update(params.logit_bias)
    submit.sampling.suppressed_token_ids.extend(params.suppressed_token_ids)
    submit.sampling.allowed_token_ids.extend(params.allowed_token_ids)
    for word in params.bad_words:
        submit.sampling.bad_words.add(token_ids=word)
    return submit


def test_steps_run_as_graphs_whatever_they_hold(make: Make, tiny_llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Prompts in chunks beside decodes, with and without sampled rows, by graphs that are padded."""
    on_host = Driver(make_runner(tiny_llama))
    runner = make(tiny_llama, cuda_graphs=True, max_step_tokens=40)
    _refuse(monkeypatch, "worker_svc.gpu.executor.forward_inputs")
    prompts = [*PROMPTS, PROMPTS[2] * 3]
    assert Driver(runner, chunk=7, ahead=1).generate(prompts, 5, SAMPLED) == on_host.generate(prompts, 5, SAMPLED)


def test_drafts_of_more_tokens_than_sequences_run_as_graphs(
    make: Make, tiny_llama: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A step samples after each token of a draft, in more rows than it may have sequences."""
    on_host = Driver(make_runner(tiny_llama))
    prompts, params = PROMPTS[:2], [SamplingParams(), SamplingParams(temperature=1.0, seed=4)]
    expected = on_host.generate(prompts, 12, params)
    texts = [prompt + tokens for prompt, tokens in zip(prompts, expected, strict=True)]
    options: dict[str, Any] = {"max_sequences": 2, "max_step_tokens": 32, "max_draft_tokens": 10}
    runner = make(tiny_llama, cuda_graphs=True, make_drafter=knowing(texts, VOCAB), **options)
    _refuse(monkeypatch, "worker_svc.gpu.executor.forward_inputs")
    core_runner = CoreRunner(make_instance(runner), runner.limits.num_blocks)
    served = core_runner.serve(_submission(i, prompts[i], 12, params[i]) for i in range(len(prompts)))
    assert [served[str(place)][0].token_ids for place in range(len(prompts))] == expected
    assert max(core_runner.num_results) > 2


def test_steps_that_no_graph_holds_are_enqueued_kernel_by_kernel(
    make: Make, tiny_llama: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    runner = make(tiny_llama, cuda_graphs=True, max_step_tokens=600)
    _refuse(monkeypatch, "worker_svc.gpu.executor.forward_inputs")
    scheduled = [ScheduledSequence(row, 0, 171, list(range(11 * row, 11 * row + 11))) for row in range(3)]
    step = Step([], [_new(row, [3] * 171) for row in range(3)], scheduled)
    with pytest.raises(AssertionError, match="forward_inputs"):
        runner.step(step)


@pytest.mark.parametrize("cuda_graphs", [False, True])
def test_greedy_steps_search_for_no_limit(
    cuda_graphs: bool,
    make: Make,
    tiny_llama: Path,
    reference: Callable[[Path, list[list[int]], int], list[list[int]]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # What a greedy row does not use, and a minimum that it has reached
    greedy = [GREEDY, SamplingParams(top_k=3, top_p=0.1, logprobs=1), SamplingParams(min_tokens=0, seed=4)]
    expected = reference(tiny_llama, PROMPTS, 4)
    runner = make(tiny_llama, cuda_graphs=cuda_graphs)
    _refuse(monkeypatch, "worker_svc.gpu.step_sampler.adjust_and_sample")
    assert Driver(runner, chunk=7, ahead=1).generate(PROMPTS, 4, greedy) == expected


@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(temperature=0.5),
        SamplingParams(repetition_penalty=1.1),
        SamplingParams(logit_bias={3: 1.0}),
        SamplingParams(min_tokens=2, suppressed_token_ids=(1,)),
        SamplingParams(allowed_token_ids=(3, 4)),
        SamplingParams(bad_words=((3,),)),
    ],
    ids=["temperature", "penalty", "bias", "min_tokens", "allowed", "bad_words"],
)
def test_one_row_that_is_not_greedy_is_sampled(
    params: SamplingParams, make: Make, tiny_llama: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    runner = make(tiny_llama, cuda_graphs=True)
    _refuse(monkeypatch, "worker_svc.gpu.step_sampler.adjust_and_sample")
    new = [_new(1, [3, 4]), _new(2, [5, 6], params)]
    with pytest.raises(AssertionError, match="adjust_and_sample"):
        runner.step(Step([], new, [ScheduledSequence(1, 0, 2, [0]), ScheduledSequence(2, 0, 2, [1])]))


def test_rows_that_only_fill_up_a_graphs_batch_touch_no_block(
    make: Make, tiny_llama: Path, reference: Callable[[Path, list[list[int]], int], list[list[int]]]
) -> None:
    runner = make(tiny_llama, cuda_graphs=True)
    prompts = [[7], [8], [9]]
    new = [_new(sequence_id, prompt) for sequence_id, prompt in enumerate(prompts)]
    sampled: list[list[int]] = [[], [], []]
    for start in range(4):
        # Three sequences in a graph of four, and the first block is one of theirs
        scheduled = [ScheduledSequence(row, start, 1, [row] if start == 0 else []) for row in range(3)]
        for row, result in enumerate(runner.step(Step([], new, scheduled)).sequences):
            sampled[row] += result.token_ids
        new = []
    assert sampled == reference(tiny_llama, prompts, 4)


def test_more_entries_than_are_staged_are_taken_too(make: Make, save_model: Callable[..., Path]) -> None:
    config = VARIANTS["llama"]()
    config.vocab_size = 1300
    directory = save_model(config)
    # All but one token have a bias that the last one makes up for
    params = SamplingParams(logit_bias=dict.fromkeys(range(1200), -90.0) | {1299: 90.0})
    driver = Driver(make(directory, max_sequences=1, cuda_graphs=True), ahead=1)
    assert driver.generate([[1, 2]], 3, params) == [[1299, 1299, 1299]]


def test_penalties_are_counted_again_when_a_slot_was_reused(make: Make, tiny_llama: Path) -> None:
    params = SamplingParams(repetition_penalty=1.4, frequency_penalty=0.5, presence_penalty=0.3)
    ((*expected,),) = Driver(make_runner(tiny_llama)).generate([PROMPTS[0]], 3, params)
    runner = make(tiny_llama, max_sequences=1)
    first = _run(runner, [_new(1, PROMPTS[0], params)], ScheduledSequence(1, 0, 9, [0])).token_ids
    _run(runner, [_new(2, PROMPTS[1], params)], ScheduledSequence(2, 0, 1, [1]))
    for start in (9, 10):
        first = first + _run(runner, [], ScheduledSequence(1, start, 1, [])).token_ids
    assert first == expected


def test_a_sequence_without_a_token_fails_alone(make: Make, save_model: Callable[..., Path]) -> None:
    directory = save_model(VARIANTS["llama"]())
    tensors = load_file(directory / "model.safetensors")
    tensors["model.embed_tokens.weight"][13] = float("nan")
    save_file(tensors, directory / "model.safetensors")
    ((*expected,),) = Driver(make_runner(directory)).generate([[1, 2, 3]], 2)
    runner = make(directory, cuda_graphs=True)
    new = [_new(1, [1, 2, 3]), _new(2, [1, 13, 3])]
    first = runner.launch(Step([], new, [ScheduledSequence(1, 0, 3, [0]), ScheduledSequence(2, 0, 3, [1])]))
    second = runner.launch(Step([], [], [ScheduledSequence(2, 3, 1, []), ScheduledSequence(1, 3, 1, [])]))
    good, bad = runner.finish(first).sequences
    again, on = runner.finish(second).sequences
    assert bad.failure
    assert again.failure == bad.failure
    assert good.token_ids + on.token_ids == expected


def test_a_step_may_sample_nothing(make: Make, tiny_llama: Path) -> None:
    runner = make(tiny_llama)
    nothing = _run(runner, [_new(1, PROMPTS[2])], ScheduledSequence(1, 0, 10, [0]))
    rest = _run(runner, [], ScheduledSequence(1, 10, 7, [1]))
    assert [nothing.token_ids, rest.token_ids] == [[], *Driver(make_runner(tiny_llama)).generate([PROMPTS[2]], 1)]


def test_the_smallest_budgets_suffice(make: Make, tiny_llama: Path) -> None:
    runner = make(tiny_llama, max_sequences=1, max_step_tokens=1, cuda_graphs=True)
    expected = Driver(make_runner(tiny_llama)).generate([PROMPTS[0]], 2, SAMPLED[0])
    assert Driver(runner, chunk=1, ahead=1).generate([PROMPTS[0]], 2, SAMPLED[0]) == expected


def test_an_error_of_the_device_is_raised_by_result() -> None:
    class Failed:
        def query(self) -> bool:
            raise torch.AcceleratorError("lost")

        def synchronize(self) -> None:
            raise torch.AcceleratorError("lost")

    handle = DeviceSampleHandle(torch.empty(8, dtype=torch.uint8), Failed(), 1, ReportedRows.of([], VOCAB))
    assert handle.is_done()
    handle.wait()
    with pytest.raises(torch.AcceleratorError):
        handle.result()


def _refuse(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """A call of the function fails from now on."""

    def refuse(*args: object, **options: object) -> None:
        raise AssertionError(name)

    monkeypatch.setattr(name, refuse)


def _new(sequence_id: int, tokens: list[int], params: SamplingParams = GREEDY) -> NewSequence:
    return NewSequence(sequence_id, tokens, len(tokens), 0, params)


def _run(runner: Runner, new: list[NewSequence], scheduled: ScheduledSequence) -> SequenceResult:
    (result,) = runner.step(Step([], new, [scheduled])).sequences
    return result
