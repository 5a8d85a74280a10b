"""Keys and values in 8 bits, end to end: close to the full cache, and copied with their scales."""

import random
import statistics
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

import dense_models
from large import large_but
from llama_models import VARIANTS, VOCAB
from runner_driver import Driver, make_runner
from worker_svc.runner import Runner
from worker_svc.step import BlockOps, NewSequence, SamplingParams, ScheduledSequence, Step, TokenLogprobs

_rng = random.Random(6)
PROMPTS = [[_rng.randrange(VOCAB) for _ in range(length)] for length in (3, 21)]
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
ALL = SamplingParams(logprobs=VOCAB)
# By how much log-probabilities may differ from those over a float32 cache: in the mean over the vocabulary, and beside
# how far these are spread. Triton's interpreter does not round to fp8, it cuts off, which is up to twice as far off.
NEAR = {torch.int8: 0.05, torch.float8_e4m3fn: 0.25}


@dataclass(frozen=True)
class Backend:
    """What computes, and what its cache holds."""

    kernels: str
    cache_dtype: torch.dtype

    def runner(self, directory: Path, **options: Any) -> Runner:
        """A runner, on a GPU if there is one and the kernels are for it."""
        device = DEVICE if self.kernels == "triton" else "cpu"
        return make_runner(directory, self.kernels, device=device, cache_dtype=self.cache_dtype, **options)


@pytest.fixture(
    params=[Backend("triton", torch.int8), Backend("triton", torch.float8_e4m3fn), Backend("compiled", torch.int8)],
    ids=["triton int8", "triton fp8", "compiled int8"],
)
def backend(request: pytest.FixtureRequest) -> Backend:
    chosen: Backend = request.param
    return chosen


@pytest.mark.parametrize(
    ("variant", "native"),
    [("llama", True), ("llama", False), ("qwen3-window", True), ("qwen3-window", False), ("gemma4", True)],
)
def test_log_probabilities_are_near_those_over_a_full_cache(
    variant: str, native: bool, backend: Backend, save_model: Callable[..., Path]
) -> None:
    directory = save_model((VARIANTS | dense_models.VARIANTS)[variant]())
    full = _first_draws(make_runner(directory))
    small = _first_draws(backend.runner(directory, native=native))
    differences = [_difference(one, other) for one, other in zip(full, small, strict=True)]
    assert 0 < max(differences) < NEAR[backend.cache_dtype], differences


@pytest.mark.parametrize("native", large_but([True, False], True))
def test_chunks_and_captured_decodes_see_the_same_codes(native: bool, backend: Backend, tiny_llama: Path) -> None:
    whole = Driver(backend.runner(tiny_llama, max_sequences=2, native=native)).generate(PROMPTS, 6)
    runner = backend.runner(tiny_llama, max_sequences=2, native=native, cuda_graphs=True)
    assert Driver(runner, chunk=7, ahead=1).generate(PROMPTS, 6) == whole


def test_scales_are_copied_with_their_block(backend: Backend, tiny_llama: Path) -> None:
    runner = backend.runner(tiny_llama, num_blocks=8, num_host_blocks=4, max_sequences=2)
    prompt = PROMPTS[1]
    stayed = _token(runner, Step([], [_new(1, prompt)], [ScheduledSequence(1, 0, 21, [0, 1])]))
    runner.step(Step([], [], [], BlockOps(swap_out=[(0, 3), (1, 1)])))
    # Through another block of the device, and over others' codes and scales
    _token(runner, Step([], [_new(2, prompt[::-1])], [ScheduledSequence(2, 0, 21, [4, 5])]))
    runner.step(Step([], [], [], BlockOps(swap_in=[(3, 7), (1, 5)])))
    runner.step(Step([], [], [], BlockOps(copies=[(7, 4)])))
    again = [*prompt, stayed]
    moved = _token(runner, Step([], [_new(3, again)], [ScheduledSequence(3, 21, 1, [4, 5])]))
    assert moved == _token(runner, Step([], [], [ScheduledSequence(1, 21, 1, [])]))


def _new(sequence_id: int, tokens: list[int]) -> NewSequence:
    return NewSequence(sequence_id, tokens, len(tokens), 0, ALL)


def _token(runner: Runner, step: Step) -> int:
    (result,) = runner.step(step).sequences
    assert result.failure is None, result.failure
    return result.token_ids[0]


def _first_draws(runner: Runner) -> list[TokenLogprobs]:
    """After the prompts, whose last chunks are of three tokens and of one."""
    driver = Driver(runner, chunk=5)
    driver.generate(PROMPTS, 1, ALL)
    return [reported[0] for reported in driver.logprobs.values()]


def _difference(one: TokenLogprobs, other: TokenLogprobs) -> float:
    values, others = dict(one.top), dict(other.top)
    spread = statistics.stdev(values.values())
    return statistics.mean(abs(values[token] - others[token]) for token in values) / spread
