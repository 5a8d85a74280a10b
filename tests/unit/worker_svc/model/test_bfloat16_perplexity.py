"""Perplexity in bfloat16 is that of transformers' modules in bfloat16, for each architecture that is computed natively.

The text is sampled from the model in float32, so the model in float32 has the lowest perplexity of it. The weights are
random, and small enough that rounding does not decide which tokens are likely.
"""

import math
from collections.abc import Callable
from pathlib import Path
from statistics import fmean
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

import dense_models
import latent_models
import llama_models
import transformers_models
from benchmarks.quality import Window, score
from runner_driver import make_runner

VARIANTS: dict[str, Callable[[], Any]] = {
    **{name: llama_models.VARIANTS[name] for name in ("llama", "qwen3")},
    **dense_models.VARIANTS,
    **{name: make for name, make in transformers_models.VARIANTS.items() if name.endswith("moe")},
    "mixtral": transformers_models.VARIANTS["mixtral"],
    **latent_models.VARIANTS,
}
NUM_TEXTS, LENGTH = 32, 90
BOUND = 1e-3
# Random routers with sigmoids choose among nearly equal weights, so rounding changes the choice. The hidden states of
# transformers are rounded too, and its perplexity is up to 0.4 % above that in float32: ours must not be farther away.
ROUNDING_CHOOSES_EXPERTS = {"deepseek-v3", "deepseek-v3-plain"}


@pytest.mark.parametrize("name", VARIANTS)
def test_perplexity_in_bfloat16(name: str, save_model: Callable[..., Path]) -> None:
    config = VARIANTS[name]()
    for attribute in ("initializer_range", "init_std"):
        if hasattr(config, attribute):
            setattr(config, attribute, 0.3 * getattr(config, attribute))
    directory = save_model(config)
    exact, rounded = (_load(directory, dtype) for dtype in (torch.float32, torch.bfloat16))
    texts = _sample(exact)
    of_exact, theirs = (_perplexity(model, texts) for model in (exact, rounded))
    for kernels in ("torch", "compiled"):
        runner = make_runner(directory, kernels, dtype=torch.bfloat16, num_blocks=8 * NUM_TEXTS)
        ours = math.exp(-fmean(score(runner, [Window(text, 1) for text in texts.tolist()])))
        if name in ROUNDING_CHOOSES_EXPERTS:
            assert abs(ours / of_exact - 1) < max(BOUND, theirs / of_exact - 1), kernels
        else:
            assert abs(ours / theirs - 1) < BOUND, kernels


def _load(directory: Path, dtype: torch.dtype) -> Any:
    return AutoModelForCausalLM.from_pretrained(directory, dtype=dtype)


def _sample(model: Any) -> Tensor:
    """Token ids [NUM_TEXTS, LENGTH]."""
    torch.manual_seed(1)
    first = torch.randint(1, transformers_models.VOCAB, (NUM_TEXTS, 1))
    with torch.inference_mode():
        texts: Tensor = model.generate(
            first,
            attention_mask=torch.ones_like(first),
            do_sample=True,
            top_k=0,
            max_new_tokens=LENGTH - 1,
            pad_token_id=0,
        )
    assert texts.shape == (NUM_TEXTS, LENGTH)
    return texts


def _perplexity(model: Any, texts: Tensor) -> float:
    with torch.inference_mode():
        logprobs = model(texts).logits[:, :-1].float().log_softmax(-1)
    return math.exp(-float(logprobs.gather(-1, texts[:, 1:, None]).mean()))
