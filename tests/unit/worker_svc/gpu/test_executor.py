"""Steps on the device draw what the host draws: fed, drawn and filled up there, one launched ahead of the other.

Without a GPU the same code runs in Triton's interpreter, and in place of graphs what they would have captured.
"""

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from llama_models import VARIANTS, VOCAB
from runner_driver import GREEDY, Driver, make_runner
from worker_svc.gpu.executor import DeviceSampleHandle
from worker_svc.runner import Runner
from worker_svc.step import NewSequence, SamplingParams, ScheduledSequence, SequenceResult, Step

_rng = random.Random(4)
PROMPTS = [[_rng.randrange(VOCAB) for _ in range(length)] for length in (9, 1, 17)]


@pytest.fixture
def make(device: torch.device) -> Callable[..., Runner]:
    """A runner of a model on the device, with room for few sequences: their graphs are captured soon."""

    def make(directory: Path, **options: Any) -> Runner:
        return make_runner(directory, "fused", device=device.type, **{"max_sequences": 4, **options})

    return make


Make = Callable[..., Runner]


@pytest.mark.parametrize("cuda_graphs", [False, True])
@pytest.mark.parametrize("ahead", [0, 1])
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
    SamplingParams(presence_penalty=1.5, logit_bias={5: 4.0, 6: -100.0}, min_tokens=3, suppressed_token_ids=(5, 7)),
]


@pytest.mark.parametrize("cuda_graphs", [False, True])
def test_draws_are_the_hosts_whatever_a_request_asks_for(cuda_graphs: bool, make: Make, tiny_llama: Path) -> None:
    on_host = Driver(make_runner(tiny_llama))
    driver = Driver(make(tiny_llama, cuda_graphs=cuda_graphs), chunk=7, ahead=1)
    assert driver.generate(PROMPTS, 8, SAMPLED) == on_host.generate(PROMPTS, 8, SAMPLED)
    assert list(map(len, driver.logprobs.values())) == [8, 8, 0]
    for sequence_id, expected in on_host.logprobs.items():
        for told, by_host in zip(driver.logprobs[sequence_id], expected, strict=True):
            assert told.logprob == pytest.approx(by_host.logprob, abs=1e-4)
            assert [token for token, _ in told.top] == [token for token, _ in by_host.top]
            assert [value for _, value in told.top] == pytest.approx([value for _, value in by_host.top], abs=1e-4)


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


def test_penalties_are_counted_anew_when_a_slot_was_passed_on(make: Make, tiny_llama: Path) -> None:
    params = SamplingParams(repetition_penalty=1.4, frequency_penalty=0.5, presence_penalty=0.3)
    ((*expected,),) = Driver(make_runner(tiny_llama)).generate([PROMPTS[0]], 3, params)
    runner = make(tiny_llama, max_sequences=1)
    first = _run(runner, [_new(1, PROMPTS[0], params)], ScheduledSequence(1, 0, 9, [0])).token_ids
    _run(runner, [_new(2, PROMPTS[1], params)], ScheduledSequence(2, 0, 1, [1]))
    for start in (9, 10):
        first = first + _run(runner, [], ScheduledSequence(1, start, 1, [])).token_ids
    assert first == expected


def test_a_token_that_never_comes_fails_its_sequence_alone(make: Make, save_model: Callable[..., Path]) -> None:
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


def test_a_step_may_draw_nothing(make: Make, tiny_llama: Path) -> None:
    runner = make(tiny_llama)
    nothing = _run(runner, [_new(1, PROMPTS[2])], ScheduledSequence(1, 0, 10, [0]))
    rest = _run(runner, [], ScheduledSequence(1, 10, 7, [1]))
    assert [nothing.token_ids, rest.token_ids] == [[], *Driver(make_runner(tiny_llama)).generate([PROMPTS[2]], 1)]


def test_the_smallest_budgets_suffice(make: Make, tiny_llama: Path) -> None:
    runner = make(tiny_llama, max_sequences=1, max_step_tokens=1, cuda_graphs=True)
    expected = Driver(make_runner(tiny_llama)).generate([PROMPTS[0]], 2, SAMPLED[0])
    assert Driver(runner, chunk=1, ahead=1).generate([PROMPTS[0]], 2, SAMPLED[0]) == expected


def test_what_fails_on_the_device_is_raised_where_the_draws_are_asked_for() -> None:
    class Failed:
        def query(self) -> bool:
            raise torch.AcceleratorError("lost")

        def synchronize(self) -> None:
            raise torch.AcceleratorError("lost")

    handle = DeviceSampleHandle(torch.empty(8, dtype=torch.uint8), Failed(), 1, [])
    assert handle.is_done()
    handle.wait()
    with pytest.raises(torch.AcceleratorError):
        handle.result()


def _new(sequence_id: int, tokens: list[int], params: SamplingParams = GREEDY) -> NewSequence:
    return NewSequence(sequence_id, tokens, len(tokens), 0, params)


def _run(runner: Runner, new: list[NewSequence], scheduled: ScheduledSequence) -> SequenceResult:
    (result,) = runner.step(Step([], new, [scheduled])).sequences
    return result
