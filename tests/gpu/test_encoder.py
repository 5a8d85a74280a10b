"""An encoder of the shape of MiniLM L6 on a GPU, with the Triton kernels compiled, against torch's operators."""

from pathlib import Path

import pytest
import torch

from bert_models import random_prompts, save_bert
from described_models import description_of
from worker_svc.model.encoder_description import EncoderDescription
from worker_svc.model.torch_encoder import load_torch_encoder
from worker_svc.model.triton_encoder import TritonEncoder, load_triton_encoder

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")

CUDA = torch.device("cuda")
LENGTHS = (1, 15, 16, 17, 63, 64, 111, 256)


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Random weights: 6 layers, 12 heads of 32 dimensions."""
    path = tmp_path_factory.mktemp("encoder")
    save_bert(
        path,
        pooling=None,
        hidden_size=384,
        intermediate_size=1536,
        num_hidden_layers=6,
        num_attention_heads=12,
        max_position_embeddings=512,
        initializer_range=0.05,
    )
    return path


def load_triton(directory: Path, dtype: torch.dtype, *, deterministic: bool = False) -> TritonEncoder:
    description = description_of(directory, EncoderDescription)
    return load_triton_encoder(description, directory, dtype, CUDA, deterministic=deterministic)


def torch_states(directory: Path, dtype: torch.dtype) -> torch.Tensor:
    """All prompts' hidden states [num_tokens, 384] by torch's operators."""
    encoder = load_torch_encoder(description_of(directory, EncoderDescription), directory, dtype, CUDA)
    return torch.cat(encoder(random_prompts(LENGTHS)))


@torch.inference_mode()
def test_float32_is_that_of_torchs_operators(directory: Path) -> None:
    found = torch.cat(load_triton(directory, torch.float32)(random_prompts(LENGTHS)))
    torch.testing.assert_close(found, torch_states(directory, torch.float32), rtol=1e-3, atol=1e-3)


@torch.inference_mode()
def test_bfloat16_is_as_exact_as_torchs_operators(directory: Path) -> None:
    exact = torch_states(directory, torch.float32)
    found = torch.cat(load_triton(directory, torch.bfloat16)(random_prompts(LENGTHS)))
    error, torchs = (
        (states.float() - exact).abs().mean() for states in (found, torch_states(directory, torch.bfloat16))
    )
    assert error < 1.5 * torchs


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@torch.inference_mode()
def test_a_prompts_bits_are_the_same_alone_and_in_a_crowd(directory: Path, dtype: torch.dtype) -> None:
    encoder = load_triton(directory, dtype, deterministic=True)
    prompts = random_prompts(LENGTHS)
    for prompt, in_crowd in zip(prompts, encoder(prompts), strict=True):
        assert torch.equal(encoder([prompt])[0], in_crowd)
