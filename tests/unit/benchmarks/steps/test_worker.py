"""The runner that only sleeps samples when a real one would."""

import pytest

from benchmarks.steps.worker import make_replica
from worker_svc.step import NewSequence, SamplingParams, ScheduledSequence, Step


def test_a_token_is_sampled_where_all_known_ones_are_computed() -> None:
    runner = make_replica(2, 0.0).runner
    new = NewSequence(7, [1, 2, 3], 3, 0, SamplingParams())
    sampled = [
        runner.finish(runner.launch(step)).sequences[0].token_ids
        for step in (
            Step([], [new], [ScheduledSequence(7, 0, 2, [0])]),
            Step([], [], [ScheduledSequence(7, 2, 1, [])]),
            Step([], [], [ScheduledSequence(7, 3, 1, [])]),
        )
    ]
    assert sampled == [[], [0], [0]]


def test_a_step_runs_behind_the_one_launched_before_it() -> None:
    runner = make_replica(1, 0.001).runner
    first, second = (runner.launch(Step([], [], [])) for _ in range(2))
    assert second.begun == first.done
    assert first.done == pytest.approx(first.begun + 0.001)
    assert not second.is_done() or first.is_done()
    second.wait()
    assert first.is_done()
    assert second.is_done()


def test_there_is_room_for_all_sequences_at_once() -> None:
    limits = make_replica(1024, 0.0).description.limits
    assert limits.num_blocks * limits.block_size >= 1024 * limits.context_length
