"""The runner on a GPU, with the Triton kernels compiled: every native architecture and others, against transformers."""

from pathlib import Path

import pytest
import torch

import llama_models
import transformers_models
from runner_driver import Driver, make_runner

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


OTHERS = (
    "gpt2",
    "opt",
    "gpt-neox",
    "phi3",
    "gemma2",
    "gemma3",
    "phi",
    "mixtral",
    "qwen2-moe",
    "qwen3-moe",
    "olmoe",
    "gpt-oss",
)
MODELS = llama_models.VARIANTS | {name: transformers_models.VARIANTS[name] for name in OTHERS}


@pytest.mark.parametrize("variant", MODELS)
def test_float32_is_token_identical_with_transformers(variant: str, tmp_path: Path) -> None:
    directory = llama_models.save_model(tmp_path, MODELS[variant]())
    asked = llama_models.prompts(1, 15, 16, 17, 33, 64)
    driver = Driver(make_runner(directory, "triton", device="cuda"), chunk=8)
    assert driver.generate(asked, 12) == llama_models.generate(directory, asked, 12, "cuda")


@pytest.mark.parametrize("variant", ["gemma4", "gemma4-small", "gemma4-unified-biased"])
def test_layers_of_different_heads_are_token_identical_with_transformers(variant: str, tmp_path: Path) -> None:
    # Configs that older versions of transformers do not have
    models = pytest.importorskip("dense_models", exc_type=ImportError).VARIANTS
    directory = llama_models.save_model(tmp_path, models[variant]())
    asked = llama_models.prompts(1, 15, 16, 17, 33, 64)
    expected = llama_models.generate(directory, asked, 12, "cuda")
    for how in ({"cuda_graphs": False}, {"cuda_graphs": True, "max_sequences": 8}):
        driver = Driver(make_runner(directory, "triton", device="cuda", **how), chunk=8)
        assert driver.generate(asked, 12) == expected


def test_bfloat16_samples_the_tokens_of_float32_where_the_choice_is_clear(tmp_path: Path) -> None:
    directory = llama_models.save_model(tmp_path, llama_models.VARIANTS["llama"]())
    asked = llama_models.prompts(1, 15, 16, 17, 33, 64)
    exact = Driver(make_runner(directory, "triton", device="cuda")).generate(asked, 1)
    rounded = Driver(make_runner(directory, "triton", device="cuda", dtype=torch.bfloat16)).generate(asked, 1)
    assert sum(a == b for a, b in zip(exact, rounded, strict=True)) >= len(asked) - 1


@pytest.mark.parametrize("cache_dtype", [torch.int8, torch.float8_e4m3fn])
def test_8_bit_keys_and_values_sample_the_tokens_of_full_ones_where_the_choice_is_clear(
    cache_dtype: torch.dtype, tmp_path: Path
) -> None:
    directory = llama_models.save_model(tmp_path, llama_models.VARIANTS["llama"]())
    asked = llama_models.prompts(1, 15, 16, 17, 33, 64)
    full = Driver(make_runner(directory, "triton", device="cuda")).generate(asked, 1)
    runner = make_runner(directory, "triton", device="cuda", cache_dtype=cache_dtype, cuda_graphs=True)
    assert sum(a == b for a, b in zip(full, Driver(runner).generate(asked, 1), strict=True)) >= len(asked) - 2
