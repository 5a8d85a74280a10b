"""Perplexity of random models in bfloat16 beside that of transformers' modules in bfloat16.

The texts are sampled from the model in float32, so the model in float32 has the lowest perplexity of them. The weights
are small enough that rounding does not decide which tokens are likely.
"""

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

import dense_models
import latent_models
import llama_models
import transformers_models
from prompt_scores import run_prompts, scored
from runner_driver import Driver, make_runner
from transformers_models import VOCAB
from worker_svc.step import SamplingParams, TokenLogprobs

VARIANTS: dict[str, Callable[[], Any]] = {
    **{name: llama_models.VARIANTS[name] for name in ("llama", "qwen3")},
    **dense_models.VARIANTS,
    **{name: make for name, make in transformers_models.VARIANTS.items() if name.endswith("moe")},
    **{name: transformers_models.VARIANTS[name] for name in ("mixtral", "dots1", "k-exaone", "minimax-m2", "gpt-oss")},
    **latent_models.VARIANTS,
}
BOUND = 1e-3
# Random routers choose among nearly equal weights, so rounding changes the choice. transformers rounds hidden states
# too, and its perplexity is up to 0.5 % above that in float32; with vectors of each layer's own, which it also rounds,
# up to 0.9 %. Ours must not be farther away. Of few decodes, chance decides who meets such a choice: theirs are not
# compared.
ROUNDING_DECIDES = {
    "deepseek-v3", "deepseek-v3-plain", "glm4-moe", "glm4-moe-lite", "gemma4-experts", "gemma4-small"
}  # fmt: skip
# The Triton kernels compute prompts in chunks of _CHUNK tokens, and decode _NUM_DECODED tokens after _NUM_GIVEN.
_CHUNK, _NUM_GIVEN, _NUM_DECODED = 19, 8, 3
# The largest divergence of the Triton kernels from float32, as a multiple of that of transformers in bfloat16.
_DIVERGENCE_BOUND = 1.5


def save_variant(name: str, path: Path) -> Path:
    """A random model of VARIANTS with small weights, in `path`."""
    config = VARIANTS[name]()
    for attribute in ("initializer_range", "init_std"):
        if hasattr(config, attribute):
            setattr(config, attribute, 0.3 * getattr(config, attribute))
    return llama_models.save_model(path, config)


def load(directory: Path, dtype: torch.dtype) -> Any:
    """transformers' module."""
    return AutoModelForCausalLM.from_pretrained(directory, dtype=dtype)


def sample(model: Any, num_texts: int, length: int) -> Tensor:
    """Token ids [num_texts, length]."""
    torch.manual_seed(1)
    first = torch.randint(1, VOCAB, (num_texts, 1))
    with torch.inference_mode():
        texts: Tensor = model.generate(
            first,
            attention_mask=torch.ones_like(first),
            do_sample=True,
            top_k=0,
            max_new_tokens=length - 1,
            pad_token_id=0,
        )
    assert texts.shape == (num_texts, length)
    return texts


def perplexity(model: Any, texts: Tensor) -> float:
    """By a module of transformers."""
    return math.exp(-float(_all_logprobs(model, texts).gather(-1, texts[:, 1:, None]).mean()))


def check_triton_kernels(name: str, directory: Path, device: str, num_texts: int, length: int) -> None:
    """Of a model that `save_variant` has written: asserts that the Triton kernels have transformers' perplexity.

    Perplexity is the expected one of the next tokens, which float32 gives their probabilities. In bfloat16 the
    log-probability of a token is off by about 0.006: the mean of 60 sampled tokens has a standard error of 0.0008, too
    near to BOUND. The expectation has no such noise. It exceeds that of float32 by the Kullback-Leibler divergence from
    it. That is about 1e-5 for dense models, far below BOUND, so the median divergence is also compared with that of
    transformers. A median, because rounding may choose other experts for a few tokens.
    """
    exact, rounded = (load(directory, dtype) for dtype in (torch.float32, torch.bfloat16))
    texts = sample(exact, num_texts, length)
    runner = make_runner(
        directory,
        "triton",
        device=device,
        dtype=torch.bfloat16,
        num_blocks=8 * num_texts,
        max_step_tokens=_CHUNK * num_texts,
        max_sequences=num_texts,
    )
    new = [scored(place, text, VOCAB) for place, text in enumerate(texts.tolist())]
    of_prompts = torch.stack([_every(logprobs) for logprobs, _ in run_prompts(runner, new, _CHUNK)])
    driver, given = Driver(runner), texts[:, :_NUM_GIVEN]
    sampled = driver.generate(given.tolist(), _NUM_DECODED, SamplingParams(logprobs=VOCAB))
    of_decodes = torch.stack([_every(logprobs) for logprobs in driver.logprobs.values()])
    of_ours, of_theirs = [], []
    for logprobs, tokens, first in (
        (of_prompts, texts, 0),
        (of_decodes, torch.cat([given, torch.tensor(sampled)], 1), _NUM_GIVEN - 1),
    ):
        of_exact, of_rounded = (_all_logprobs(model, tokens)[:, first:] for model in (exact, rounded))
        of_ours.append(_divergences(of_exact, logprobs))
        of_theirs.append(_divergences(of_exact, of_rounded))
        assert of_ours[-1].median() < _DIVERGENCE_BOUND * of_theirs[-1].median()
    ours, theirs = (float(torch.cat(each).mean()) for each in (of_ours, of_theirs))
    if name in ROUNDING_DECIDES:
        # Of so few tokens, the number that get other experts is random.
        assert math.expm1(ours) < max(BOUND, _DIVERGENCE_BOUND * math.expm1(theirs))
    else:
        assert abs(math.expm1(ours - theirs)) < BOUND


def _all_logprobs(model: Any, texts: Tensor) -> Tensor:
    """After each token but the last [num_texts, length - 1, VOCAB]."""
    with torch.inference_mode():
        logprobs: Tensor = model(texts).logits[:, :-1].float().log_softmax(-1)
    return logprobs


def _every(logprobs: list[TokenLogprobs]) -> Tensor:
    """Those of all tokens, at each place [num_places, VOCAB]."""
    return torch.tensor([[value for _, value in sorted(one.top)] for one in logprobs])


def _divergences(of_exact: Tensor, logprobs: Tensor) -> Tensor:
    """Kullback-Leibler divergence from the probabilities in float32, at each place, in nats [num_places]."""
    return (of_exact.double().exp() * (of_exact.double() - logprobs.double())).sum(-1).flatten()
