"""The compiled forward pass computes what transformers computes, and the same bits in any step."""

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig, Qwen2Config

import transformers_models
from llama_models import SIZES, VARIANTS, VOCAB
from quire_kernels.cpu.attention import check_compiled_support
from quire_kernels.cpu.linear import MatrixFormat
from runner_driver import Driver, make_runner
from worker_svc.step import SamplingParams

Save = Callable[..., Path]
EVERY_LOGPROB = SamplingParams(logprobs=VOCAB)
# Qwen 2 has no say in its heads' size: of the others' hidden size they would be of 8, which is not taken.
_WIDE = {name: size for name, size in SIZES.items() if name != "head_dim"} | {"hidden_size": 96}
_ODD = SIZES | {"hidden_size": 54, "intermediate_size": 83}
_SLIDING: dict[str, Any] = {"use_sliding_window": True, "sliding_window": 20, "max_window_layers": 1}
FAMILIES = ["gemma2", "gemma3", "gpt-neox", "gpt2", "opt", "phi3", "phi3-longrope"]
CONFIGS = (
    VARIANTS
    | {name: transformers_models.VARIANTS[name] for name in FAMILIES}
    | {
        "qwen2": lambda: Qwen2Config(**_WIDE),
        "qwen2-window": lambda: Qwen2Config(**_WIDE, **_SLIDING),
        "llama-odd": lambda: LlamaConfig(**_ODD),
    }
)

_rng = random.Random(3)
PROMPTS = [[_rng.randrange(VOCAB) for _ in range(length)] for length in (1, 15, 16, 17, 63, 64, 65, 111)]


@pytest.mark.parametrize("variant", CONFIGS)
def test_log_probabilities_are_those_of_transformers(variant: str, save_model: Save) -> None:
    directory = save_model(CONFIGS[variant]())
    model: Any = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
    prompt = PROMPTS[-1][:70]

    driver = Driver(make_runner(directory, "compiled"), chunk=33)
    (sampled,) = driver.generate([prompt], 20, EVERY_LOGPROB)

    with torch.inference_mode():
        logits = model(torch.tensor([prompt + sampled])).logits[0, len(prompt) - 1 : -1]
    for reported, expected in zip(driver.logprobs[1], logits.log_softmax(-1), strict=True):
        ours = torch.tensor([value for _, value in sorted(reported.top)])
        assert torch.allclose(ours, expected, atol=1e-4)


@pytest.mark.parametrize("block_size", [8, 16, 32])
@pytest.mark.parametrize("chunk", [512, 7])
def test_tokens_are_those_of_transformers(
    chunk: int, block_size: int, tiny_llama: Path, reference: Callable[..., list[list[int]]]
) -> None:
    runner = make_runner(tiny_llama, "compiled", block_size=block_size, num_blocks=128)
    assert Driver(runner, chunk).generate(PROMPTS, 24) == reference(tiny_llama, PROMPTS, 24)


@pytest.mark.parametrize("family", FAMILIES)
def test_tokens_of_other_families_are_those_of_transformers(
    family: str, save_model: Save, reference: Callable[..., list[list[int]]]
) -> None:
    directory = save_model(CONFIGS[family]())
    prompts = [prompt for prompt in PROMPTS if len(prompt) < 80]
    assert Driver(make_runner(directory, "compiled"), chunk=20).generate(prompts, 16) == reference(
        directory, prompts, 16
    )


@pytest.mark.parametrize("chunk", [512, 7])
def test_steps_launched_ahead_sample_the_same(
    chunk: int, tiny_llama: Path, reference: Callable[..., list[list[int]]]
) -> None:
    driver = Driver(make_runner(tiny_llama, "compiled"), chunk, ahead=1)
    assert driver.generate(PROMPTS, 24) == reference(tiny_llama, PROMPTS, 24)
    params = SamplingParams(temperature=1.0, top_p=0.9, seed=3, frequency_penalty=0.5, min_tokens=4)
    in_turn = Driver(make_runner(tiny_llama, "compiled"), chunk).generate(PROMPTS, 12, params)
    assert driver.generate(PROMPTS, 12, params) == in_turn


@pytest.mark.parametrize("weights", MatrixFormat)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_log_probabilities_are_the_same_bits_alone_in_a_crowd_and_in_chunks(
    dtype: torch.dtype, weights: MatrixFormat, tiny_llama: Path
) -> None:
    runner = make_runner(tiny_llama, "compiled", dtype=dtype, weights=weights)
    crowd = Driver(runner)
    tokens = crowd.generate(PROMPTS, 8, EVERY_LOGPROB)
    for place, prompt in enumerate(PROMPTS):
        alone = Driver(runner, chunk=5)
        assert alone.generate([prompt], 8, EVERY_LOGPROB) == [tokens[place]]
        assert alone.logprobs[1] == crowd.logprobs[1 + place]


def test_bfloat16_is_closer_to_float32_than_rounding_every_sum_would_be(tiny_llama: Path) -> None:
    prompt = list(range(60))
    rounded: Any = AutoModelForCausalLM.from_pretrained(tiny_llama, dtype=torch.bfloat16)
    exact: Any = AutoModelForCausalLM.from_pretrained(tiny_llama, dtype=torch.float32)
    with torch.inference_mode():
        for parameter in exact.parameters():
            parameter.copy_(parameter.bfloat16())
        expected, theirs = (model(torch.tensor([prompt])).logits[0, -1].log_softmax(-1) for model in (exact, rounded))

    driver = Driver(make_runner(tiny_llama, "compiled", dtype=torch.bfloat16))
    driver.generate([prompt], 1, EVERY_LOGPROB)
    ours = torch.tensor([value for _, value in sorted(driver.logprobs[1][0].top)])
    assert (ours - expected).norm() < (theirs.float() - expected).norm()


@pytest.mark.parametrize("weights", [MatrixFormat.INT8, MatrixFormat.W8A8])
def test_weights_of_8_bits_sample_mostly_the_same_tokens(
    weights: MatrixFormat, tiny_llama: Path, reference: Callable[..., list[list[int]]]
) -> None:
    sampled = Driver(make_runner(tiny_llama, "compiled", weights=weights)).generate(PROMPTS, 1)
    expected = reference(tiny_llama, PROMPTS, 1)
    assert sum(a == b for a, b in zip(sampled, expected, strict=True)) >= len(PROMPTS) - 2


def test_what_it_does_not_take_is_said() -> None:
    assert check_compiled_support([64], 16, torch.float32) is None
    assert "float16" in (check_compiled_support([64], 16, torch.float16) or "")
    assert "block size" in (check_compiled_support([64], 24, torch.float32) or "")
    assert "dimensions" in (check_compiled_support([64, 8], 16, torch.float32) or "")
