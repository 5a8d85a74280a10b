"""The compiled draws are the sampler's."""

from typing import Any

import numpy as np
import pytest
import torch

import compiled
from quire_kernels.cpu.sample import DRAW, draw, likeliest
from worker_svc.philox import uniforms
from worker_svc.sampler import SamplingState, draw_tokens
from worker_svc.step import SamplingParams

KINDS: dict[str, dict[str, Any]] = {
    "temperature": {"temperature": 0.7},
    "hot": {"temperature": 2.0},
    "cold": {"temperature": 0.01},
    "top_k": {"top_k": 5},
    "top_k of one": {"top_k": 1},
    "top_k beyond": {"top_k": 10**9},
    "top_p": {"top_p": 0.8},
    "top_p of little": {"top_p": 1e-9},
    "min_p": {"min_p": 0.05},
    "all": {"temperature": 0.9, "top_k": 40, "top_p": 0.9, "min_p": 0.01},
}


@pytest.mark.parametrize("vocab", [1, 7, 63, 97, 1000, 5003])
@pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)
def test_draws_are_the_samplers(kind: dict[str, Any], vocab: int) -> None:
    torch.manual_seed(vocab)
    logits = torch.randn(24, vocab).mul_(3)
    logits[3] = 0.5  # all alike
    logits[4, vocab // 2 :] = logits[4, : vocab - vocab // 2].clone()  # ties
    states = [
        SamplingState(SamplingParams(**({"temperature": 1.0} | kind), seed=row), 0, np.zeros(3, np.int32), 3)
        for row in range(len(logits))
    ]
    numbers = uniforms(np.arange(24, dtype=np.uint64), np.zeros(24, np.uint32), np.full(24, 3, np.uint32))
    draws = np.zeros(24, DRAW)
    for name, value in ({"temperature": 1.0, "top_p": 1.0} | kind).items():
        draws[name] = value
    draws["number"] = numbers
    drawn = draw(compiled.team(), logits, np.arange(24), draws)
    assert drawn.tolist() == draw_tokens(logits.clone(), states).tokens


def test_draws_follow_the_weights() -> None:
    weights = torch.tensor([0.5, 0.0, 0.3, 0.2])
    draws = np.zeros(2000, DRAW)
    draws["temperature"] = draws["top_p"] = 1.0
    draws["number"] = (np.arange(2000) + 0.5) / 2000
    drawn = draw(compiled.team(), weights.log()[None], np.zeros(2000, np.int64), draws)
    assert np.bincount(drawn, minlength=4).tolist() == [1000, 0, 600, 400]
    assert drawn.tolist() == sorted(drawn)


@pytest.mark.parametrize("place", [0, 40, 96])
@pytest.mark.parametrize("fault", [float("nan"), float("inf")])
def test_a_row_with_a_fault_draws_nothing(fault: float, place: int) -> None:
    logits = torch.zeros(3, 97)
    logits[:, 50] = 1.0
    logits[1, place] = fault
    draws = np.zeros(3, DRAW)
    draws["temperature"] = draws["top_p"] = 1.0
    assert likeliest(compiled.team(), logits).tolist() == [50, -1, 50]
    assert (draw(compiled.team(), logits, np.arange(3), draws) < 0).tolist() == [False, True, False]


def test_the_first_of_the_likeliest_is_taken() -> None:
    logits = torch.zeros(4, 97)
    for row, token in enumerate((0, 15, 16, 96)):
        logits[row, token:] = 2.5
    assert likeliest(compiled.team(), logits).tolist() == [0, 15, 16, 96]
    logits[2, 3] = float("-inf")
    assert likeliest(compiled.team(), logits).tolist() == [0, 15, -1, 96]


def test_suppressed_tokens_are_never_drawn() -> None:
    logits = torch.full((2, 97), float("-inf"))
    logits[0, 33] = -5.0
    draws = np.zeros(2, DRAW)
    draws["temperature"], draws["top_p"], draws["number"] = 1.0, 0.5, 0.999
    assert draw(compiled.team(), logits, np.arange(2), draws).tolist() == [33, -1]
    assert likeliest(compiled.team(), logits, suppressed=True).tolist() == [33, -1]
    assert likeliest(compiled.team(), logits).tolist() == [-1, -1]
