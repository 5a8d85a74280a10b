"""Hidden states of a decoder over many prompts at once are those of transformers for each alone."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModel

import dense_models
from described_models import description_of
from llama_models import VARIANTS, hidden_states, prompts, save_model
from worker_svc.errors import UnsupportedModel
from worker_svc.model.decoder_states import DecoderStates, load_decoder_states
from worker_svc.model.description import ModelDescription
from worker_svc.model.description_cache import any_description_of

CPU = torch.device("cpu")
LENGTHS = [1, 2, 15, 16, 17, 33, 63, 63, 111]


def load(directory: Path, dtype: torch.dtype = torch.float32) -> DecoderStates:
    description = description_of(directory, ModelDescription)
    return load_decoder_states(description, directory, dtype, CPU)


# Attention over whole prompts has no soft caps.
CAPPED = ("gemma2", "gemma2 in both directions")
ALL = VARIANTS | {
    name: make for name, make in (dense_models.VARIANTS | dense_models.BIDIRECTIONAL).items() if name not in CAPPED
}


@pytest.mark.parametrize("variant", ALL)
def test_states_are_those_of_transformers_alone_and_in_a_crowd(variant: str, tmp_path: Path) -> None:
    save_model(tmp_path, ALL[variant]())
    description = any_description_of(tmp_path)
    assert description is not None
    lengths = [length for length in LENGTHS if length <= description.context_length]
    states, crowd = load(tmp_path), prompts(*lengths)
    with torch.inference_mode():
        together = states(crowd)
        for number, prompt in enumerate(crowd):
            transformers = hidden_states(tmp_path, prompt)
            torch.testing.assert_close(together[number], transformers, rtol=1e-4, atol=1e-4)
            if number % 4 == 0:
                torch.testing.assert_close(states([prompt])[0], transformers, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    "variant",
    ["llama", "llama-tied-biased", "qwen2", "qwen3", "mistral", "gemma3", "phi3", "gpt2", "gpt-neox", "opt"],
)
def test_a_checkpoint_without_a_head(variant: str, tmp_path: Path) -> None:
    save_model(tmp_path / "whole", ALL[variant]())
    model: Any = AutoModel.from_pretrained(tmp_path / "whole", dtype=torch.float32)
    model.save_pretrained(tmp_path / "bare")
    assert json.loads((tmp_path / "bare" / "config.json").read_text())["architectures"][0].endswith("Model")
    (prompt,) = prompts(40)
    with torch.inference_mode():
        (states,) = load(tmp_path / "bare")([prompt])
    torch.testing.assert_close(states, hidden_states(tmp_path / "whole", prompt), rtol=1e-4, atol=1e-4)


def test_bfloat16_is_near(tmp_path: Path) -> None:
    save_model(tmp_path, VARIANTS["qwen3"]())
    crowd = prompts(5, 40)
    with torch.inference_mode():
        for prompt, states in zip(crowd, load(tmp_path, torch.bfloat16)(crowd), strict=True):
            similarity = torch.cosine_similarity(states[-1].float(), hidden_states(tmp_path, prompt)[-1], dim=0)
            assert similarity > 0.99


def test_what_is_not_computed_is_refused_by_name(tmp_path: Path) -> None:
    save_model(tmp_path / "capped", dense_models.VARIANTS["gemma2"]())
    with pytest.raises(UnsupportedModel, match="embeddings of decoders do not compute a soft cap on attention scores"):
        load(tmp_path / "capped")
    save_model(tmp_path, VARIANTS["llama"]())
    tensors = load_file(tmp_path / "model.safetensors")
    save_file({**tensors, "model.more.weight": torch.zeros(1)}, tmp_path / "model.safetensors")
    with pytest.raises(UnsupportedModel, match=r"model\.more\.weight"):
        load(tmp_path)
