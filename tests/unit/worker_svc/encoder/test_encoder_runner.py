"""Steps of an encoder: a value for each prompt, and failures of single sequences."""

from collections.abc import Sequence

import pytest
import torch

from worker_svc.description import WorkerLimits
from worker_svc.encoder.pooling import EmbeddingDefaults, EmbeddingPooler
from worker_svc.encoder.runner import EncoderRunner
from worker_svc.step import EmbeddingParams, NewSequence, Pooling, SamplingParams, ScheduledSequence, ScoreParams, Step
from worker_svc.wanted_states import Places, wanted_states

LIMITS = WorkerLimits(
    vocab_size=100, context_length=8, block_size=16, num_blocks=0, max_step_tokens=64, max_sequences=8
)


POOLER = EmbeddingPooler(EmbeddingDefaults())


def states(
    prompts: Sequence[Sequence[int]], num_first: Sequence[int] | None = None, places: Places = None
) -> list[torch.Tensor]:
    """Each token's state is its id and its place."""
    whole = [torch.tensor([[float(token), place] for place, token in enumerate(prompt)]) for prompt in prompts]
    return wanted_states(whole, places)


@pytest.fixture
def runner() -> EncoderRunner:
    return EncoderRunner(states, POOLER, LIMITS)


def new(sequence_id: int, token_ids: list[int], **fields: object) -> NewSequence:
    known: dict[str, object] = {"result": "embedding", **fields}
    return NewSequence(sequence_id, token_ids, len(token_ids), 0, SamplingParams(), **known)  # type: ignore[arg-type]


def test_each_prompt_of_a_step_has_its_value(runner: EncoderRunner) -> None:
    last = EmbeddingParams(Pooling.LAST)
    step = Step(
        [],
        [new(1, [4, 6]), new(2, [7, 8, 9], embedding=last)],
        [ScheduledSequence(2, 0, 3, []), ScheduledSequence(1, 0, 2, [])],
    )
    outcome = runner.step(step)
    assert [(one.sequence_id, one.value, one.failure, one.token_ids) for one in outcome.sequences] == [
        (2, [9.0, 2.0], None, []),
        (1, [5.0, 0.5], None, []),
    ]
    assert (outcome.prefill_tokens, outcome.decode_tokens) == (5, 0)


def test_a_prompt_may_come_in_a_later_step_than_it_is_known(runner: EncoderRunner) -> None:
    assert runner.step(Step([], [new(1, [4])], [])).sequences == []
    [result] = runner.step(Step([], [], [ScheduledSequence(1, 0, 1, [])])).sequences
    assert result.value == [4.0, 0.0]


def test_a_sequence_is_known_until_its_value_is_returned_or_its_id_is_sent(runner: EncoderRunner) -> None:
    runner.step(Step([], [new(1, [4]), new(2, [5])], [ScheduledSequence(1, 0, 1, [])]))
    scheduled = [ScheduledSequence(number, 0, 1, []) for number in (1, 2)]
    returned, finished = runner.step(Step([2], [], scheduled)).sequences
    assert (returned.failure, finished.failure) == ("not known", "not known")


@pytest.mark.parametrize(
    ("sequence", "scheduled", "failure"),
    [
        (new(1, [4], result="tokens"), ScheduledSequence(1, 0, 1, []), "this model computes embedding, and not tokens"),
        (new(1, [4, 5]), ScheduledSequence(1, 0, 1, []), "as a whole"),
        (new(1, [4, 5]), ScheduledSequence(1, 1, 1, []), "as a whole"),
        (new(1, [4]), ScheduledSequence(1, 0, 1, [3]), "without blocks"),
        (new(1, [4] * 9), ScheduledSequence(1, 0, 9, []), "9 tokens"),
        (new(1, [100]), ScheduledSequence(1, 0, 1, []), "vocabulary"),
        (new(1, [-1]), ScheduledSequence(1, 0, 1, []), "vocabulary"),
    ],
)
def test_one_that_cannot_be_computed_fails_alone(
    runner: EncoderRunner, sequence: NewSequence, scheduled: ScheduledSequence, failure: str
) -> None:
    step = Step([], [new(2, [4]), sequence], [scheduled, ScheduledSequence(2, 0, 1, [])])
    failed, other = runner.step(step).sequences
    assert failure in (failed.failure or "")
    assert failed.value == ()
    assert other.value == [4.0, 0.0]


def test_a_value_that_is_not_finite_is_a_failure() -> None:
    runner = EncoderRunner(
        lambda prompts, num_first=None, places=None: [torch.full((len(one), 2), float("nan")) for one in prompts],
        POOLER,
        LIMITS,
    )
    [result] = runner.step(Step([], [new(1, [4])], [ScheduledSequence(1, 0, 1, [])])).sequences
    assert (result.value, result.failure) == ((), "its embedding is not finite")


def test_token_types_are_those_of_each_prompt() -> None:
    seen: list[Sequence[int] | None] = []

    def forward(
        prompts: Sequence[Sequence[int]], num_first: Sequence[int] | None = None, places: Places = None
    ) -> list[torch.Tensor]:
        seen.append(num_first)
        return states(prompts, num_first, places)

    whole, pair = new(1, [4, 5, 6]), new(2, [7, 8, 9, 7], score=ScoreParams(3))
    scheduled = [ScheduledSequence(one.sequence_id, 0, len(one.token_ids), []) for one in (whole, pair)]
    EncoderRunner(forward, POOLER, LIMITS).step(Step([], [whole, pair], scheduled))
    EncoderRunner(forward, POOLER, LIMITS, deterministic=True).step(Step([], [whole, pair], scheduled))
    assert seen == [[3, 3], None, [3]]


def test_only_the_states_that_the_values_need_are_asked_for() -> None:
    seen: list[Places] = []

    def forward(
        prompts: Sequence[Sequence[int]], num_first: Sequence[int] | None = None, places: Places = None
    ) -> list[torch.Tensor]:
        seen.append(places)
        return states(prompts, num_first, places)

    sequences = [
        new(1, [4, 5, 6]),
        *(new(2 + i, [7, 8], embedding=EmbeddingParams(one)) for i, one in enumerate(Pooling)),
    ]
    scheduled = [ScheduledSequence(one.sequence_id, 0, len(one.token_ids), []) for one in sequences]
    outcome = EncoderRunner(forward, POOLER, LIMITS).step(Step([], sequences, scheduled))
    values = {Pooling.MEAN: [7.5, 0.5], Pooling.CLS: [7.0, 0.0], Pooling.LAST: [8.0, 1.0]}
    assert [one.value for one in outcome.sequences] == [[5.0, 1.0], *(values[one] for one in Pooling)]
    wanted = {Pooling.MEAN: None, Pooling.CLS: 0, Pooling.LAST: 1}
    assert seen == [[None, *(wanted[one] for one in Pooling)]]


@pytest.mark.parametrize("num_failures", [0, 2])
def test_prompts_are_not_compared(monkeypatch: pytest.MonkeyPatch, num_failures: int) -> None:
    def refuse(*_: object) -> bool:
        raise AssertionError("prompts of thousands of tokens, on the device thread")

    failures = iter(range(num_failures))

    def forward(
        prompts: Sequence[Sequence[int]], num_first: Sequence[int] | None = None, places: Places = None
    ) -> list[torch.Tensor]:
        if next(failures, None) is not None:
            raise torch.OutOfMemoryError("full")
        return states(prompts, num_first, places)

    same = [new(number, [4, 6]) for number in range(5)]
    monkeypatch.setattr(NewSequence, "__eq__", refuse)
    step = Step([], same, [ScheduledSequence(number, 0, 2, []) for number in (4, 0, 3, 1, 2)])
    outcome = EncoderRunner(forward, POOLER, LIMITS).step(step)
    kept = {one.sequence_id: one.value for one in outcome.sequences if one.failure is None}
    assert kept == {number: [5.0, 0.5] for number in range(5 - num_failures)}
    assert outcome.num_left_out == num_failures


def test_a_reset_forgets_all(runner: EncoderRunner) -> None:
    runner.step(Step([], [new(1, [4])], []))
    runner.reset()
    [result] = runner.step(Step([], [], [ScheduledSequence(1, 0, 1, [])])).sequences
    assert result.failure == "not known"
    assert runner.block_hashes.report().device == []
