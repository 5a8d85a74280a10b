"""transformers' own modules compute over the paged cache what they compute over transformers' cache."""

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig

from llama_models import SIZES
from runner_driver import Driver, make_runner
from transformers_models import CONTEXT, VARIANTS, VOCAB
from worker_svc.attention import AttentionKind
from worker_svc.model.config import read_config
from worker_svc.model.loading import LoadedModel, load
from worker_svc.model.transformers_model import TransformersModel, load_modules
from worker_svc.step import SamplingParams

Save = Callable[..., Path]
Generate = Callable[[Path, list[list[int]], int], list[list[int]]]

BESIDE_THE_FAMILY: dict[str, Callable[[], Any]] = {
    "activation": lambda: LlamaConfig(**SIZES, hidden_act="tanh"),
    "rope": lambda: LlamaConfig(**SIZES, rope_parameters={"rope_type": "dynamic", "rope_theta": 500.0, "factor": 2.0}),
}


def _load(directory: Path) -> LoadedModel:
    return load(directory, None, torch.float32, torch.device("cpu"), AttentionKind.TORCH)


def _prompts(*lengths: int) -> list[list[int]]:
    rng = random.Random(1)
    return [[rng.randrange(VOCAB) for _ in range(length)] for length in lengths]


@pytest.fixture(scope="module", params=VARIANTS)
def directory(request: pytest.FixtureRequest, save_model: Save) -> Path:
    """A model of each variant."""
    return save_model(VARIANTS[request.param]())


@pytest.mark.parametrize("kernels", ["torch", "compiled"])
def test_tokens_are_those_of_generate(kernels: str, directory: Path, reference: Generate) -> None:
    prompts = _prompts(1, 7, 8, 9, 15, 16, 17, 33, 64)
    runner = make_runner(directory, kernels, native=False)
    # Chunks end within blocks, at their ends, and beside decodes.
    assert Driver(runner, chunk=8).generate(prompts, 12) == reference(directory, prompts, 12)
    assert Driver(runner).generate(prompts[:2], 3) == reference(directory, prompts[:2], 3)


def test_log_probabilities_are_those_of_transformers(directory: Path) -> None:
    (prompt,) = _prompts(80)
    runner = make_runner(directory, block_size=8, native=False)
    driver = Driver(runner, chunk=33)
    # To the end of the context, where that is short
    num_tokens = min(CONTEXT, runner.limits.context_length) - len(prompt)
    (sampled,) = driver.generate([prompt], num_tokens, SamplingParams(logprobs=VOCAB))

    model: Any = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
    with torch.inference_mode():
        logits = model(torch.tensor([prompt + sampled])).logits[0, len(prompt) - 1 : -1]
    for reported, expected in zip(driver.logprobs[1], logits.log_softmax(-1), strict=True):
        ours = torch.tensor([value for _, value in sorted(reported.top)])
        assert torch.allclose(ours, expected, atol=1e-3)


@pytest.mark.parametrize("variant", BESIDE_THE_FAMILY)
def test_what_the_native_modules_do_not_compute_is_computed_by_transformers(
    variant: str, save_model: Save, reference: Generate
) -> None:
    directory = save_model(BESIDE_THE_FAMILY[variant]())
    prompts = _prompts(1, 17, 40)
    assert Driver(make_runner(directory), chunk=8).generate(prompts, 8) == reference(directory, prompts, 8)


def test_windows_and_caps_are_found_layer_by_layer(save_model: Save) -> None:
    layers = _load(save_model(VARIANTS["gemma2"]())).layout.layers
    assert [(layer.window, layer.soft_cap) for layer in layers] == [(20, 3.0), (None, 3.0)]
    assert {layer.scale for layer in layers} == {12**-0.5}


def test_the_context_ends_where_positions_would_change_their_frequencies(save_model: Save) -> None:
    model = _load(save_model(VARIANTS["phi3-longrope"]()))
    assert model.layout.context_length == 96


@pytest.mark.parametrize("variant", ["gpt2", "phi"])
def test_the_best_scores_of_bfloat16_are_not_rounded(variant: str, save_model: Save) -> None:
    directory = save_model(VARIANTS[variant]())
    driver = Driver(make_runner(directory, dtype=torch.bfloat16, native=False))
    driver.generate(_prompts(*range(1, 9)), 1, SamplingParams(logprobs=2))
    gaps = torch.tensor([reported[0].top[0][1] - reported[0].top[1][1] for reported in driver.logprobs.values()])
    # Scores of bfloat16 of that size are 2**-6 apart.
    assert (gaps * 64 % 1 != 0).any()


def test_bfloat16_samples_as_float32_where_the_choice_is_clear(save_model: Save) -> None:
    directory = save_model(VARIANTS["mixtral"]())
    prompts = _prompts(1, 16, 40)
    exact, rounded = (
        Driver(make_runner(directory, dtype=dtype, native=False)).generate(prompts, 1)
        for dtype in (torch.float32, torch.bfloat16)
    )
    assert sum(a == b for a, b in zip(exact, rounded, strict=True)) >= 2


@pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU has other kernels")
def test_compiled_kernels_attend_in_bfloat16(save_model: Save) -> None:
    """A chunk has the tokens of whole prompts."""
    directory = save_model(VARIANTS["mixtral"]())
    prompts = _prompts(1, 16, 40)
    whole, in_chunks = (
        Driver(make_runner(directory, "compiled", dtype=torch.bfloat16, native=False), chunk=chunk).generate(prompts, 1)
        for chunk in (64, 16)
    )
    assert sum(a == b for a, b in zip(whole, in_chunks, strict=True)) >= 2


def test_the_head_is_on_the_device_of_the_model(save_model: Save) -> None:
    directory = save_model(VARIANTS["phi"]())
    model = load_modules(read_config(directory), directory, torch.bfloat16, torch.device("meta"))
    logits = model.get_output_embeddings()(torch.empty(3, 48, dtype=torch.bfloat16, device="meta"))
    assert (logits.device.type, logits.dtype, logits.shape) == ("meta", torch.float32, (3, VOCAB))


def test_it_is_transformers_that_computes(save_model: Save) -> None:
    assert isinstance(_load(save_model(VARIANTS["gpt2"]())), TransformersModel)
