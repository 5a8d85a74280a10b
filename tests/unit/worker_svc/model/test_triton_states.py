"""Hidden states of a decoder by the Triton kernels are those of transformers for each prompt alone."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaConfig

import dense_models
import latent_models
import llama_models
import transformers_models
from described_models import description_of
from llama_models import hidden_states, prompts, save_model
from ordered_dots import order_dots
from worker_svc.errors import UnsupportedModel
from worker_svc.model import decoder_states
from worker_svc.model.description import ModelDescription
from worker_svc.model.triton_states import TritonStates, load_triton_states, prompt_bytes

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
VARIANTS: dict[str, Callable[[], Any]] = {
    **{name: llama_models.VARIANTS[name] for name in ("llama", "qwen3", "mistral")},
    **{
        name: transformers_models.VARIANTS[name]
        for name in ("gpt2", "opt", "gpt-neox", "phi3", "gemma2", "gemma3", "olmoe", "gpt-oss")
    },
    **{name: dense_models.VARIANTS[name] for name in ("gemma4", "gemma4-small", "gemma4-unified-biased")},
    "deepseek-v2-lite": latent_models.VARIANTS["deepseek-v2-lite"],
}
LENGTHS = (1, 17, 3)


def load(directory: Path, *, deterministic: bool = False) -> TritonStates:
    description = description_of(directory, ModelDescription)
    return load_triton_states(description, directory, torch.float32, DEVICE, deterministic=deterministic)


@pytest.mark.parametrize("variant", VARIANTS)
@torch.inference_mode()
def test_states_are_those_of_transformers(variant: str, tmp_path: Path) -> None:
    save_model(tmp_path, VARIANTS[variant]())
    crowd = prompts(*LENGTHS)
    for prompt, states in zip(crowd, load(tmp_path)(crowd), strict=True):
        torch.testing.assert_close(states.cpu(), hidden_states(tmp_path, prompt), rtol=1e-3, atol=3e-4)


@pytest.mark.parametrize("variant", ["gemma2", "gemma3", "gemma4-small"])
@torch.inference_mode()
def test_prompts_beyond_the_window_in_several_blocks_each(variant: str, tmp_path: Path) -> None:
    save_model(tmp_path, VARIANTS[variant]())
    crowd = prompts(2 * transformers_models.WINDOW + 1, 1, transformers_models.WINDOW + 5)
    for prompt, states in zip(crowd, load(tmp_path)(crowd), strict=True):
        torch.testing.assert_close(states.cpu(), hidden_states(tmp_path, prompt), rtol=1e-3, atol=3e-4)


@pytest.mark.parametrize("variant", ["qwen3", "gemma4-small", "olmoe", "deepseek-v2-lite"])
@torch.inference_mode()
def test_in_deterministic_mode_a_prompts_bits_do_not_depend_on_the_others(
    variant: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    order_dots(monkeypatch)
    save_model(tmp_path, VARIANTS[variant]())
    states, crowd = load(tmp_path, deterministic=True), prompts(3, 17, 1, 9)
    together = states(crowd)
    assert all(torch.equal(states([prompt])[0], one) for prompt, one in zip(crowd, together, strict=True))


def test_heads_of_more_than_512_dimensions_are_refused_by_name(tmp_path: Path) -> None:
    save_model(tmp_path, LlamaConfig(**llama_models.SIZES | {"head_dim": 528}))
    with pytest.raises(UnsupportedModel, match="attention of heads of 528 dimensions: the most is 512"):
        load(tmp_path)


def test_a_window_takes_no_memory(tmp_path: Path) -> None:
    save_model(tmp_path, transformers_models.VARIANTS["gemma3"]())
    description = description_of(tmp_path, ModelDescription)
    short, long = (prompt_bytes(description, length, torch.float32) for length in (1_000, 100_000))
    assert long == 100 * short > 0
    assert decoder_states.prompt_bytes(description, 100_000, torch.float32) > 100 * short
