"""In deterministic mode the GPU's path computes the same bits in any step."""

import random
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import torch

import dense_models
import transformers_models
from core_runner import CoreRunner, submission
from drafters import knowing
from large import large_but
from llama_models import VARIANTS, VOCAB
from ordered_dots import order_dots
from runner_driver import Driver, make_runner
from runner_instance import make_instance
from worker_svc.logit_filters.typical_p import TypicalFilter
from worker_svc.runner import Runner
from worker_svc.step import SamplingParams

DTYPES = [torch.float32, torch.float16] + [torch.bfloat16] * torch.cuda.is_available()
MODELS = VARIANTS | transformers_models.VARIANTS | dense_models.VARIANTS
# Other norms, activations and positions beside those of Qwen 3
CASES = [
    *(("qwen3", dtype) for dtype in DTYPES),
    ("gpt-neox", torch.float32),
    ("gemma2", torch.float32),
    ("qwen2-moe", torch.float32),
    ("gpt-oss", torch.float32),
    ("gemma4-small", torch.float32),
]
NUM_TOKENS = 4
_RNG = random.Random(5)
# Interpreted products with a fixed order take long.
LONGEST, CHUNK = (70, 23) if torch.cuda.is_available() else (37, 19)
PROMPTS = [[_RNG.randrange(VOCAB) for _ in range(length)] for length in (1, 16, LONGEST)]
PARAMS = [
    SamplingParams(temperature=1.0, top_p=0.9, seed=1, logprobs=3),
    SamplingParams(logprobs=VOCAB),
    SamplingParams(temperature=0.8, min_p=0.02, seed=2, logprobs=0),
]


@pytest.fixture(scope="module", params=CASES, ids=str)
def make(request: pytest.FixtureRequest, save_model: Callable[..., Path]) -> Callable[..., Runner]:
    variant, dtype = request.param
    directory = save_model(MODELS[variant]())
    options = {"dtype": dtype, "max_sequences": 8, "deterministic": True}
    device = "cuda" if torch.cuda.is_available() else "cpu"
    return lambda **more: make_runner(directory, "triton", device=device, cuda_graphs=True, **options, **more)


# Without a GPU, kernels are interpreted, slowly. The test below compares the bits of the other dtypes.
@pytest.mark.parametrize("make", CASES if torch.cuda.is_available() else CASES[:1], indirect=True, ids=str)
def test_a_draft_changes_no_bit(make: Callable[..., Runner], monkeypatch: pytest.MonkeyPatch) -> None:
    order_dots(monkeypatch)
    plain = Driver(make())
    expected = plain.generate(PROMPTS, 6, PARAMS)
    texts = [prompt + tokens for prompt, tokens in zip(PROMPTS, expected, strict=True)]
    runner = make(make_drafter=knowing(texts, VOCAB, 1), max_draft_tokens=3)
    core_runner = CoreRunner(make_instance(runner), runner.limits.num_blocks)
    served = core_runner.serve(
        submission(str(place), prompt, 6, logprobs=params.logprobs, temperature=params.temperature, top_p=params.top_p,
                   min_p=params.min_p, seed=params.seed)
        for place, (prompt, params) in enumerate(zip(PROMPTS, PARAMS, strict=True))
    )  # fmt: skip
    for place, tokens in enumerate(expected):
        (one,) = served[str(place)]
        reported = [(each.logprob, tuple(each.top)) for each in plain.logprobs[1 + place]]
        assert (one.token_ids, one.logprobs) == (tokens, reported)
    assert core_runner.num_results[2] + core_runner.num_results[3] + core_runner.num_results[4] > 0


@pytest.mark.parametrize(
    "make",
    large_but(CASES, ("qwen3", torch.float16), ("qwen2-moe", torch.float32), ("gpt-oss", torch.float32)),
    indirect=True,
    ids=str,
)
def test_tokens_and_log_probabilities_are_the_same_bits(
    make: Callable[..., Runner], monkeypatch: pytest.MonkeyPatch
) -> None:
    order_dots(monkeypatch)
    runner = make()
    crowd = Driver(runner)
    sampled = crowd.generate(PROMPTS, NUM_TOKENS, PARAMS)
    for place, (prompt, params) in enumerate(zip(PROMPTS, PARAMS, strict=True)):
        reported = crowd.logprobs[1 + place]
        alone = Driver(runner, chunk=CHUNK)
        assert alone.generate([prompt], NUM_TOKENS, params) == [sampled[place]], "alone, in chunks"
        assert alone.logprobs[1] == reported
        # What was decoded is computed again as a part of the prompt, as after a preemption.
        resumed = Driver(runner)
        half = NUM_TOKENS // 2
        (rest,) = resumed.generate([prompt + sampled[place][:half]], NUM_TOKENS - half, params)
        assert rest == sampled[place][half:], "computed again"
        assert resumed.logprobs[1] == reported[half:]


class CountingFilter(TypicalFilter):
    """Counts the rows of its calls."""

    def __init__(self) -> None:
        self.num_rows: list[int] = []

    def __call__(self, logits: torch.Tensor, params: Sequence[SamplingParams]) -> None:
        self.num_rows.append(len(logits))
        super().__call__(logits, params)


@pytest.mark.parametrize("deterministic", [False, True])
def test_filters_see_one_row_at_a_time(deterministic: bool, tiny_llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Their sums depend on the number of rows otherwise."""
    counting = CountingFilter()
    monkeypatch.setattr("worker_svc.penalties.FILTERS", (counting,))
    device = "cuda" if torch.cuda.is_available() else "cpu"
    runner = make_runner(tiny_llama, "triton", device=device, max_sequences=4, deterministic=deterministic)
    prompts, params = [[1, 2], [3]], SamplingParams(temperature=1.0, seed=3, typical_p=0.5)
    Driver(runner).generate(prompts, 2, params)
    assert counting.num_rows == ([1] * 4 if deterministic else [2] * 2)
