"""A runner computes what transformers does whatever is chunked and batched, and one sequence's fault is its own."""

import random
from collections.abc import Callable
from collections.abc import Sequence as Items
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from llama_models import VARIANTS, VOCAB
from runner_driver import GREEDY, Driver, make_runner
from worker_svc.batch import Batch
from worker_svc.block_copier import HostBlockCopier, RateLimiter
from worker_svc.description import WorkerLimits
from worker_svc.errors import DeviceLost
from worker_svc.executor import HostExecutor, HostSampleHandle, SampleHandle, run_inline
from worker_svc.runner import Runner
from worker_svc.sampler import SamplerOutput
from worker_svc.sequences import Sequence
from worker_svc.step import NewSequence, SamplingParams, ScheduledSequence, SequenceResult, Step

NO_MOVER = HostBlockCopier(torch.empty(0, 1), torch.empty(0, 1), run_inline, RateLimiter(None))
Generate = Callable[[Path, list[list[int]], int], list[list[int]]]

_rng = random.Random(2)
PROMPTS = [[_rng.randrange(VOCAB) for _ in range(length)] for length in (1, 15, 16, 17, 65, 111)]


def _new(sequence_id: int, tokens: list[int], params: SamplingParams = GREEDY) -> NewSequence:
    return NewSequence(sequence_id, tokens, len(tokens), 0, params)


def _step(runner: Runner, new: list[NewSequence], *scheduled: ScheduledSequence) -> list[SequenceResult]:
    return runner.step(Step([], new, list(scheduled))).sequences


@pytest.mark.parametrize("chunk", [512, 7, 1])
@pytest.mark.parametrize("block_size", [16, 8])
def test_tokens_are_those_of_transformers(chunk: int, block_size: int, tiny_llama: Path, reference: Generate) -> None:
    runner = make_runner(tiny_llama, block_size=block_size)
    assert Driver(runner, chunk).generate(PROMPTS, 24) == reference(tiny_llama, PROMPTS, 24)


def test_sequences_that_come_later_share_nothing_with_those_before(tiny_llama: Path, reference: Generate) -> None:
    driver = Driver(make_runner(tiny_llama, num_blocks=24))
    expected = reference(tiny_llama, PROMPTS, 8)
    assert driver.generate(PROMPTS, 8) == expected
    assert driver.generate(PROMPTS[::-1], 8) == expected[::-1]


def test_random_draws_do_not_depend_on_chunks_or_batch(tiny_llama: Path) -> None:
    params = SamplingParams(temperature=1.0, top_p=0.95, seed=11, repetition_penalty=1.2, frequency_penalty=0.3)
    every = [replace(params, seed=seed) for seed in range(len(PROMPTS))]
    together = Driver(make_runner(tiny_llama)).generate(PROMPTS, 12, every)
    driver = Driver(make_runner(tiny_llama), chunk=5)
    alone = [driver.generate([prompt], 12, one)[0] for prompt, one in zip(PROMPTS, every, strict=True)]
    assert together == alone
    assert len({tuple(tokens) for tokens in together}) == len(PROMPTS)


def test_steps_launched_ahead_draw_the_same(tiny_llama: Path) -> None:
    params = SamplingParams(temperature=1.0, repetition_penalty=1.2, frequency_penalty=0.3, min_tokens=3,
                            suppressed_token_ids=(5, 6, 7), logprobs=2)  # fmt: skip
    every = [replace(params, seed=seed) for seed in range(len(PROMPTS))]
    in_turn, ahead = (Driver(make_runner(tiny_llama), chunk=20, ahead=ahead) for ahead in (0, 1))
    assert ahead.generate(PROMPTS, 12, every) == in_turn.generate(PROMPTS, 12, every)
    assert ahead.logprobs == in_turn.logprobs


def test_a_sequence_may_begin_behind_a_cached_prefix(tiny_llama: Path) -> None:
    prompt = PROMPTS[-1]
    runner = make_runner(tiny_llama)
    blocks = list(range(7))
    (whole,) = _step(runner, [_new(1, prompt)], ScheduledSequence(1, 0, len(prompt), blocks))
    (rest,) = _step(runner, [_new(2, prompt)], ScheduledSequence(2, 96, len(prompt) - 96, [*blocks[:6], 20]))
    assert rest.token_ids == whole.token_ids


def test_keys_and_values_before_store_start_are_not_written(tiny_llama: Path) -> None:
    runner = make_runner(tiny_llama)
    prompt = PROMPTS[2]
    # Another sequence's block is named where this one's prompt would go: it must come through unharmed.
    (before,) = _step(runner, [_new(1, prompt)], ScheduledSequence(1, 0, 16, [3]))
    _step(runner, [_new(2, prompt[::-1])], ScheduledSequence(2, 0, 16, [3], num_cached_tokens=16))
    (after,) = _step(runner, [_new(3, prompt)], ScheduledSequence(3, 15, 1, [3], num_cached_tokens=16))
    assert after.token_ids == before.token_ids


def test_a_preempted_sequence_goes_on_where_it_was(tiny_llama: Path) -> None:
    prompt = PROMPTS[3]
    params = SamplingParams(temperature=1.0, seed=3, presence_penalty=0.7, min_tokens=20, suppressed_token_ids=(1, 2))
    ((*tokens,),) = Driver(make_runner(tiny_llama)).generate([prompt], 8, params)
    runner = make_runner(tiny_llama)
    again = NewSequence(1, [*prompt, *tokens[:5]], len(prompt), 0, params)
    (result,) = _step(runner, [again], ScheduledSequence(1, 0, 22, [4, 9]))
    sampled = list(result.token_ids)
    for start in (22, 23):
        (result,) = _step(runner, [], ScheduledSequence(1, start, 1, []))
        sampled += result.token_ids
    assert sampled == tokens[5:]


def test_a_token_is_drawn_only_where_the_last_known_one_is_reached(tiny_llama: Path) -> None:
    runner = make_runner(tiny_llama)
    (first,) = _step(runner, [_new(1, [5] * 20)], ScheduledSequence(1, 0, 19, [0, 1]))
    (second,) = _step(runner, [], ScheduledSequence(1, 19, 1, []))
    assert (first.token_ids, len(second.token_ids)) == ([], 1)


def test_tokens_are_counted_by_kind(tiny_llama: Path) -> None:
    runner = make_runner(tiny_llama)
    first = runner.step(Step([], [_new(1, [5] * 20)], [ScheduledSequence(1, 0, 20, [0, 1])]))
    second = runner.step(Step([], [_new(2, [6])], [ScheduledSequence(1, 20, 1, []), ScheduledSequence(2, 0, 1, [2])]))
    assert (first.prefill_tokens, first.decode_tokens) == (20, 0)
    assert (second.prefill_tokens, second.decode_tokens) == (1, 1)
    assert second.busy_seconds > 0


BAD_NEW = {
    "empty": NewSequence(9, [], 0, 0, GREEDY),
    "no prompt": NewSequence(9, [1, 2], 0, 0, GREEDY),
    "prompt beyond the tokens": NewSequence(9, [1, 2], 3, 0, GREEDY),
    "token beyond the vocabulary": _new(9, [1, VOCAB]),
    "bias beyond the vocabulary": _new(9, [1], SamplingParams(logit_bias={VOCAB: 1.0})),
    "suppressed beyond the vocabulary": _new(9, [1], SamplingParams(suppressed_token_ids=(VOCAB,))),
    "longer than the context": _new(9, [1] * 257),
}
BAD_SCHEDULED = {
    "unknown": ScheduledSequence(77, 0, 1, [40]),
    "no tokens": ScheduledSequence(9, 0, 0, [40]),
    "more than is known": ScheduledSequence(9, 0, 4, [40]),
    "block out of range": ScheduledSequence(9, 0, 3, [64]),
    "no block": ScheduledSequence(9, 0, 3, []),
    "over the token budget": ScheduledSequence(9, 0, 513, list(range(33))),
}


def _check_alone(runner: Runner, bad: list[NewSequence], item: ScheduledSequence, expected: list[int]) -> None:
    """The bad sequence fails, in this step and later, while its neighbour gets its tokens."""
    prompt = PROMPTS[1]
    good = ScheduledSequence(1, 0, len(prompt), [50])
    first, failed = _step(runner, [_new(1, prompt), *bad], good, item)
    assert failed.failure
    assert failed.token_ids == []
    second, again = _step(runner, [], ScheduledSequence(1, len(prompt), 1, []), item._replace(start=3, num_tokens=1))
    assert again.failure
    assert first.token_ids + second.token_ids == expected


@pytest.mark.parametrize("name", BAD_NEW)
def test_a_malformed_sequence_fails_alone(name: str, tiny_llama: Path, reference: Generate) -> None:
    (expected,) = reference(tiny_llama, [PROMPTS[1]], 2)
    _check_alone(make_runner(tiny_llama), [BAD_NEW[name]], ScheduledSequence(9, 0, 1, [40]), expected)


@pytest.mark.parametrize("name", BAD_SCHEDULED)
def test_a_bad_schedule_fails_alone(name: str, tiny_llama: Path, reference: Generate) -> None:
    (expected,) = reference(tiny_llama, [PROMPTS[1]], 2)
    _check_alone(make_runner(tiny_llama), [_new(9, [1, 2, 3])], BAD_SCHEDULED[name], expected)


@pytest.mark.parametrize(("start", "num_tokens"), [(1, 1), (3, 1), (0, 3)])
def test_a_start_that_does_not_follow_fails(start: int, num_tokens: int, tiny_llama: Path) -> None:
    runner = make_runner(tiny_llama)
    _step(runner, [_new(1, [1, 2, 3, 4])], ScheduledSequence(1, 0, 2, [0]))
    (result,) = _step(runner, [], ScheduledSequence(1, start, num_tokens, []))
    assert result.failure


def test_a_sequence_scheduled_twice_in_a_step_fails(tiny_llama: Path) -> None:
    runner = make_runner(tiny_llama)
    item = ScheduledSequence(1, 0, 2, [0])
    assert _step(runner, [_new(1, [1, 2, 3])], item, ScheduledSequence(1, 2, 1, []))[1].failure


def test_sequences_beyond_the_budget_fail(tiny_llama: Path) -> None:
    runner = make_runner(tiny_llama, max_sequences=2, max_step_tokens=8)
    new = [_new(sequence_id, [1, 2, 3]) for sequence_id in (1, 2, 3)]
    results = _step(runner, new, *(ScheduledSequence(new.sequence_id, 0, 3, [new.sequence_id]) for new in new))
    assert [result.failure is None for result in results] == [True, True, False]


def test_a_draw_beyond_the_context_fails(tiny_llama: Path) -> None:
    runner = make_runner(tiny_llama)
    (last,) = _step(runner, [_new(1, [1] * 255)], ScheduledSequence(1, 0, 255, list(range(16))))
    assert len(last.token_ids) == 1
    assert _step(runner, [], ScheduledSequence(1, 255, 1, []))[0].failure


def test_an_id_is_free_again_once_its_sequence_is_finished(tiny_llama: Path) -> None:
    runner = make_runner(tiny_llama)
    item = ScheduledSequence(1, 0, 3, [0])
    (first,) = _step(runner, [_new(1, [1, 2, 3])], item)
    assert _step(runner, [_new(1, [1, 2, 3])], item)[0].failure
    (second,) = runner.step(Step([1], [_new(1, [1, 2, 3])], [item])).sequences
    assert second.token_ids == first.token_ids


def test_reset_forgets_every_sequence(tiny_llama: Path) -> None:
    runner = make_runner(tiny_llama)
    _step(runner, [_new(1, [1, 2, 3])], ScheduledSequence(1, 0, 2, [0]))
    runner.reset()
    assert _step(runner, [], ScheduledSequence(1, 2, 1, []))[0].failure


@pytest.fixture
def faulty(save_model: Callable[..., Path]) -> Path:
    """A model that computes no numbers from token 13 on."""
    directory = save_model(VARIANTS["llama"]())
    tensors = load_file(directory / "model.safetensors")
    tensors["model.embed_tokens.weight"][13] = float("nan")
    save_file(tensors, directory / "model.safetensors")
    return directory


def test_logits_that_are_no_numbers_fail_their_sequence_alone(faulty: Path) -> None:
    runner = make_runner(faulty)
    good, bad = _step(
        runner,
        [_new(1, [1, 2, 3]), _new(2, [1, 13, 3])],
        ScheduledSequence(1, 0, 3, [0]),
        ScheduledSequence(2, 0, 3, [1]),
    )
    assert (len(good.token_ids), good.failure) == (1, None)
    assert (bad.token_ids, bool(bad.failure)) == ([], True)
    assert _step(runner, [], ScheduledSequence(2, 3, 1, []))[0].failure


def test_a_token_that_never_comes_fails_what_was_launched_for_it_since(faulty: Path) -> None:
    runner = make_runner(faulty)
    new = [_new(1, [1, 2, 3]), _new(2, [1, 13, 3])]
    first = runner.launch(Step([], new, [ScheduledSequence(1, 0, 3, [0]), ScheduledSequence(2, 0, 3, [1])]))
    second = runner.launch(Step([], [], [ScheduledSequence(2, 3, 1, []), ScheduledSequence(1, 3, 1, [])]))
    good, bad = runner.finish(first).sequences
    again, on = runner.finish(second).sequences
    assert (bad.token_ids, again.token_ids) == ([], [])
    assert bad.failure
    assert again.failure == bad.failure
    ((*expected,),) = Driver(make_runner(faulty)).generate([[1, 2, 3]], 2)
    assert good.token_ids + on.token_ids == expected


def test_a_sequence_that_is_finished_while_its_step_runs_fails_no_other_of_its_id(faulty: Path) -> None:
    runner = make_runner(faulty)
    first = runner.launch(Step([], [_new(1, [1, 13])], [ScheduledSequence(1, 0, 2, [0])]))
    second = runner.launch(Step([1], [_new(1, [1, 2, 3])], [ScheduledSequence(1, 0, 3, [1])]))
    assert runner.finish(first).sequences[0].failure
    (result,) = runner.finish(second).sequences
    assert [result.token_ids] == Driver(make_runner(faulty)).generate([[1, 2, 3]], 1)
    assert _step(runner, [], ScheduledSequence(1, 3, 1, []))[0].failure is None


def test_a_refused_step_leaves_the_one_before_it_as_it_is(tiny_llama: Path) -> None:
    runner = make_runner(tiny_llama)
    first = runner.launch(Step([], [_new(1, [1, 2, 3])], [ScheduledSequence(1, 0, 3, [0])]))
    second = runner.launch(Step([], [], [ScheduledSequence(1, 0, 1, [])]))
    assert len(runner.finish(first).sequences[0].token_ids) == 1
    assert runner.finish(second).sequences[0].failure


def test_no_more_than_two_steps_are_in_flight(tiny_llama: Path) -> None:
    runner = make_runner(tiny_llama)
    empty = Step([], [], [])
    in_flight = [runner.launch(empty), runner.launch(empty)]
    with pytest.raises(RuntimeError, match="not finished"):
        runner.launch(empty)
    runner.finish(in_flight[0])
    runner.launch(empty)


def test_after_a_step_that_raised_its_sequences_fail_and_others_run(
    tiny_llama: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    runner = make_runner(tiny_llama)
    _step(runner, [_new(1, [1, 2, 3])], ScheduledSequence(1, 0, 2, [0]))

    def broken(*_: object) -> SampleHandle:
        raise RuntimeError("device lost")

    with monkeypatch.context() as patch:
        patch.setattr(HostExecutor, "launch", broken)
        with pytest.raises(RuntimeError):
            _step(
                runner,
                [_new(2, [4, 5]), _new(3, [6])],
                ScheduledSequence(2, 0, 1, [1]),
                ScheduledSequence(3, 0, 1, [2]),
            )
    known, lost = _step(runner, [], ScheduledSequence(1, 2, 1, []), ScheduledSequence(2, 1, 1, []))
    assert known.failure is None
    assert lost.failure


class RecordingExecutor:
    """Draws token 1 for every sequence, and keeps the batches."""

    submit = staticmethod(run_inline)

    def __init__(self) -> None:
        self.batches: list[Batch] = []

    def launch(self, batch: Batch, sequences: Items[Sequence]) -> HostSampleHandle:
        self.batches.append(batch)
        return HostSampleHandle(SamplerOutput([1] * len(sequences), [None] * len(sequences)))


def test_sequences_of_one_token_come_first_and_are_answered_in_their_place() -> None:
    executor = RecordingExecutor()
    runner = Runner(executor, WorkerLimits(VOCAB, 64, 16, 8, 64, 8), NO_MOVER)
    lengths = [3, 1, 4, 1, 5]
    new = [_new(sequence_id, [2] * length) for sequence_id, length in enumerate(lengths)]
    scheduled = [ScheduledSequence(i, 0, min(length, 4), [i]) for i, length in enumerate(lengths)]
    results = _step(runner, new, *scheduled)
    assert np.diff(executor.batches[0].query_starts).tolist() == [1, 1, 3, 4, 4]
    assert [(result.sequence_id, result.token_ids) for result in results] == [
        (0, [1]), (1, [1]), (2, [1]), (3, [1]), (4, []),
    ]  # fmt: skip


class LosingExecutor:
    """Launches steps on a device that fails: as the step is launched, or while it runs."""

    submit = staticmethod(run_inline)

    def __init__(self, when: str) -> None:
        self.when = when
        self.placeholder_tokens = [0]

    def launch(self, batch: Batch, sequences: object) -> "LosingExecutor":
        if self.when == "launch":
            raise torch.AcceleratorError("lost")
        return self

    def is_done(self) -> bool:
        return True

    def wait(self) -> None:
        pass

    def result(self) -> SamplerOutput:
        raise torch.AcceleratorError("lost")


@pytest.mark.parametrize("when", ["launch", "finish"])
def test_an_error_of_the_device_is_told_apart_from_ours(when: str) -> None:
    runner = Runner(LosingExecutor(when), WorkerLimits(VOCAB, 64, 16, 4, 16, 4), NO_MOVER)
    with pytest.raises(DeviceLost):
        _step(runner, [_new(1, [1, 2])], ScheduledSequence(1, 0, 2, [0]))
