"""Log-probabilities of prompts are transformers' own, however prompts are chunked and batched."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from core_runner import CoreRunner, submission
from drafters import knowing
from llama_models import VOCAB
from prompt_scores import reference_scores, run_prompts, scored
from quire.worker.v1 import worker_pb2 as pb
from runner_driver import Driver, make_runner
from runner_instance import make_instance
from runner_steps import PROMPTS, new_sequence, run_step
from worker_svc.batch import Batch
from worker_svc.executor import HostExecutor, SampleHandle
from worker_svc.launched_step import ScheduledRun
from worker_svc.out_of_memory import Drafts
from worker_svc.prompt_logprobs import PromptPiece
from worker_svc.sequences import Sequence as KnownSequence
from worker_svc.step import ScheduledSequence, StepOutcome, TokenLogprobs
from worker_svc.warm_up import run_largest_step
from worker_svc.wire import outcome_to_proto, step_from_proto

NUM_TOP = 3


def check(found: Sequence[TokenLogprobs], prompt: list[int], expected: torch.Tensor) -> None:
    assert len(found) == len(prompt) - 1
    for row, (one, token) in enumerate(zip(found, prompt[1:], strict=True)):
        assert one.logprob == pytest.approx(float(expected[row, token]), abs=1e-4)
        assert [value for _, value in one.top] == pytest.approx(
            expected[row].topk(len(one.top)).values.tolist(), abs=1e-4
        )
        assert [value for _, value in one.top] == pytest.approx(
            [float(expected[row, token]) for token, _ in one.top], abs=1e-4
        )


@pytest.mark.parametrize("kernels", ["torch", "compiled"])
@pytest.mark.parametrize(("chunk", "max_sequences"), [(512, 64), (7, 8), (1, 8)])
def test_they_are_the_log_softmax_of_transformers(
    kernels: str, chunk: int, max_sequences: int, tiny_llama: Path
) -> None:
    runner = make_runner(tiny_llama, kernels, max_sequences=max_sequences)
    new = [scored(place, prompt, NUM_TOP if place % 2 else 0) for place, prompt in enumerate(PROMPTS)]
    expected_tokens = Driver(make_runner(tiny_llama, kernels)).generate(PROMPTS, 1)
    for place, (logprobs, tokens) in enumerate(run_prompts(runner, new, chunk)):
        check(logprobs, PROMPTS[place], reference_scores(tiny_llama, PROMPTS[place]))
        assert {len(one.top) for one in logprobs} <= {NUM_TOP if place % 2 else 0}
        assert tokens == expected_tokens[place]


def test_a_prompt_of_more_tokens_than_rows_of_logits_is_computed_in_pieces(tiny_llama: Path) -> None:
    prompt = PROMPTS[-1]
    runner = make_runner(tiny_llama, max_sequences=1)
    assert runner.limits.max_scored_rows == 64 < len(prompt)
    ((logprobs, _),) = run_prompts(runner, [scored(1, prompt)], 512)
    check(logprobs, prompt, reference_scores(tiny_llama, prompt))


def test_memory_is_measured_with_the_most_rows_of_logits(tiny_llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sizes: list[int] = []
    launch = HostExecutor.launch

    def record(
        executor: HostExecutor,
        batch: Batch,
        sequences: Sequence[KnownSequence],
        drafts: Drafts,
        pieces: list[PromptPiece],
    ) -> SampleHandle:
        sizes.extend(len(piece.next_tokens) for piece in pieces)
        return launch(executor, batch, sequences, drafts, pieces)

    monkeypatch.setattr(HostExecutor, "launch", record)
    limits = make_runner(tiny_llama, max_sequences=2, max_step_tokens=100).limits
    run_largest_step(
        limits,
        lambda needed: make_runner(tiny_llama, max_sequences=2, max_step_tokens=100, num_blocks=needed.num_blocks),
        "cpu",
    )
    assert sizes == [limits.max_scored_rows] == [64]


def test_the_bits_do_not_depend_on_chunks_with_compiled_kernels(tiny_llama: Path) -> None:
    runner = make_runner(tiny_llama, "compiled")
    whole, chunked = (run_prompts(runner, [scored(1, PROMPTS[-1], 5)], chunk)[0] for chunk in (512, 5))
    assert whole == chunked


def test_others_in_the_step_are_as_without(tiny_llama: Path) -> None:
    runner = make_runner(tiny_llama)
    plain = replace(scored(2, PROMPTS[3], seed=3, temperature=1.0, logprobs=2), result="tokens")
    alone = run_prompts(runner, [plain], 9)
    (_, beside) = run_prompts(runner, [scored(1, PROMPTS[4], 2), plain], 9)
    assert [beside] == alone
    assert beside[0] == []


def test_tokens_whose_log_probabilities_are_known_may_be_cached(tiny_llama: Path) -> None:
    prompt = PROMPTS[-1]
    runner = make_runner(tiny_llama)
    run_step(runner, [new_sequence(1, prompt)], ScheduledSequence(1, 0, len(prompt), list(range(7))))
    shared = ScheduledSequence(2, 96, len(prompt) - 96, [*range(6), 20])
    (rest,) = run_step(runner, [scored(2, prompt)], shared)
    expected = reference_scores(tiny_llama, prompt)
    check(rest.prompt_logprobs, prompt[96:], expected[96:])


def test_output_tokens_have_none(tiny_llama: Path) -> None:
    """A sequence that comes back after a preemption: its prompt and two output tokens are computed at once."""
    prompt, output = PROMPTS[3], [5, 9]
    runner = make_runner(tiny_llama)
    back = replace(scored(1, prompt), token_ids=[*prompt, *output])
    (result,) = run_step(runner, [back], ScheduledSequence(1, 0, len(prompt) + 2, [0, 1]))
    check(result.prompt_logprobs, prompt, reference_scores(tiny_llama, prompt))
    assert len(result.token_ids) == 1


def test_drafts_change_nothing(tiny_llama: Path) -> None:
    prompts = [PROMPTS[3], PROMPTS[2]]
    texts = [
        prompt + more
        for prompt, more in zip(prompts, Driver(make_runner(tiny_llama)).generate(prompts, 4), strict=True)
    ]
    runner = make_runner(tiny_llama, make_drafter=knowing(texts, VOCAB))
    new = [scored(1, prompts[0]), new_sequence(2, prompts[1])]
    size = len(prompts[1])
    run_step(runner, new[1:], ScheduledSequence(2, 0, size, [0, 1]))
    drafted = ScheduledSequence(2, size, 1, [], max_extra_tokens=3)
    both = run_step(runner, new[:1], drafted, ScheduledSequence(1, 0, len(prompts[0]), [2, 3]))
    assert len(both[0].token_ids) > 1
    assert both[0].prompt_logprobs == ()
    check(both[1].prompt_logprobs, prompts[0], reference_scores(tiny_llama, prompts[0]))


@pytest.mark.parametrize("chunk", [512, 2])
def test_a_prompt_whose_logits_are_not_finite_fails_alone(chunk: int, tiny_llama: Path, tmp_path: Path) -> None:
    for file in tiny_llama.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    tensors = load_file(tmp_path / "model.safetensors")
    tensors["model.embed_tokens.weight"][13] = float("nan")
    save_file(tensors, tmp_path / "model.safetensors")
    runner = make_runner(tmp_path)
    bad, good = scored(1, [1, 13, 3, 4]), scored(2, [1, 2, 3, 4])
    parts = [ScheduledSequence(one, 0, min(chunk, 4), [one]) for one in (1, 2)]
    failed, other = run_step(runner, [bad, good], *parts)
    assert failed.failure
    assert failed.prompt_logprobs == ()
    assert other.failure is None
    assert len(other.prompt_logprobs) == min(chunk, 3)


def test_a_run_scores_up_to_the_token_before_the_last_one_of_the_prompt() -> None:
    sequence = KnownSequence(replace(scored(1, [7] * 10), token_ids=[7] * 12))
    runs = [
        ScheduledRun(0, 1, sequence, start, end, end == 12)
        for start, end in [(0, 5), (5, 12), (8, 9), (9, 12), (10, 11)]
    ]
    assert [(run.scored_end, run.chunk_start) for run in runs] == [(5, 4), (9, 9), (9, 8), (9, 9), (10, 10)]
    plain = KnownSequence(new_sequence(1, [7] * 10))
    assert ScheduledRun(0, 1, plain, 2, 10, True).chunk_start == 2


@pytest.mark.parametrize("preemption", ["swap", "recompute"])
def test_each_comes_once_through_preemption_and_for_several_sequences(preemption: str, tiny_llama: Path) -> None:
    runner = make_runner(tiny_llama, "compiled", block_size=8, num_blocks=40, num_host_blocks=60, max_step_tokens=24)
    core_runner = CoreRunner(make_instance(runner), 20, preemption)
    submits = []
    for place, prompt in enumerate([PROMPTS[4], PROMPTS[3], PROMPTS[4][:40], PROMPTS[2]]):
        submit = submission(str(place), prompt, 12, n=1 + place % 2)
        submit.result.prompt_logprobs.num_top_logprobs = place
        submits.append(submit)
    served = core_runner.serve(submits)
    assert sum(one.num_preemptions for each in served.values() for one in each) > 0
    for submit in submits:
        prompt = list(submit.prompt_token_ids)
        expected = reference_scores(tiny_llama, prompt)
        found = core_runner.prompt_logprobs[submit.key]
        assert {len(one.top) for one in found} == {int(submit.key)}
        assert [one.logprob for one in found] == pytest.approx(
            [float(expected[row, token]) for row, token in enumerate(prompt[1:])], abs=1e-4
        )


def test_they_have_their_place_in_the_messages(tiny_llama: Path) -> None:
    asked = pb.ResultKind(prompt_logprobs=pb.PromptLogprobsResult(num_top_logprobs=2))
    new = pb.NewSequence(sequence_id=4, token_ids=[1, 2, 3], prompt_length=3, result=asked)
    schedule = pb.Schedule(sequence_ids=[4], starts=[0], num_tokens=[3], num_new_blocks=[1], new_block_ids=[0])
    outcome: StepOutcome = make_runner(tiny_llama).step(
        step_from_proto(pb.StepRequest(new_sequences=[new], scheduled=schedule))
    )
    (one,) = outcome_to_proto(outcome).prompt_logprobs
    assert one.schedule_index == 0
    assert [len(token.top) for token in one.tokens] == [2, 2]
