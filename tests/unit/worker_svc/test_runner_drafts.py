"""Steps with drafts: what is returned, what they may hold, and which steps wait for the one ahead."""

import threading
from pathlib import Path

import pytest
import torch

from llama_models import VOCAB
from runner_driver import Driver, make_runner
from runner_steps import NO_COPIER, FixedDrafter, new_sequence, run_step
from worker_svc.batch import Batch
from worker_svc.description import WorkerLimits
from worker_svc.host_thread import HostThreadExecutor
from worker_svc.runner import Runner
from worker_svc.sampler import sample_tokens
from worker_svc.step import SamplingParams, ScheduledSequence, Step


def _greedy(directory: Path, prompt: list[int], count: int) -> list[int]:
    ((*tokens,),) = Driver(make_runner(directory)).generate([prompt], count)
    return tokens


def test_a_step_continues_from_the_workers_position_with_either_start(tiny_llama: Path) -> None:
    tokens = _greedy(tiny_llama, [1, 2, 3], 8)
    for second_start in (4, 6):  # as the scheduler assumes without the result of the first step, and with it
        runner = make_runner(tiny_llama, make_drafter=lambda: FixedDrafter(*tokens[1:4]))
        run_step(runner, [new_sequence(1, [1, 2, 3])], ScheduledSequence(1, 0, 3, [5]))
        (first,) = run_step(runner, [], ScheduledSequence(1, 3, 1, [], max_extra_tokens=2))
        assert first.token_ids == tokens[1:4]
        (second,) = run_step(runner, [], ScheduledSequence(1, second_start, 1, [], max_extra_tokens=3))
        (third,) = run_step(runner, [], ScheduledSequence(1, 7, 1, []))
        assert (second.token_ids, third.token_ids) == (tokens[4:5], tokens[5:6])


@pytest.mark.parametrize("start", [3, 5, 7])
def test_a_start_that_neither_assumes_nor_knows_the_step_ahead_fails(start: int, tiny_llama: Path) -> None:
    tokens = _greedy(tiny_llama, [1, 2, 3], 4)
    runner = make_runner(tiny_llama, make_drafter=lambda: FixedDrafter(*tokens[1:3]))
    run_step(runner, [new_sequence(1, [1, 2, 3])], ScheduledSequence(1, 0, 3, [5]))
    (first,) = run_step(runner, [], ScheduledSequence(1, 3, 1, [], max_extra_tokens=2))
    assert len(first.token_ids) == 3
    assert (
        run_step(runner, [], ScheduledSequence(1, start, 1, []))[0].failure
        == f"scheduled from {start}, but 6 are computed"
    )


def test_only_accepted_drafts_count_as_returned(tiny_llama: Path) -> None:
    tokens = _greedy(tiny_llama, [1, 2, 3], 4)
    wrong = (tokens[2] + 1) % VOCAB
    runner = make_runner(tiny_llama, make_drafter=lambda: FixedDrafter(tokens[1], wrong, tokens[3]))
    run_step(runner, [new_sequence(1, [1, 2, 3])], ScheduledSequence(1, 0, 3, [5]))
    outcome = runner.step(Step([], [], [ScheduledSequence(1, 3, 1, [], max_extra_tokens=3)]))
    assert outcome.sequences[0].token_ids == tokens[1:3]
    assert (outcome.prefill_tokens, outcome.decode_tokens) == (0, 1)
    assert (outcome.draft_tokens, outcome.accepted_tokens) == (3, 1)


def test_a_prompts_last_token_may_have_a_draft_if_it_is_computed_alone(tiny_llama: Path) -> None:
    tokens = _greedy(tiny_llama, [1, 2, 3], 5)
    for last in (1, 2):
        runner = make_runner(tiny_llama, make_drafter=lambda: FixedDrafter(*tokens))
        (first,) = run_step(runner, [new_sequence(1, [1, 2, 3])], ScheduledSequence(1, 0, 3 - last, [5]))
        (second,) = run_step(runner, [], ScheduledSequence(1, 3 - last, last, [], max_extra_tokens=4))
        assert (first.token_ids, second.token_ids) == ([], tokens if last == 1 else tokens[:1])


def test_drafts_take_what_the_steps_budget_leaves(tiny_llama: Path) -> None:
    runner = make_runner(tiny_llama, max_step_tokens=8, make_drafter=lambda: FixedDrafter(1, 2, 3, 4))
    new = [new_sequence(1, [1]), new_sequence(2, [3]), new_sequence(3, [4, 5])]
    rows = [ScheduledSequence(row, 0, 1, [row], max_extra_tokens=3) for row in (1, 2)]
    outcome = runner.step(Step([], new, [*rows, ScheduledSequence(3, 0, 2, [3])]))
    assert [result.failure for result in outcome.sequences] == [None] * 3
    assert (outcome.prefill_tokens, outcome.draft_tokens) == (4, 4)


@pytest.mark.parametrize(
    ("item", "failure"),
    [
        (ScheduledSequence(1, 3, 1, [], max_extra_tokens=5), "5 extra tokens, but at most 4 are drafted"),
        (ScheduledSequence(1, 3, 1, [], max_extra_tokens=13), "scheduled up to 17, but its blocks hold 16"),
    ],
    ids=["limit", "room"],
)
def test_more_extra_tokens_than_there_may_be_fail(item: ScheduledSequence, failure: str, tiny_llama: Path) -> None:
    runner = make_runner(tiny_llama, make_drafter=lambda: FixedDrafter(1))
    run_step(runner, [new_sequence(1, [1, 2, 3])], ScheduledSequence(1, 0, 3, [5]))
    assert run_step(runner, [], item)[0].failure == failure


def test_extra_tokens_without_a_drafter_fail(tiny_llama: Path) -> None:
    (result,) = run_step(
        make_runner(tiny_llama), [new_sequence(1, [1, 2])], ScheduledSequence(1, 0, 2, [5], max_extra_tokens=1)
    )
    assert result.failure == "1 extra tokens, but at most 0 are drafted"


def test_extra_tokens_beyond_the_context_fail(tiny_llama: Path) -> None:
    runner = make_runner(tiny_llama, make_drafter=lambda: FixedDrafter(1))
    blocks = list(range(16))
    run_step(runner, [new_sequence(1, [1] * 253)], ScheduledSequence(1, 0, 252, blocks))
    (last,) = run_step(runner, [], ScheduledSequence(1, 252, 1, [], max_extra_tokens=2))
    assert last.failure is None
    assert run_step(runner, [], ScheduledSequence(1, 253, 1, [], max_extra_tokens=2))[0].failure


@pytest.mark.parametrize("kernels", ["torch", "compiled"])
@pytest.mark.parametrize("draft", [(13,), (13, 5), (5, 13)], ids=str)
def test_a_draft_without_numbers_fails_no_sequence(draft: tuple[int, ...], kernels: str, faulty: Path) -> None:
    runner = make_runner(faulty, kernels, make_drafter=lambda: FixedDrafter(*draft))
    params = SamplingParams(temperature=1.0, frequency_penalty=1.0, seed=3, logit_bias={5: 50.0})
    returned: list[int] = []
    (result,) = run_step(
        runner, [new_sequence(1, [1, 2, 3], params)], ScheduledSequence(1, 0, 3, [0], max_extra_tokens=2)
    )
    while len(returned) < 8:
        assert result.failure is None
        returned += result.token_ids
        (result,) = run_step(runner, [], ScheduledSequence(1, 2 + len(returned), 1, [], max_extra_tokens=2))
    ((*expected,),) = Driver(make_runner(faulty, kernels)).generate([[1, 2, 3]], 8, params)
    assert returned[:8] == expected


def test_a_sequence_without_numbers_fails_with_a_draft_as_without(faulty: Path) -> None:
    runner = make_runner(faulty, make_drafter=lambda: FixedDrafter(5, 6))
    (first,) = run_step(runner, [new_sequence(1, [13])], ScheduledSequence(1, 0, 1, [0], max_extra_tokens=2))
    assert (first.token_ids, first.failure) == ([], None)
    (second,) = run_step(runner, [], ScheduledSequence(1, 1, 1, [], max_extra_tokens=2))
    assert second.failure == "there is no token to sample: the logits are not finite, or all tokens are suppressed"


class HeldModel:
    """Its argmax is the last token plus 1, once `released` is set; token 99 raises."""

    def __init__(self) -> None:
        self.released = threading.Event()

    def __call__(self, batch: Batch) -> torch.Tensor:
        assert self.released.wait(60)
        if 99 in batch.token_ids:
            raise RuntimeError("broken")
        return torch.nn.functional.one_hot(torch.from_numpy(batch.token_ids[batch.logits_indices]) + 1, 100).float()


def _held(*draft: int) -> tuple[Runner, HeldModel]:
    model = HeldModel()
    executor = HostThreadExecutor(model, sample_tokens)
    limits = WorkerLimits(100, 64, 16, 8, 64, 8, max_draft_tokens=4)
    return Runner(executor, limits, NO_COPIER, lambda: FixedDrafter(*draft)), model


def test_a_step_without_drafts_is_launched_behind_another_one_before_that_one_has_sampled() -> None:
    runner, model = _held(4)
    first = runner.launch(
        Step([], [new_sequence(1, [1]), new_sequence(2, [7])], [ScheduledSequence(i, 0, 1, [i]) for i in (1, 2)])
    )
    second = runner.launch(Step([], [], [ScheduledSequence(i, 1, 1, []) for i in (2, 1)]))
    assert not first.is_done()
    model.released.set()
    assert [result.token_ids for result in runner.finish(first).sequences] == [[2], [8]]
    assert [result.token_ids for result in runner.finish(second).sequences] == [[9], [3]]


@pytest.mark.parametrize("extra", [(3, 0), (0, 3), (3, 3)], ids=str)
def test_a_step_waits_for_the_one_ahead_if_either_may_have_drafts(extra: tuple[int, int]) -> None:
    runner, model = _held(3, 4, 6)
    first = runner.launch(
        Step(
            [],
            [new_sequence(1, [2]), new_sequence(2, [7])],
            [ScheduledSequence(1, 0, 1, [1], max_extra_tokens=extra[0]), ScheduledSequence(2, 0, 1, [2])],
        )
    )
    timer = threading.Timer(0.2, model.released.set)
    timer.start()
    second = runner.launch(
        Step(
            [],
            [],
            [ScheduledSequence(1, 1, 1, [], max_extra_tokens=extra[1]), ScheduledSequence(2, 1, 1, [])],
        )
    )
    assert first.is_done()
    ours, theirs = zip(*(runner.finish(launched).sequences for launched in (first, second)), strict=True)
    assert [result.token_ids for result in theirs] == [[8], [9]]
    # Where both have drafts, the second one's are wrong.
    assert [result.token_ids for result in ours] == {
        (3, 0): [[3, 4, 5], [6]],
        (0, 3): [[3], [4]],
        (3, 3): [[3, 4, 5], [6]],
    }[extra]


def test_the_error_of_a_step_is_raised_by_finish_even_if_the_next_step_waited_for_it() -> None:
    runner, model = _held(4)
    model.released.set()
    first = runner.launch(Step([], [new_sequence(1, [99])], [ScheduledSequence(1, 0, 1, [1])]))
    items = [ScheduledSequence(1, 1, 1, [], max_extra_tokens=1), ScheduledSequence(2, 0, 1, [2], max_extra_tokens=1)]
    second = runner.launch(Step([], [new_sequence(2, [7])], items))
    with pytest.raises(RuntimeError, match="broken"):
        runner.finish(first)
    lost, other = runner.finish(second).sequences
    assert lost.failure == "the step failed"
    assert other.token_ids == [8]


def test_a_sequence_may_be_finished_while_its_draft_is_verified() -> None:
    runner, model = _held(3, 4, 5)
    model.released.set()
    first = runner.launch(Step([], [new_sequence(1, [2])], [ScheduledSequence(1, 0, 1, [1], max_extra_tokens=3)]))
    second = runner.launch(Step([1], [new_sequence(1, [20])], [ScheduledSequence(1, 0, 1, [2], max_extra_tokens=3)]))
    assert runner.finish(first).sequences[0].token_ids == [3, 4, 5, 6]
    assert runner.finish(second).sequences[0].token_ids == [21]
