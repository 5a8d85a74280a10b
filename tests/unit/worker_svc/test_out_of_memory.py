"""A step for which memory does not suffice fails its newest sequences alone. Allocations fail as those of torch do."""

import json
import logging
import random
import re
import sys
from collections.abc import Callable
from itertools import count
from pathlib import Path
from types import FrameType
from typing import Any

import numpy as np
import pytest
import torch
from prometheus_client import REGISTRY
from torch.utils._python_dispatch import TorchDispatchMode

from core_runner import CoreRunner, submission
from llama_models import VOCAB
from quire.scheduler.v1.scheduler_pb2 import Submit
from runner_driver import make_runner
from runner_instance import make_instance
from runner_steps import new_sequence
from scheduler_svc.core.events import Failure
from svc_common.logs import JsonFormatter
from worker_service import Worker, scheduled
from worker_service import new_sequence as wire_sequence
from worker_svc.batch import Batch, SequenceChunk, make_batch
from worker_svc.encoder.runner import EncoderRunner
from worker_svc.out_of_memory import OUT_OF_MEMORY, is_out_of_memory
from worker_svc.runner import Runner
from worker_svc.settings import WorkerSettings
from worker_svc.step import FailureReason, NewSequence, SamplingParams, ScheduledSequence, SequenceResult, Step

_IMPOSSIBLE = 2**60  # bytes


def limit_forward(runner: Runner, is_too_large: Callable[[int], bool]) -> list[int]:
    """From now on, forward passes over some numbers of tokens allocate more than there is. Returns these numbers."""
    executor: Any = runner._executor
    forward, failed = executor._forward, []

    class Limited:
        def __call__(self, batch: Any, *arguments: Any) -> Any:
            if is_too_large(len(batch.token_ids)):
                failed.append(len(batch.token_ids))
                torch.empty(_IMPOSSIBLE, dtype=torch.uint8)
            return forward(batch, *arguments)

        def __getattr__(self, name: str) -> Any:
            return getattr(forward, name)

    executor._forward = Limited()
    return failed


def test_errors_of_allocators_are_recognized() -> None:
    def fails(allocate: Callable[[], object]) -> Exception:
        with pytest.raises(Exception) as raised:  # noqa: PT011
            allocate()
        return raised.value

    assert is_out_of_memory(fails(lambda: torch.empty(_IMPOSSIBLE, dtype=torch.uint8)))
    assert is_out_of_memory(fails(lambda: bytearray(_IMPOSSIBLE)))
    assert is_out_of_memory(fails(lambda: np.empty(_IMPOSSIBLE, np.uint8)))
    assert is_out_of_memory(torch.OutOfMemoryError("CUDA out of memory"))
    assert not is_out_of_memory(fails(lambda: torch.zeros(2) + torch.zeros(3)))
    assert not is_out_of_memory(fails(lambda: [][0]))


@pytest.mark.parametrize("seed", range(20))
def test_a_batch_without_a_sequence_is_that_of_the_others(seed: int) -> None:
    rng = random.Random(seed)
    chunks = []
    for _ in range(rng.randint(2, 6)):
        count, start = rng.choice([1, 1, 3, 9]), rng.choice([0, 5, 16])
        samples = rng.random() < 0.7
        num_drafted = rng.randrange(count) if samples else 0
        tokens = np.array([rng.randrange(VOCAB) for _ in range(count)], np.int32)
        blocks = np.array([rng.randrange(99) for _ in range(5)], np.int32)
        chunks.append(SequenceChunk(tokens, start, blocks, rng.choice([start, start + 1]), samples, num_drafted))
    ids = rng.sample(range(100), len(chunks))
    index = rng.randrange(len(chunks))
    batch = make_batch(chunks, 8, ids).without(index)
    expected = make_batch(chunks[:index] + chunks[index + 1 :], 8, ids[:index] + ids[index + 1 :])
    for name in Batch.__dataclass_fields__:
        mine, other = getattr(batch, name), getattr(expected, name)
        if name == "block_tables":  # what lies beyond a sequence's context means nothing
            mine = mine[:, : other.shape[1]]
        assert np.array_equal(mine, other), name


@pytest.mark.parametrize("kernels", ["torch", "compiled", "triton"])
@pytest.mark.parametrize("is_ahead", [False, True])
def test_the_newest_sequence_fails_alone(kernels: str, is_ahead: bool, tiny_llama: Path) -> None:
    """Also if the next step, which continues all of them, was launched already."""
    prompts = {7: [1, 2, 3], 9: [4, 5, 6, 7], 8: [8, 9]}
    starts = {sequence_id: len(prompt) for sequence_id, prompt in prompts.items()}
    first = Step(
        [],
        [new_sequence(sequence_id, prompt) for sequence_id, prompt in prompts.items()],
        [ScheduledSequence(sequence_id, 0, length, [sequence_id]) for sequence_id, length in starts.items()],
    )
    second = Step([], [], [ScheduledSequence(sequence_id, length, 1, []) for sequence_id, length in starts.items()])

    def serve(runner: Runner) -> tuple[list[dict[int, SequenceResult]], list[int]]:
        if is_ahead:
            launched = [runner.launch(step) for step in (first, second)]
            outcomes = [runner.finish(one) for one in launched]
        else:
            outcomes = [runner.step(step) for step in (first, second)]
        results = [{result.sequence_id: result for result in outcome.sequences} for outcome in outcomes]
        return results, [outcome.num_left_out for outcome in outcomes]

    expected, nobody = serve(make_runner(tiny_llama, kernels, max_sequences=4))
    runner = make_runner(tiny_llama, kernels, max_sequences=4)
    failed = limit_forward(runner, lambda num_tokens: num_tokens > 5)
    found, nums_left_out = serve(runner)
    assert (nobody, nums_left_out) == ([0, 0], [1, 0])
    assert failed in ([9], [9, 9])  # a GPU tries again once
    for step, step_expected in zip(found, expected, strict=True):
        assert step[9].failure == OUT_OF_MEMORY
        for sequence_id in (7, 8):
            assert step[sequence_id] == step_expected[sequence_id]
    assert found[0][9].failure_reason is FailureReason.OUT_OF_MEMORY
    # Its id is free again once the scheduler has ended it.
    (again,) = runner.step(Step([9], [new_sequence(9, [1])], [ScheduledSequence(9, 0, 1, [20])])).sequences
    assert again.failure is None


class FailingAllocation(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Fails one of torch's allocations after each forward pass over so many rows of logits."""

    def __init__(self, runner: Runner, number: int, num_rows: int) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        executor: Any = runner._executor
        self._executor, self._forward = executor, executor._forward
        self._number, self._num_rows = number, num_rows
        self._num_done: int | None = None
        self.num_allocations = self.num_failed = 0

    def __enter__(self) -> Any:
        self._executor._forward = self
        return super().__enter__()  # type: ignore[no-untyped-call]

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)  # type: ignore[no-untyped-call]
        self._executor._forward = self._forward

    def __call__(self, inputs: Any, sampled: torch.Tensor, logits: torch.Tensor) -> None:
        self._num_done = None
        self._forward(inputs, sampled, logits)
        self._num_done = 0 if len(logits) == self._num_rows else None

    def __getattr__(self, name: str) -> Any:
        return getattr(self._forward, name)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        # Neither a view, nor done in place or into memory of the caller's
        allocates = any(returned.alias_info is None for returned in func._schema.returns)
        if allocates and self._num_done is not None and not _is_interpreted():
            self._num_done += 1
            self.num_allocations = max(self.num_allocations, self._num_done)
            if self._num_done == self._number:
                self.num_failed += 1
                raise torch.OutOfMemoryError("CUDA out of memory")
        return func(*args, **kwargs or {})


def _is_interpreted() -> bool:
    """Whether Triton's interpreter calls, which copies arguments of kernels."""
    frame: FrameType | None = sys._getframe()
    while frame is not None and not frame.f_code.co_filename.endswith("triton/runtime/interpreter.py"):
        frame = frame.f_back
    return frame is not None


def test_memory_may_run_out_wherever_a_step_allocates_after_its_forward_pass(tiny_llama: Path) -> None:
    """While a step before it runs, whose tokens the step continues."""
    params = {
        1: SamplingParams(logprobs=2),
        2: SamplingParams(temperature=1.0, seed=5, frequency_penalty=0.4, logprobs=1, logprob_token_ids=(3,)),
        9: SamplingParams(temperature=1.0, seed=6, repetition_penalty=1.2, bad_words=((7,), (4, 5)), typical_p=0.9),
    }
    prompts = {1: [1, 2, 3], 2: [4, 5, 6, 7], 9: [8, 9]}

    def step(place: int) -> Step:
        new = [new_sequence(number, prompts[number], params[number]) for number in params] if not place else []
        return Step(
            [],
            new,
            [
                ScheduledSequence(
                    number,
                    0 if new else len(prompts[number]) + place - 1,
                    len(prompts[number]) if new else 1,
                    [number] if new else [],
                )
                for number in params
            ],
        )

    def serve(runner: Runner, fails_at: int) -> tuple[list[dict[int, SequenceResult]], FailingAllocation]:
        launched = [runner.launch(step(0))]
        failing = FailingAllocation(runner, fails_at, len(params))
        with failing:
            launched.append(runner.launch(step(1)))
        outcomes = [runner.finish(launched[0])]
        launched.append(runner.launch(step(2)))
        outcomes += [runner.finish(one) for one in launched[1:]]
        runner.step(Step(list(params), [], []))
        return [{one.sequence_id: one for one in outcome.sequences} for outcome in outcomes], failing

    device = "cuda" if torch.cuda.is_available() else "cpu"
    runner = make_runner(tiny_llama, "triton", max_sequences=4, device=device)
    serve(runner, 0)  # what is allocated once
    expected, counted = serve(runner, 0)
    last = counted.num_allocations
    assert last > 20
    for number in (*range(1, last, 9), last - 1, last):
        found, failing = serve(runner, number)
        assert failing.num_failed == 2  # it is tried again with all sequences first
        assert found[1][9].failure_reason is FailureReason.OUT_OF_MEMORY
        for mine, theirs in zip(found, expected, strict=True):
            for other in (1, 2):
                assert mine[other].token_ids == theirs[other].token_ids
                ours, alone = (one[other].logprobs[0] for one in (mine, theirs))
                assert ours.logprob == pytest.approx(alone.logprob, abs=1e-4)
                assert dict(ours.top) == pytest.approx(dict(alone.top), abs=1e-4)


def test_a_step_that_is_tried_again_leaves_the_tokens_of_the_step_before_it(tiny_llama: Path) -> None:
    """They are not read until that step is finished."""
    prompts = {1: [1, 2, 3], 2: [4, 5, 6, 7]}
    params = SamplingParams(temperature=1.0, seed=5, logprobs=1)
    steps = [
        Step(
            [],
            [new_sequence(number, prompt, params) for number, prompt in prompts.items()],
            [ScheduledSequence(number, 0, len(prompt), [number]) for number, prompt in prompts.items()],
        ),
        Step([], [], [ScheduledSequence(number, len(prompt), 1, []) for number, prompt in prompts.items()]),
    ]
    device = "cuda" if torch.cuda.is_available() else "cpu"

    def serve(num_failures: int) -> list[list[SequenceResult]]:
        runner = make_runner(tiny_llama, "triton", max_sequences=4, device=device)
        launched = [runner.launch(steps[0])]
        left = iter(range(num_failures))
        failed = limit_forward(runner, lambda _: next(left, None) is not None)
        launched.append(runner.launch(steps[1]))
        assert len(failed) == num_failures
        return [runner.finish(one).sequences for one in launched]

    assert serve(num_failures=1) == serve(num_failures=0)


@pytest.mark.parametrize(
    ("kernels", "native"), [("torch", True), ("compiled", True), ("triton", True), ("triton", False)]
)
def test_a_step_that_fits_with_no_sequence_fails_all_of_them(kernels: str, native: bool, tiny_llama: Path) -> None:
    runner = make_runner(tiny_llama, kernels, max_sequences=4, native=native)
    limit_forward(runner, lambda num_tokens: num_tokens > 2)
    new = [new_sequence(1, [1, 2, 3]), new_sequence(2, [1, 2, 3, 4])]
    step = Step([], new, [ScheduledSequence(1, 0, 3, [0]), ScheduledSequence(2, 0, 2, [1])])
    outcome = runner.step(step)
    one, other = outcome.sequences
    assert outcome.num_left_out == 2
    assert one.failure == OUT_OF_MEMORY
    assert other.failure == OUT_OF_MEMORY
    (fits,) = runner.step(Step([1, 2], [new_sequence(3, [5, 6])], [ScheduledSequence(3, 0, 2, [2])])).sequences
    assert len(fits.token_ids) == 1


def test_a_line_of_the_log_says_what_to_set(tiny_llama: Path, caplog: pytest.LogCaptureFixture) -> None:
    runner = make_runner(tiny_llama, max_sequences=4)
    limit_forward(runner, lambda num_tokens: num_tokens > 5)
    new = [new_sequence(3, [1, 2, 3, 4]), new_sequence(4, [5, 6])]
    with caplog.at_level(logging.WARNING, "quire.worker"):
        runner.step(Step([], new, [ScheduledSequence(3, 0, 4, [0]), ScheduledSequence(4, 0, 2, [1])]))
    _assert_says_what_to_set(caplog, sequence_id=4)


def _assert_says_what_to_set(caplog: pytest.LogCaptureFixture, sequence_id: int) -> None:
    """One line for the sequence, which names settings that the worker has, and the allocator's error."""
    (record,) = caplog.records
    line = json.loads(JsonFormatter("worker").format(record))
    assert line["level"] == "warning"
    assert line["sequence_id"] == sequence_id
    assert "DefaultCPUAllocator" in line["why"]
    named = set(re.findall(r"QUIRE_(\w+)", line["event"]))
    assert {"MAX_STEP_TOKENS", "MAX_SEQUENCES", "MEMORY_FRACTION", "CPU_KV_BYTES", "SWAP_SPACE"} == named
    assert {name.lower() for name in named} <= WorkerSettings.model_fields.keys()


async def test_a_metric_counts_those_that_failed(loading_worker: Worker, tiny_llama: Path) -> None:
    runner = make_runner(tiny_llama, max_sequences=4)
    limit_forward(runner, lambda num_tokens: num_tokens > 5)
    loading_worker.service.serve(make_instance(runner))
    before = REGISTRY.get_sample_value("quire_worker_out_of_memory_total") or 0.0
    stream = await loading_worker.open()
    new = [wire_sequence(3, [1, 2, 3, 4]), wire_sequence(4, [5, 6])]
    await stream.send(1, new_sequences=new, scheduled=scheduled((3, 0, 4, 0), (4, 0, 2, 1)))
    await stream.send(2)
    for _ in range(2):  # the first step is counted after its response is sent, and before the second one's
        await stream.receive()
    assert REGISTRY.get_sample_value("quire_worker_out_of_memory_total") == before + 1


def _submits() -> list[Submit]:
    """Prompts of which some share a prefix and some are long, some with several sequences, some with sampling."""
    rng = random.Random(3)
    shared = [rng.randrange(VOCAB) for _ in range(19)]
    submits = []
    for place in range(14):
        own = [rng.randrange(VOCAB) for _ in range(rng.choice([1, 8, 9, 60]))]
        prompt = shared + own if place % 3 == 0 else own
        sampling = {"temperature": 1.0, "seed": place} if place % 2 else {}
        submits.append(
            submission(str(place), prompt, rng.choice([3, 20, 40]), n=1 + 2 * (place % 5 == 0), logprobs=1, **sampling)
        )
    return submits


CIRCUMSTANCES: dict[str, dict[str, Any]] = {
    "plenty of blocks": {},
    "in chunks": {"max_step_tokens": 27},
    "swapped": {"num_blocks": 16, "preemption": "swap", "num_host_blocks": 64},
    "computed again": {"num_blocks": 16, "preemption": "recompute"},
}


@pytest.mark.parametrize("name", CIRCUMSTANCES)
def test_in_a_deployment_others_get_the_same_bits_and_no_block_is_lost(name: str, tiny_llama: Path) -> None:
    options: dict[str, Any] = {"num_blocks": 100, "preemption": "auto"} | CIRCUMSTANCES[name]
    num_blocks, preemption = options["num_blocks"], options.pop("preemption")
    runner = make_runner(tiny_llama, "compiled", block_size=8, num_blocks=100)
    expected = CoreRunner(make_instance(runner), 100).serve(_submits())
    runner = make_runner(tiny_llama, "compiled", block_size=8, **options)
    passes = count(1)
    failed_sizes = limit_forward(runner, lambda _: next(passes) % 20 == 0)
    core_runner = CoreRunner(make_instance(runner), num_blocks, preemption)
    core_runner.may_fail = True
    served = core_runner.serve(_submits())  # checks the blocks after each step
    failed = core_runner.failed
    assert failed_sizes
    assert failed
    assert {event.reason for event in failed.values()} == {Failure.UNAVAILABLE}
    assert len(failed) < len(expected)
    for key, sequences in expected.items():
        if key not in failed:
            assert [(one.token_ids, one.logprobs) for one in served[key]] == [
                (one.token_ids, one.logprobs) for one in sequences
            ]
    if "preemption" in CIRCUMSTANCES[name]:
        assert core_runner.core.totals.preemptions


def test_an_encoder_leaves_the_newest_prompt_out(caplog: pytest.LogCaptureFixture) -> None:
    from worker_svc.description import WorkerLimits

    def forward(prompts: Any, num_first: object, places: object) -> list[torch.Tensor]:
        if sum(map(len, prompts)) > 5:
            torch.empty(_IMPOSSIBLE, dtype=torch.uint8)
        return [torch.tensor(prompt, dtype=torch.float32)[:, None] for prompt in prompts]

    class Pooler:
        result = "embedding"

        def __call__(self, hidden: list[torch.Tensor], requested: object) -> list[list[float]]:
            return [[float(states.sum())] for states in hidden]

        def place(self, new: object) -> None:
            return None

    runner = EncoderRunner(forward, Pooler(), WorkerLimits(VOCAB, 64, 16, 0, 64, 8))  # type: ignore[arg-type]
    prompts = {5: [1, 2], 9: [3, 4], 7: [5, 6]}
    new = [
        NewSequence(number, ids, len(ids), 0, SamplingParams(), result="embedding") for number, ids in prompts.items()
    ]
    outcome = runner.step(Step([], new, [ScheduledSequence(number, 0, 2, []) for number in prompts]))
    results = outcome.sequences
    assert outcome.num_left_out == 1
    assert [(result.value, result.failure_reason) for result in results if result.failure is None] == [
        ([3.0], FailureReason.INTERNAL),
        ([11.0], FailureReason.INTERNAL),
    ]
    assert results[1].failure == OUT_OF_MEMORY
    assert results[1].failure_reason is FailureReason.OUT_OF_MEMORY
    _assert_says_what_to_set(caplog, sequence_id=9)
