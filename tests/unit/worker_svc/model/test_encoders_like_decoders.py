"""Hidden states and scores of ModernBERT and EuroBERT are those of transformers for each prompt alone."""

from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeAlias

import pytest
import torch
from torch import Tensor

import compiled
from bert_models import hidden_states, random_prompts, save_classifier, save_encoder, save_masked_model
from described_models import description_of
from worker_svc.encoder.pooling import ScorePooler
from worker_svc.model.compiled_states import load_compiled_states
from worker_svc.model.decoder_states import load_decoder_states
from worker_svc.model.description import ModelDescription
from worker_svc.model.description_cache import any_description_of
from worker_svc.model.score_head import load_score_head
from worker_svc.model.triton_body import refused_part
from worker_svc.step import NewSequence, SamplingParams, ScoreParams

CPU = torch.device("cpu")
# Borders of blocks, of tiles of keys and of the window of 17 tokens.
LENGTHS = [1, 2, 8, 9, 10, 15, 16, 17, 18, 33, 64, 65, 129, 300]
States: TypeAlias = Callable[..., list[Tensor]]


def load_by_torch(directory: Path, dtype: torch.dtype = torch.float32) -> States:
    return load_decoder_states(description_of(directory, ModelDescription), directory, dtype, CPU)


def load_by_compiled_code(directory: Path, dtype: torch.dtype = torch.float32) -> States:
    return load_compiled_states(description_of(directory, ModelDescription), directory, dtype, compiled.thread_pool())


BACKENDS = [load_by_torch, load_by_compiled_code]


@pytest.mark.parametrize("load", BACKENDS)
@pytest.mark.parametrize(
    ("architecture", "config"),
    [
        ("modernbert", {}),
        ("modernbert", {"norm_bias": True, "attention_bias": True, "mlp_bias": True}),
        ("modernbert", {"local_attention": 2, "num_hidden_layers": 3}),
        ("modernbert", {"layer_types": ["full_attention"] * 4, "hidden_activation": "silu"}),
        ("modernbert", {"layer_types": ["sliding_attention"] * 4, "local_attention": 128}),
        ("modernbert", {"is_causal": False}),  # which transformers ignores: it is anyway
        ("modernbert", {"classifier_activation": "silu"}),  # of a head that it has not
        ("eurobert", {}),
        ("eurobert", {"attention_bias": True, "mlp_bias": True, "num_key_value_heads": 1}),
        ("eurobert", {"is_causal": False, "classifier_pooling": "late"}),
    ],
    ids=str,
)
@torch.inference_mode()
def test_states_are_those_of_transformers_in_a_crowd(
    load: Any, architecture: str, config: dict[str, Any], tmp_path: Path
) -> None:
    model, crowd = save_encoder(tmp_path, architecture, **config), random_prompts(LENGTHS)
    for prompt, states in zip(crowd, load(tmp_path)(crowd), strict=True):
        torch.testing.assert_close(states, hidden_states(model, prompt), rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@torch.inference_mode()
def test_a_prompts_bits_do_not_depend_on_the_others(dtype: torch.dtype, tmp_path: Path) -> None:
    model = save_encoder(tmp_path, "modernbert")
    states, crowd = load_by_compiled_code(tmp_path, dtype), random_prompts([3, 17, 1, 9, 63])
    for prompt, found in zip(crowd, states(crowd), strict=True):
        assert torch.equal(found, states([prompt])[0])
        assert torch.cosine_similarity(found.mean(0), hidden_states(model, prompt).mean(0), dim=0) > 0.99


@pytest.mark.parametrize("load", BACKENDS)
@pytest.mark.parametrize("architecture", ["modernbert", "eurobert"])
@torch.inference_mode()
def test_the_encoder_of_a_model_that_predicts_hidden_words(load: Any, architecture: str, tmp_path: Path) -> None:
    model, (prompt,) = save_masked_model(tmp_path, architecture), random_prompts([40])
    torch.testing.assert_close(load(tmp_path)([prompt])[0], hidden_states(model, prompt), rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize(
    ("architecture", "config"),
    [
        ("modernbert", {"classifier_pooling": "cls"}),
        ("modernbert", {"classifier_pooling": "mean"}),
        (
            "modernbert",
            {"classifier_pooling": "mean", "classifier_bias": True, "norm_bias": True, "classifier_activation": "relu"},
        ),
        ("eurobert", {"classifier_pooling": "bos"}),
        ("eurobert", {"classifier_pooling": "mean"}),
    ],
    ids=str,
)
@pytest.mark.parametrize("num_labels", [1, 3])
@torch.inference_mode()
def test_numbers_of_labels(num_labels: int, architecture: str, config: dict[str, Any], tmp_path: Path) -> None:
    model: Any = save_classifier(tmp_path, architecture, num_labels=num_labels, **config)
    states = load_by_compiled_code(tmp_path)
    head = load_score_head(description_of(tmp_path, ModelDescription), tmp_path, CPU)
    assert head is not None
    pooler = ScorePooler(head)
    new = [
        NewSequence(number, prompt, len(prompt), 0, SamplingParams(), score=ScoreParams(is_raw=True))
        for number, prompt in enumerate(random_prompts(LENGTHS))
    ]
    found = pooler(states([one.token_ids for one in new], None, list(map(pooler.place, new))), new)
    for one, numbers in zip(new, found, strict=True):
        expected = model(torch.tensor([one.token_ids])).logits[0].tolist()
        assert numbers == pytest.approx(expected, abs=1e-3)


def test_the_triton_kernels_leave_it_to_torch(tmp_path: Path) -> None:
    save_encoder(tmp_path, "modernbert")
    refused = refused_part(description_of(tmp_path, ModelDescription))
    assert refused == "attention to later tokens"


@pytest.mark.parametrize(
    ("architecture", "config"),
    [
        ("modernbert", {"hidden_activation": "tanh"}),
        ("modernbert", {"classifier_activation": "silu"}),
        ("eurobert", {"classifier_pooling": "late"}),
    ],
    ids=str,
)
def test_what_a_description_cannot_hold(architecture: str, config: dict[str, Any], tmp_path: Path) -> None:
    save_classifier(tmp_path, architecture, **config)
    assert any_description_of(tmp_path) is None
