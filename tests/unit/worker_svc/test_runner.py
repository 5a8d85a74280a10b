"""A runner computes what transformers computes, however prompts are chunked and batched."""

from collections.abc import Sequence as Items
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from llama_models import VOCAB
from runner_driver import Driver, make_runner
from runner_steps import NO_COPIER, PROMPTS, Generate, new_sequence, run_step
from worker_svc.batch import Batch
from worker_svc.description import WorkerLimits
from worker_svc.executor import HostSampleHandle, run_inline
from worker_svc.runner import Runner
from worker_svc.sampler import SamplerOutput
from worker_svc.sequences import Sequence
from worker_svc.step import NewSequence, SamplingParams, ScheduledSequence, Step


@pytest.mark.parametrize("chunk", [512, 7, 1])
@pytest.mark.parametrize("block_size", [16, 8])
def test_tokens_are_those_of_transformers(chunk: int, block_size: int, tiny_llama: Path, reference: Generate) -> None:
    runner = make_runner(tiny_llama, block_size=block_size)
    assert Driver(runner, chunk).generate(PROMPTS, 24) == reference(tiny_llama, PROMPTS, 24)


def test_later_sequences_share_nothing_with_earlier_ones(tiny_llama: Path, reference: Generate) -> None:
    driver = Driver(make_runner(tiny_llama, num_blocks=24))
    expected = reference(tiny_llama, PROMPTS, 8)
    assert driver.generate(PROMPTS, 8) == expected
    assert driver.generate(PROMPTS[::-1], 8) == expected[::-1]


def test_sampled_tokens_do_not_depend_on_chunks_or_batch(tiny_llama: Path) -> None:
    params = SamplingParams(temperature=1.0, top_p=0.95, seed=11, repetition_penalty=1.2, frequency_penalty=0.3)
    every = [replace(params, seed=seed) for seed in range(len(PROMPTS))]
    together = Driver(make_runner(tiny_llama)).generate(PROMPTS, 12, every)
    driver = Driver(make_runner(tiny_llama), chunk=5)
    alone = [driver.generate([prompt], 12, one)[0] for prompt, one in zip(PROMPTS, every, strict=True)]
    assert together == alone
    assert len({tuple(tokens) for tokens in together}) == len(PROMPTS)


def test_steps_launched_ahead_sample_the_same_tokens(tiny_llama: Path) -> None:
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
    (whole,) = run_step(runner, [new_sequence(1, prompt)], ScheduledSequence(1, 0, len(prompt), blocks))
    (rest,) = run_step(runner, [new_sequence(2, prompt)], ScheduledSequence(2, 96, len(prompt) - 96, [*blocks[:6], 20]))
    assert rest.token_ids == whole.token_ids


def test_keys_and_values_of_cached_tokens_are_not_written(tiny_llama: Path) -> None:
    runner = make_runner(tiny_llama)
    prompt = PROMPTS[2]
    # The second sequence's table names a block of the first one, which must stay unchanged.
    (before,) = run_step(runner, [new_sequence(1, prompt)], ScheduledSequence(1, 0, 16, [3]))
    run_step(runner, [new_sequence(2, prompt[::-1])], ScheduledSequence(2, 0, 16, [3], num_cached_tokens=16))
    (after,) = run_step(runner, [new_sequence(3, prompt)], ScheduledSequence(3, 15, 1, [3], num_cached_tokens=16))
    assert after.token_ids == before.token_ids


def test_a_preempted_sequence_continues(tiny_llama: Path) -> None:
    prompt = PROMPTS[3]
    params = SamplingParams(temperature=1.0, seed=3, presence_penalty=0.7, min_tokens=20, suppressed_token_ids=(1, 2))
    ((*tokens,),) = Driver(make_runner(tiny_llama)).generate([prompt], 8, params)
    runner = make_runner(tiny_llama)
    again = NewSequence(1, [*prompt, *tokens[:5]], len(prompt), 0, params)
    (result,) = run_step(runner, [again], ScheduledSequence(1, 0, 22, [4, 9]))
    sampled = list(result.token_ids)
    for start in (22, 23):
        (result,) = run_step(runner, [], ScheduledSequence(1, start, 1, []))
        sampled += result.token_ids
    assert sampled == tokens[5:]


def test_a_token_is_sampled_only_where_the_last_known_one_is_reached(tiny_llama: Path) -> None:
    runner = make_runner(tiny_llama)
    (first,) = run_step(runner, [new_sequence(1, [5] * 20)], ScheduledSequence(1, 0, 19, [0, 1]))
    (second,) = run_step(runner, [], ScheduledSequence(1, 19, 1, []))
    assert (first.token_ids, len(second.token_ids)) == ([], 1)


def test_tokens_are_counted_by_kind(tiny_llama: Path) -> None:
    runner = make_runner(tiny_llama)
    first = runner.step(Step([], [new_sequence(1, [5] * 20)], [ScheduledSequence(1, 0, 20, [0, 1])]))
    second = runner.step(
        Step([], [new_sequence(2, [6])], [ScheduledSequence(1, 20, 1, []), ScheduledSequence(2, 0, 1, [2])])
    )
    assert (first.prefill_tokens, first.decode_tokens) == (20, 0)
    assert (second.prefill_tokens, second.decode_tokens) == (1, 1)
    assert second.busy_seconds > 0


def test_an_id_is_free_again_once_its_sequence_is_finished(tiny_llama: Path) -> None:
    runner = make_runner(tiny_llama)
    item = ScheduledSequence(1, 0, 3, [0])
    (first,) = run_step(runner, [new_sequence(1, [1, 2, 3])], item)
    assert run_step(runner, [new_sequence(1, [1, 2, 3])], item)[0].failure
    (second,) = runner.step(Step([1], [new_sequence(1, [1, 2, 3])], [item])).sequences
    assert second.token_ids == first.token_ids


def test_reset_forgets_every_sequence(tiny_llama: Path) -> None:
    runner = make_runner(tiny_llama)
    run_step(runner, [new_sequence(1, [1, 2, 3])], ScheduledSequence(1, 0, 2, [0]))
    runner.reset()
    assert run_step(runner, [], ScheduledSequence(1, 2, 1, []))[0].failure


def test_no_more_than_two_steps_are_in_flight(tiny_llama: Path) -> None:
    runner = make_runner(tiny_llama)
    empty = Step([], [], [])
    launched = [runner.launch(empty), runner.launch(empty)]
    with pytest.raises(RuntimeError, match="not finished"):
        runner.launch(empty)
    runner.finish(launched[0])
    runner.launch(empty)


class RecordingExecutor:
    """Samples token 1 for every sequence, and records the batches."""

    submit = staticmethod(run_inline)

    def can_verify(self, params: SamplingParams) -> bool:
        return True

    def __init__(self) -> None:
        self.batches: list[Batch] = []

    def launch(
        self, batch: Batch, sequences: Items[Sequence], drafts: object = (), pieces: object = ()
    ) -> HostSampleHandle:
        self.batches.append(batch)
        return HostSampleHandle(SamplerOutput([1] * len(sequences), [None] * len(sequences)))


def test_sequences_of_one_token_come_first_in_the_batch_and_results_keep_the_steps_order() -> None:
    executor = RecordingExecutor()
    runner = Runner(executor, WorkerLimits(VOCAB, 64, 16, 8, 64, 8), NO_COPIER)
    lengths = [3, 1, 4, 1, 5]
    new = [new_sequence(sequence_id, [2] * length) for sequence_id, length in enumerate(lengths)]
    scheduled = [ScheduledSequence(i, 0, min(length, 4), [i]) for i, length in enumerate(lengths)]
    results = run_step(runner, new, *scheduled)
    assert np.diff(executor.batches[0].query_starts).tolist() == [1, 1, 3, 4, 4]
    assert [(result.sequence_id, result.token_ids) for result in results] == [
        (0, [1]), (1, [1]), (2, [1]), (3, [1]), (4, []),
    ]  # fmt: skip


def test_shared_blocks_are_not_written_by_later_chunks_either(tiny_llama: Path) -> None:
    runner = make_runner(tiny_llama)
    prompt = PROMPTS[2]
    (before,) = run_step(runner, [new_sequence(1, prompt)], ScheduledSequence(1, 0, 16, [3]))
    run_step(runner, [new_sequence(2, prompt[::-1])], ScheduledSequence(2, 0, 4, [3], num_cached_tokens=16))
    run_step(runner, [], ScheduledSequence(2, 4, 12, []))
    (after,) = run_step(runner, [new_sequence(3, prompt)], ScheduledSequence(3, 15, 1, [3], num_cached_tokens=16))
    assert after.token_ids == before.token_ids
