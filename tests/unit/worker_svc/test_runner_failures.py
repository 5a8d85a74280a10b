"""A fault of one sequence fails it alone; a step that raises fails its own sequences."""

from pathlib import Path

import pytest
import torch

from core_runner import CoreRunner, submission
from llama_models import VOCAB
from runner_driver import GREEDY, Driver, make_runner
from runner_instance import make_instance
from runner_steps import NO_COPIER, PROMPTS, Generate, new_sequence, run_step
from worker_svc.batch import Batch
from worker_svc.description import WorkerLimits
from worker_svc.errors import DeviceLost
from worker_svc.executor import HostExecutor, SampleHandle, run_inline
from worker_svc.runner import Runner
from worker_svc.sampler import SamplerOutput
from worker_svc.step import NewSequence, SamplingParams, ScheduledSequence, Step

BAD_NEW = {
    "empty": NewSequence(9, [], 0, 0, GREEDY),
    "no prompt": NewSequence(9, [1, 2], 0, 0, GREEDY),
    "prompt beyond the tokens": NewSequence(9, [1, 2], 3, 0, GREEDY),
    "token beyond the vocabulary": new_sequence(9, [1, VOCAB]),
    "bias beyond the vocabulary": new_sequence(9, [1], SamplingParams(logit_bias={VOCAB: 1.0})),
    "suppressed beyond the vocabulary": new_sequence(9, [1], SamplingParams(suppressed_token_ids=(VOCAB,))),
    "longer than the context": new_sequence(9, [1] * 257),
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
    first, failed = run_step(runner, [new_sequence(1, prompt), *bad], good, item)
    assert failed.failure
    assert failed.token_ids == []
    second, again = run_step(runner, [], ScheduledSequence(1, len(prompt), 1, []), item._replace(start=3, num_tokens=1))
    assert again.failure
    assert first.token_ids + second.token_ids == expected


@pytest.mark.parametrize("name", BAD_NEW)
def test_a_malformed_sequence_fails_alone(name: str, tiny_llama: Path, reference: Generate) -> None:
    (expected,) = reference(tiny_llama, [PROMPTS[1]], 2)
    _check_alone(make_runner(tiny_llama), [BAD_NEW[name]], ScheduledSequence(9, 0, 1, [40]), expected)


@pytest.mark.parametrize("name", BAD_SCHEDULED)
def test_a_bad_schedule_fails_alone(name: str, tiny_llama: Path, reference: Generate) -> None:
    (expected,) = reference(tiny_llama, [PROMPTS[1]], 2)
    _check_alone(make_runner(tiny_llama), [new_sequence(9, [1, 2, 3])], BAD_SCHEDULED[name], expected)


@pytest.mark.parametrize(("start", "num_tokens"), [(1, 1), (3, 1), (0, 3)])
def test_a_start_that_does_not_follow_fails(start: int, num_tokens: int, tiny_llama: Path) -> None:
    runner = make_runner(tiny_llama)
    run_step(runner, [new_sequence(1, [1, 2, 3, 4])], ScheduledSequence(1, 0, 2, [0]))
    (result,) = run_step(runner, [], ScheduledSequence(1, start, num_tokens, []))
    assert result.failure


def test_a_sequence_scheduled_twice_in_a_step_fails(tiny_llama: Path) -> None:
    runner = make_runner(tiny_llama)
    item = ScheduledSequence(1, 0, 2, [0])
    assert run_step(runner, [new_sequence(1, [1, 2, 3])], item, ScheduledSequence(1, 2, 1, []))[1].failure


def test_sequences_beyond_the_budget_fail(tiny_llama: Path) -> None:
    runner = make_runner(tiny_llama, max_sequences=2, max_step_tokens=8)
    new = [new_sequence(sequence_id, [1, 2, 3]) for sequence_id in (1, 2, 3)]
    results = run_step(runner, new, *(ScheduledSequence(new.sequence_id, 0, 3, [new.sequence_id]) for new in new))
    assert [result.failure is None for result in results] == [True, True, False]


def test_sampling_beyond_the_context_fails(tiny_llama: Path) -> None:
    runner = make_runner(tiny_llama)
    (last,) = run_step(runner, [new_sequence(1, [1] * 255)], ScheduledSequence(1, 0, 255, list(range(16))))
    assert len(last.token_ids) == 1
    assert run_step(runner, [], ScheduledSequence(1, 255, 1, []))[0].failure


def test_logits_that_are_not_numbers_fail_their_sequence_alone(faulty: Path) -> None:
    runner = make_runner(faulty)
    good, bad = run_step(
        runner,
        [new_sequence(1, [1, 2, 3]), new_sequence(2, [1, 13, 3])],
        ScheduledSequence(1, 0, 3, [0]),
        ScheduledSequence(2, 0, 3, [1]),
    )
    assert (len(good.token_ids), good.failure) == (1, None)
    assert (bad.token_ids, bool(bad.failure)) == ([], True)
    assert run_step(runner, [], ScheduledSequence(2, 3, 1, []))[0].failure


def test_blocks_of_a_sequence_without_numbers_have_no_hash(faulty: Path) -> None:
    runner = make_runner(faulty)
    step = Step(
        [],
        [new_sequence(1, [1, 2, 3]), new_sequence(2, [1, 13, 3])],
        [ScheduledSequence(1, 0, 3, [0]), ScheduledSequence(2, 0, 2, [1])],
    )
    runner.step(step)
    runner.step(Step([], [], [ScheduledSequence(2, 2, 1, [])], block_hashes=[(0, b"good"), (1, b"bad")]))
    assert runner.block_hashes.report().device == [(0, b"good")]


@pytest.mark.parametrize("kernels", ["torch", "compiled", "triton"])
@pytest.mark.filterwarnings("ignore:All-NaN slice:RuntimeWarning")  # of the interpreter, where all numbers are NaN
def test_a_request_without_numbers_leaves_the_prefix_to_others(kernels: str, faulty: Path) -> None:
    """Its first chunk is cached before its last one fails, and holds the prefix beside the token that is not finite."""
    prefix = list(range(20, 36))
    runner = make_runner(faulty, kernels, block_size=8, max_step_tokens=24)
    core_runner = CoreRunner(make_instance(runner), runner.limits.num_blocks)
    core_runner.may_fail = True
    core_runner.serve([submission("bad", [*prefix, 13, *range(40, 50)], 1)])
    assert core_runner.failed.keys() == {"bad"}
    served = core_runner.serve([submission("good", [*prefix, 5], 1)])
    assert [one.token_ids for one in served["good"]] == Driver(make_runner(faulty, kernels)).generate([[*prefix, 5]], 1)


def test_a_missing_token_fails_later_launches_of_its_sequence(faulty: Path) -> None:
    runner = make_runner(faulty)
    new = [new_sequence(1, [1, 2, 3]), new_sequence(2, [1, 13, 3])]
    first = runner.launch(Step([], new, [ScheduledSequence(1, 0, 3, [0]), ScheduledSequence(2, 0, 3, [1])]))
    second = runner.launch(Step([], [], [ScheduledSequence(2, 3, 1, []), ScheduledSequence(1, 3, 1, [])]))
    good, bad = runner.finish(first).sequences
    again, on = runner.finish(second).sequences
    assert (bad.token_ids, again.token_ids) == ([], [])
    assert bad.failure
    assert again.failure == bad.failure
    ((*expected,),) = Driver(make_runner(faulty)).generate([[1, 2, 3]], 2)
    assert good.token_ids + on.token_ids == expected


@pytest.mark.parametrize("native", [True, False])
@pytest.mark.parametrize("kernels", ["torch", "compiled", "triton"])
def test_a_missing_token_leaves_the_other_sequences_of_a_step_launched_ahead(
    kernels: str, native: bool, tiny_llama: Path
) -> None:
    """The step has no token to look up for it."""
    nothing = SamplingParams(allowed_token_ids=(3,), bad_words=((3,),))
    steps = [
        Step(
            [],
            [new_sequence(1, [1, 2], nothing), new_sequence(2, [4, 5])],
            [ScheduledSequence(1, 0, 2, [0]), ScheduledSequence(2, 0, 2, [1])],
        ),
        Step([], [], [ScheduledSequence(1, 2, 1, []), ScheduledSequence(2, 2, 1, [])]),
    ]
    device = "cuda" if kernels == "triton" and torch.cuda.is_available() else "cpu"
    runner = make_runner(tiny_llama, kernels, max_sequences=4, native=native, device=device)
    launched = [runner.launch(step) for step in steps]
    for outcome in [runner.finish(one) for one in launched]:
        without, other = outcome.sequences
        assert "no token to sample" in (without.failure or "")
        assert other.failure is None
        assert len(other.token_ids) == 1


def test_a_sequence_that_is_finished_while_its_step_runs_fails_no_other_of_its_id(faulty: Path) -> None:
    runner = make_runner(faulty)
    first = runner.launch(Step([], [new_sequence(1, [1, 13])], [ScheduledSequence(1, 0, 2, [0])]))
    second = runner.launch(Step([1], [new_sequence(1, [1, 2, 3])], [ScheduledSequence(1, 0, 3, [1])]))
    assert runner.finish(first).sequences[0].failure
    (result,) = runner.finish(second).sequences
    assert [result.token_ids] == Driver(make_runner(faulty)).generate([[1, 2, 3]], 1)
    assert run_step(runner, [], ScheduledSequence(1, 3, 1, []))[0].failure is None


def test_a_rejected_step_leaves_the_one_before_it_as_it_is(tiny_llama: Path) -> None:
    runner = make_runner(tiny_llama)
    first = runner.launch(Step([], [new_sequence(1, [1, 2, 3])], [ScheduledSequence(1, 0, 3, [0])]))
    second = runner.launch(Step([], [], [ScheduledSequence(1, 0, 1, [])]))
    assert len(runner.finish(first).sequences[0].token_ids) == 1
    assert runner.finish(second).sequences[0].failure


def test_after_a_step_that_raised_its_sequences_fail_and_others_run(
    tiny_llama: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    runner = make_runner(tiny_llama)
    run_step(runner, [new_sequence(1, [1, 2, 3])], ScheduledSequence(1, 0, 2, [0]))

    def broken(*_: object) -> SampleHandle:
        raise RuntimeError("device lost")

    with monkeypatch.context() as patch:
        patch.setattr(HostExecutor, "launch", broken)
        with pytest.raises(RuntimeError):
            run_step(
                runner,
                [new_sequence(2, [4, 5]), new_sequence(3, [6])],
                ScheduledSequence(2, 0, 1, [1]),
                ScheduledSequence(3, 0, 1, [2]),
            )
    known, lost = run_step(runner, [], ScheduledSequence(1, 2, 1, []), ScheduledSequence(2, 1, 1, []))
    assert known.failure is None
    assert lost.failure


class LosingExecutor:
    """Launches steps on a device that fails, at the launch or while the step runs."""

    submit = staticmethod(run_inline)

    def can_verify(self, params: SamplingParams) -> bool:
        return True

    def __init__(self, when: str) -> None:
        self.when = when
        self.placeholder_tokens = [0]

    def launch(self, batch: Batch, sequences: object, drafts: object = (), pieces: object = ()) -> "LosingExecutor":
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
def test_an_error_of_the_device_raises_device_lost(when: str) -> None:
    runner = Runner(LosingExecutor(when), WorkerLimits(VOCAB, 64, 16, 4, 16, 4), NO_COPIER)
    with pytest.raises(DeviceLost):
        run_step(runner, [new_sequence(1, [1, 2])], ScheduledSequence(1, 0, 2, [0]))
