"""The Triton encoder's hidden states are those of transformers for each prompt alone, and so are a prompt's bits."""

from pathlib import Path

import pytest
import torch
from transformers import BertModel

from bert_models import CONTEXT, ENCODERS, hidden_states, random_prompts, save_bert, save_encoder
from described_models import description_of
from ordered_dots import order_dots
from worker_svc.errors import UnsupportedModel
from worker_svc.model.encoder_description import EncoderDescription
from worker_svc.model.triton_encoder import TritonEncoder, load_triton_encoder

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
LENGTHS = [1, 15, 17, CONTEXT, 33]


def load(directory: Path, dtype: torch.dtype = torch.float32, *, deterministic: bool = False) -> TritonEncoder:
    description = description_of(directory, EncoderDescription)
    return load_triton_encoder(description, directory, dtype, DEVICE, deterministic=deterministic)


@pytest.fixture(scope="module")
def bert(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, BertModel]:
    directory = tmp_path_factory.mktemp("bert")
    return directory, save_bert(directory, num_hidden_layers=2)


@pytest.mark.parametrize("deterministic", [False, True])
@torch.inference_mode()
def test_prompts_of_any_lengths_together(bert: tuple[Path, BertModel], *, deterministic: bool) -> None:
    directory, model = bert
    prompts = random_prompts(LENGTHS)
    found = load(directory, deterministic=deterministic)(prompts)
    for prompt, states in zip(prompts, found, strict=True):
        assert states.dtype == torch.float32
        torch.testing.assert_close(states.cpu(), hidden_states(model, prompt), rtol=1e-3, atol=1e-3)


@torch.inference_mode()
def test_tokens_of_two_types(bert: tuple[Path, BertModel]) -> None:
    directory, model = bert
    prompts, num_first = random_prompts([1, 40, 9]), [1, 13, 9]
    for prompt, first, states in zip(prompts, num_first, load(directory)(prompts, num_first), strict=True):
        torch.testing.assert_close(states.cpu(), hidden_states(model, prompt, first), rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("architecture", sorted(ENCODERS.keys() - {"mpnet"}))
@torch.inference_mode()
def test_each_architecture(architecture: str, tmp_path: Path) -> None:
    model, encoder = save_encoder(tmp_path, architecture), load(tmp_path)
    prompts = random_prompts([1, CONTEXT])
    for prompt, states in zip(prompts, encoder(prompts), strict=True):
        torch.testing.assert_close(states.cpu(), hidden_states(model, prompt), rtol=1e-3, atol=1e-3)


def test_a_relative_position_bias_is_refused_by_name(tmp_path: Path) -> None:
    save_encoder(tmp_path, "mpnet")
    with pytest.raises(UnsupportedModel, match="do not compute a relative position bias"):
        load(tmp_path)


@pytest.mark.parametrize("activation", ["gelu_new", "gelu_pytorch_tanh"])
@torch.inference_mode()
def test_other_activations(activation: str, tmp_path: Path) -> None:
    model = save_bert(tmp_path, hidden_act=activation, num_hidden_layers=1)
    (prompt,) = random_prompts([17])
    (states,) = load(tmp_path)([prompt])
    torch.testing.assert_close(states.cpu(), hidden_states(model, prompt), rtol=1e-3, atol=1e-3)


@torch.inference_mode()
def test_float16_is_near(bert: tuple[Path, BertModel]) -> None:
    directory, model = bert
    prompts = random_prompts([16, 40])
    for prompt, states in zip(prompts, load(directory, torch.float16)(prompts), strict=True):
        mean, expected = states.mean(0).cpu(), hidden_states(model, prompt).mean(0)
        assert torch.cosine_similarity(mean, expected, dim=0) > 0.999


@torch.inference_mode()
def test_in_deterministic_mode_a_prompts_bits_do_not_depend_on_the_others(
    bert: tuple[Path, BertModel], monkeypatch: pytest.MonkeyPatch
) -> None:
    order_dots(monkeypatch)
    encoder, prompts = load(bert[0], deterministic=True), random_prompts([3, 17, 40])
    together = encoder(prompts)
    assert all(torch.equal(encoder([prompt])[0], states) for prompt, states in zip(prompts, together, strict=True))


def test_heads_of_more_than_256_dimensions_are_refused_by_name(tmp_path: Path) -> None:
    save_bert(tmp_path, hidden_size=264, num_attention_heads=1, num_hidden_layers=1)
    with pytest.raises(UnsupportedModel, match="attention of heads of 264 dimensions: the most is 256"):
        load(tmp_path)
