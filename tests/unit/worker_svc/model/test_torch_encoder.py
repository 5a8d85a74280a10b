"""Hidden states of many prompts at once are those of transformers for each alone."""

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from transformers import BertConfig, BertModel

from bert_models import (
    CONTEXT,
    ENCODERS,
    hidden_states,
    random_prompts,
    save_bert,
    save_encoder,
    save_masked_model,
    save_model_of_pre_training,
)
from described_models import description_of
from worker_svc.errors import UnsupportedModel
from worker_svc.model.description import InvalidDescription
from worker_svc.model.description_cache import any_description_of
from worker_svc.model.encoder_description import EncoderDescription, RelativePositions
from worker_svc.model.torch_encoder import TorchEncoder, load_torch_encoder

CPU = torch.device("cpu")
OLD = {"weight": "gamma", "bias": "beta"}


def load(directory: Path, dtype: torch.dtype = torch.float32) -> TorchEncoder:
    description = description_of(directory, EncoderDescription)
    return load_torch_encoder(description, directory, dtype, CPU)


@pytest.fixture(scope="module")
def bert(tmp_path_factory: pytest.TempPathFactory) -> tuple[BertModel, TorchEncoder]:
    directory = tmp_path_factory.mktemp("bert")
    return save_bert(directory), load(directory)


@settings(deadline=None, max_examples=40)
@given(lengths=st.lists(st.integers(1, CONTEXT), min_size=1, max_size=12))
def test_prompts_of_any_lengths_together(bert: tuple[BertModel, TorchEncoder], lengths: list[int]) -> None:
    model, encoder = bert
    prompts = random_prompts(lengths)
    with torch.inference_mode():
        for prompt, states in zip(prompts, encoder(prompts), strict=True):
            torch.testing.assert_close(states, hidden_states(model, prompt), rtol=1e-4, atol=1e-4)


@settings(deadline=None, max_examples=40)
@given(
    pairs=st.lists(
        st.integers(1, CONTEXT).flatmap(lambda n: st.tuples(st.just(n), st.integers(1, n))), min_size=1, max_size=12
    )
)
def test_tokens_of_two_types(bert: tuple[BertModel, TorchEncoder], pairs: list[tuple[int, int]]) -> None:
    model, encoder = bert
    prompts, num_first = random_prompts([length for length, _ in pairs]), [first for _, first in pairs]
    with torch.inference_mode():
        for prompt, first, states in zip(prompts, num_first, encoder(prompts, num_first), strict=True):
            torch.testing.assert_close(states, hidden_states(model, prompt, first), rtol=1e-4, atol=1e-4)


def test_the_form_of_roberta(tmp_path: Path) -> None:
    model, encoder = save_encoder(tmp_path, "roberta"), load(tmp_path)
    assert encoder.description.context_length == CONTEXT
    prompts = random_prompts([1, 17, CONTEXT])
    with torch.inference_mode():
        # It has one type of tokens, so a second text changes nothing.
        for num_first in (None, [1, 5, 6]):
            for prompt, states in zip(prompts, encoder(prompts, num_first), strict=True):
                torch.testing.assert_close(states, hidden_states(model, prompt), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("architecture", ENCODERS)
def test_each_architecture(architecture: str, tmp_path: Path) -> None:
    """A crowd, and each prompt alone; types of tokens change nothing where there are none."""
    model, encoder = save_encoder(tmp_path, architecture), load(tmp_path)
    assert encoder.description.context_length == CONTEXT
    prompts = random_prompts([1, 2, 15, 16, 17, 33, CONTEXT - 1, CONTEXT])
    expected = [hidden_states(model, prompt) for prompt in prompts]
    with torch.inference_mode():
        alone = [states for prompt in prompts for states in encoder([prompt])]
        for found in (encoder(prompts), alone):
            for states, wanted in zip(found, expected, strict=True):
                torch.testing.assert_close(states, wanted, rtol=1e-4, atol=1e-4)


def test_distances_beyond_those_of_the_last_bucket(tmp_path: Path) -> None:
    model, encoder = save_encoder(tmp_path, "mpnet", max_position_embeddings=402), load(tmp_path)
    (prompt,) = random_prompts([400])
    with torch.inference_mode():
        torch.testing.assert_close(encoder([prompt])[0], hidden_states(model, prompt), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("sizes", [{"num_buckets": 30}, {"num_buckets": 0}, {"max_distance": 8}])
def test_buckets_that_cannot_be(sizes: dict[str, int]) -> None:
    with pytest.raises(InvalidDescription, match="bias: must be of a"):
        RelativePositions(**{"weight": "bias", "num_buckets": 32, "max_distance": 128, **sizes})  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("architecture", "config"),
    [("electra", {"embedding_size": 16}), ("mpnet", {"relative_attention_num_buckets": 64})],
)
def test_what_of_other_architectures_is_not_described(
    architecture: str, config: dict[str, Any], tmp_path: Path
) -> None:
    save_encoder(tmp_path, architecture, **config)
    assert any_description_of(tmp_path) is None


def test_the_names_of_norms_in_old_checkpoints(tmp_path: Path) -> None:
    model, (prompt,) = save_encoder(tmp_path, "bert"), random_prompts([17])
    tensors = load_file(tmp_path / "model.safetensors")
    old = {
        re.sub(r"LayerNorm\.(weight|bias)$", lambda found: f"LayerNorm.{OLD[found[1]]}", name): tensor
        for name, tensor in tensors.items()
    }
    assert "embeddings.LayerNorm.gamma" in old
    save_file(old, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with torch.inference_mode():
        torch.testing.assert_close(load(tmp_path)([prompt])[0], hidden_states(model, prompt), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("architecture", ["bert", "electra"])
def test_the_encoder_of_a_class_of_pre_training(architecture: str, tmp_path: Path) -> None:
    model, (prompt,) = save_model_of_pre_training(tmp_path, architecture), random_prompts([17])
    with torch.inference_mode():
        torch.testing.assert_close(load(tmp_path)([prompt])[0], hidden_states(model, prompt), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("stored_alone", [False, True])
@pytest.mark.parametrize("architecture", ENCODERS)
def test_the_encoder_of_a_model_that_predicts_hidden_words(
    architecture: str, stored_alone: bool, tmp_path: Path
) -> None:
    model = save_masked_model(tmp_path, architecture)
    if stored_alone:  # as sentence-transformers writes it, below the config of the whole model
        config = (tmp_path / "config.json").read_text()
        model.save_pretrained(tmp_path)
        (tmp_path / "config.json").write_text(config)
    prompts = random_prompts([1, 17, CONTEXT])
    with torch.inference_mode():
        for prompt, states in zip(prompts, load(tmp_path)(prompts), strict=True):
            torch.testing.assert_close(states, hidden_states(model, prompt), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("activation", ["gelu_new", "gelu_pytorch_tanh", "relu"])
def test_other_activations(activation: str, tmp_path: Path) -> None:
    model = save_bert(tmp_path, hidden_act=activation)
    (prompt,) = random_prompts([17])
    with torch.inference_mode():
        torch.testing.assert_close(load(tmp_path)([prompt])[0], hidden_states(model, prompt), rtol=1e-4, atol=1e-4)


def test_bfloat16_is_near(tmp_path: Path) -> None:
    model = save_bert(tmp_path)
    prompts = random_prompts([16, 40])
    with torch.inference_mode():
        for prompt, states in zip(prompts, load(tmp_path, torch.bfloat16)(prompts), strict=True):
            mean, expected = states.float().mean(0), hidden_states(model, prompt).mean(0)
            assert torch.cosine_similarity(mean, expected, dim=0) > 0.99


@pytest.mark.parametrize("changed", [{"hidden_act": "tanh"}, {"is_decoder": True}])
def test_what_a_description_cannot_hold(changed: dict[str, Any], tmp_path: Path) -> None:
    BertConfig(**changed, architectures=["BertModel"]).save_pretrained(tmp_path)
    assert any_description_of(tmp_path) is None


def test_sizes_that_do_not_fit_are_refused(tmp_path: Path) -> None:
    BertConfig(hidden_size=50, num_attention_heads=4, architectures=["BertModel"]).save_pretrained(tmp_path)
    with pytest.raises(UnsupportedModel, match="num_heads"):
        any_description_of(tmp_path)


def test_a_negative_epsilon_is_refused(tmp_path: Path) -> None:
    BertConfig(layer_norm_eps=-1e-12, architectures=["BertModel"]).save_pretrained(tmp_path)
    with pytest.raises(UnsupportedModel, match=r"embeddings\.LayerNorm: must be of an epsilon of 0 or more"):
        any_description_of(tmp_path)
