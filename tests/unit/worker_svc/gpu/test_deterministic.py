"""In deterministic mode the GPU's path comes to the same bits whatever a step holds.

Through Triton's interpreter this shows that no kernel's order of sums follows the batch; that the instructions a GPU
runs for a row do not depend on its neighbours, only a GPU can show.
"""

import random
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from llama_models import VARIANTS, VOCAB
from ordered_dots import order_dots
from runner_driver import Driver, make_runner
from worker_svc.runner import Runner
from worker_svc.step import SamplingParams

DTYPES = [torch.float32, torch.float16] + [torch.bfloat16] * torch.cuda.is_available()
NUM_TOKENS = 4
_RNG = random.Random(5)
PROMPTS = [[_RNG.randrange(VOCAB) for _ in range(length)] for length in (1, 16, 70)]
PARAMS = [
    SamplingParams(temperature=1.0, top_p=0.9, seed=1, logprobs=3),
    SamplingParams(logprobs=VOCAB),
    SamplingParams(temperature=0.8, min_p=0.02, seed=2, logprobs=0),
]


@pytest.fixture(scope="module", params=DTYPES, ids=str)
def make(request: pytest.FixtureRequest, save_model: Callable[..., Path]) -> Callable[[], Runner]:
    directory = save_model(VARIANTS["qwen3"]())
    options = {"dtype": request.param, "max_sequences": 8, "deterministic": True}
    device = "cuda" if torch.cuda.is_available() else "cpu"
    return lambda: make_runner(directory, "fused", device=device, cuda_graphs=True, **options)


def test_tokens_and_log_probabilities_are_the_same_bits(
    make: Callable[[], Runner], monkeypatch: pytest.MonkeyPatch
) -> None:
    order_dots(monkeypatch)
    runner = make()
    crowd = Driver(runner)
    sampled = crowd.generate(PROMPTS, NUM_TOKENS, PARAMS)
    for place, (prompt, params) in enumerate(zip(PROMPTS, PARAMS, strict=True)):
        told = crowd.logprobs[1 + place]
        alone = Driver(runner, chunk=23)
        assert alone.generate([prompt], NUM_TOKENS, params) == [sampled[place]], "alone, in chunks"
        assert alone.logprobs[1] == told
        # What was decoded is computed again as a part of the prompt, as after a preemption.
        resumed = Driver(runner)
        half = NUM_TOKENS // 2
        (rest,) = resumed.generate([prompt + sampled[place][:half]], NUM_TOKENS - half, params)
        assert rest == sampled[place][half:], "computed again"
        assert resumed.logprobs[1] == told[half:]
