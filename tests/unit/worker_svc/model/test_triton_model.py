"""The fused kernels compute every variant of the family as transformers does."""

import random
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from llama_models import VARIANTS, VOCAB
from runner_driver import Driver, make_runner
from worker_svc.step import SamplingParams

_rng = random.Random(5)
PROMPTS = [[_rng.randrange(VOCAB) for _ in range(length)] for length in (2, 18)]
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


@pytest.mark.parametrize("variant", VARIANTS)
def test_log_probabilities_are_those_of_the_modules(variant: str, save_model: Callable[..., Path]) -> None:
    directory = save_model(VARIANTS[variant]())
    params = SamplingParams(logprobs=VOCAB)
    modules, fused = Driver(make_runner(directory)), Driver(make_runner(directory, "fused", device=DEVICE), chunk=9)
    assert fused.generate(PROMPTS, 3, params) == modules.generate(PROMPTS, 3, params)
    for sequence_id, expected in modules.logprobs.items():
        for reported, by_modules in zip(fused.logprobs[sequence_id], expected, strict=True):
            assert dict(reported.top) == pytest.approx(dict(by_modules.top), abs=2e-4)
