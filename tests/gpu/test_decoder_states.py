"""A decoder that embeds on a GPU, with the Triton kernels compiled, against torch's operators."""

from pathlib import Path

import pytest
import torch
from transformers import Qwen3Config

from described_models import description_of
from llama_models import prompts, save_model
from worker_svc.model.decoder_states import load_decoder_states
from worker_svc.model.description import ModelDescription
from worker_svc.model.triton_states import TritonStates, load_triton_states

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")

CUDA = torch.device("cuda")
LENGTHS = (1, 15, 16, 17, 63, 64, 300)


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Random weights in heads of the shape of Qwen3's."""
    config = Qwen3Config(
        vocab_size=97,
        hidden_size=512,
        intermediate_size=1024,
        num_hidden_layers=3,
        num_attention_heads=8,
        num_key_value_heads=2,
        head_dim=128,
        max_position_embeddings=512,
        initializer_range=0.05,
    )
    return save_model(tmp_path_factory.mktemp("decoder"), config)


def load(directory: Path, dtype: torch.dtype, *, deterministic: bool = False) -> TritonStates:
    description = description_of(directory, ModelDescription)
    return load_triton_states(description, directory, dtype, CUDA, deterministic=deterministic)


def torch_states(directory: Path, dtype: torch.dtype) -> torch.Tensor:
    """All prompts' hidden states [num_tokens, 512] by torch's operators."""
    states = load_decoder_states(description_of(directory, ModelDescription), directory, dtype, CUDA)
    return torch.cat(states(prompts(*LENGTHS)))


@torch.inference_mode()
def test_float32_is_that_of_torchs_operators(directory: Path) -> None:
    found = torch.cat(load(directory, torch.float32)(prompts(*LENGTHS)))
    torch.testing.assert_close(found, torch_states(directory, torch.float32), rtol=1e-3, atol=1e-3)


@torch.inference_mode()
def test_bfloat16_is_as_exact_as_torchs_operators(directory: Path) -> None:
    exact = torch_states(directory, torch.float32)
    found, torchs = (
        torch.cat(load(directory, torch.bfloat16)(prompts(*LENGTHS))),
        torch_states(directory, torch.bfloat16),
    )
    error, torchs_error = ((states.float() - exact).abs().mean() for states in (found, torchs))
    assert error < 1.5 * torchs_error


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@torch.inference_mode()
def test_a_prompts_bits_are_the_same_alone_and_in_a_crowd(directory: Path, dtype: torch.dtype) -> None:
    states, crowd = load(directory, dtype, deterministic=True), prompts(*LENGTHS)
    for prompt, in_crowd in zip(crowd, states(crowd), strict=True):
        assert torch.equal(states([prompt])[0], in_crowd)
