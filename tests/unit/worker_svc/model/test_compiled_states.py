"""Hidden states of a decoder by compiled code are those of transformers for each prompt alone."""

import json
from pathlib import Path

import pytest
import torch
from transformers import LlamaConfig

import compiled
import dense_models
import latent_models
import llama_models
import transformers_models
from described_models import description_of
from llama_models import hidden_states, prompts, save_model
from worker_svc.model.compiled_states import CompiledStates, load_compiled_states, prompt_bytes, unsupported_reason
from worker_svc.model.config import UnsupportedModel
from worker_svc.model.description import ModelDescription

_SMALL_HEADS = ("qwen2", "qwen2-window")  # of 8 dimensions, which torch computes
VARIANTS = {
    **{name: make for name, make in llama_models.VARIANTS.items() if name not in _SMALL_HEADS},
    **dense_models.VARIANTS,
    **{name: transformers_models.VARIANTS[name] for name in ("mixtral", "qwen2-moe", "qwen3-moe-mixed", "olmoe")},
    **latent_models.VARIANTS,
}
LENGTHS = (1, 2, 15, 16, 17, 33, 63, 63, 111)


def load(directory: Path, dtype: torch.dtype = torch.float32) -> CompiledStates:
    description = description_of(directory, ModelDescription)
    return load_compiled_states(description, directory, dtype, compiled.thread_pool())


@pytest.mark.parametrize("variant", VARIANTS)
@torch.inference_mode()
def test_states_are_those_of_transformers(variant: str, tmp_path: Path) -> None:
    save_model(tmp_path, VARIANTS[variant]())
    states, context = load(tmp_path), description_of(tmp_path, ModelDescription).context_length
    crowd = prompts(*(length for length in LENGTHS if length <= context))
    for prompt, found in zip(crowd, states(crowd), strict=True):
        torch.testing.assert_close(found, hidden_states(tmp_path, prompt), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("variant", ["qwen3", "gemma3", "gpt2", "olmoe", "deepseek-v2-lite"])
@torch.inference_mode()
def test_a_prompts_bits_do_not_depend_on_the_others(variant: str, dtype: torch.dtype, tmp_path: Path) -> None:
    """Nor on those of the calls before, whose keys and values lie where its own do."""
    save_model(tmp_path, VARIANTS[variant]())
    states, crowd = load(tmp_path, dtype), prompts(3, 17, 1, 9, 63)
    alone = [states([prompt])[0] for prompt in crowd]
    assert all(map(torch.equal, alone, states(crowd)))
    assert all(map(torch.equal, alone[::-1], states(crowd[::-1])))


@pytest.mark.parametrize("variant", ["llama", "qwen3", "gemma2", "phi3"])
@torch.inference_mode()
def test_bfloat16_is_near(variant: str, tmp_path: Path) -> None:
    save_model(tmp_path, VARIANTS[variant]())
    crowd = prompts(5, 40)
    for prompt, states in zip(crowd, load(tmp_path, torch.bfloat16)(crowd), strict=True):
        assert torch.cosine_similarity(states[-1], hidden_states(tmp_path, prompt)[-1], dim=0) > 0.99


def test_what_is_not_computed_is_refused_by_name(tmp_path: Path) -> None:
    save_model(tmp_path / "heads", LlamaConfig(**llama_models.SIZES | {"head_dim": 12}))
    description = description_of(tmp_path / "heads", ModelDescription)
    refused = unsupported_reason(description, torch.float32)
    assert refused is not None
    assert "12" in refused
    with pytest.raises(UnsupportedModel, match="the compiled kernels cannot be used"):
        load(tmp_path / "heads")
    save_model(tmp_path, VARIANTS["llama"]())
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"is_causal": False}))
    with pytest.raises(UnsupportedModel, match="not causal"):
        load(tmp_path)


@pytest.mark.parametrize("variant", ["llama", "gemma3", "olmoe"])
def test_the_memory_of_a_prompt_grows_with_its_length(variant: str, tmp_path: Path) -> None:
    save_model(tmp_path, VARIANTS[variant]())
    description = description_of(tmp_path, ModelDescription)
    short, long = (prompt_bytes(description, length, torch.float32) for length in (1_000, 100_000))
    assert long == 100 * short > 0
