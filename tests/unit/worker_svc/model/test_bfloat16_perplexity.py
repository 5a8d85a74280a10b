"""Perplexity in bfloat16 is that of transformers' modules in bfloat16, for each architecture that is computed natively.

The Triton kernels run in Triton's interpreter here, at 20 to 60 tokens per second, so their texts are few and short.
tests/gpu runs them compiled, with texts of full size.
"""

import math
from pathlib import Path
from statistics import fmean

import pytest
import torch

from benchmarks.quality import Window, score
from bfloat16_perplexity import (
    BOUND,
    ROUNDING_DECIDES,
    VARIANTS,
    check_triton_kernels,
    load,
    perplexity,
    sample,
    save_variant,
)
from interpreted_bfloat16 import round_bfloat16
from large import large_but
from runner_driver import make_runner

NUM_TEXTS, LENGTH = 32, 90
INTERPRETED_TEXTS, INTERPRETED_LENGTH = 2, 30
INTERPRETED = (
    "llama",
    "gemma2",
    "gemma3",
    "gpt-neox",
    "opt-tied-unbiased",
    "phi3-longrope",
    "qwen2-moe",
    "deepseek-v3",
)
"""Most kinds of norms, positions, masks, caps, MLPs, routers and attention; tests/gpu has all variants."""


@pytest.mark.parametrize("name", VARIANTS)
def test_perplexity_in_bfloat16(name: str, tmp_path: Path) -> None:
    directory = save_variant(name, tmp_path)
    exact, rounded = (load(directory, dtype) for dtype in (torch.float32, torch.bfloat16))
    texts = sample(exact, NUM_TEXTS, LENGTH)
    of_exact, theirs = (perplexity(model, texts) for model in (exact, rounded))
    for kernels in ("torch", "compiled"):
        runner = make_runner(directory, kernels, dtype=torch.bfloat16, num_blocks=8 * NUM_TEXTS)
        ours = math.exp(-fmean(score(runner, [Window(text, 1) for text in texts.tolist()])))
        if name in ROUNDING_DECIDES:
            assert abs(ours / of_exact - 1) < max(BOUND, theirs / of_exact - 1), kernels
        else:
            assert abs(ours / theirs - 1) < BOUND, kernels


@pytest.mark.skipif(torch.cuda.is_available(), reason="with a GPU, nothing is interpreted")
@pytest.mark.parametrize("name", large_but(INTERPRETED, "llama", "gemma2", "opt-tied-unbiased"))
def test_perplexity_by_the_triton_kernels(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    round_bfloat16(monkeypatch)
    check_triton_kernels(name, save_variant(name, tmp_path), "cpu", INTERPRETED_TEXTS, INTERPRETED_LENGTH)
