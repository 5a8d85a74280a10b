"""What the description of latent attention and of its experts holds: each part changes the result, or is refused."""

import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import DeepseekV3Config

import latent_models
from llama_models import prompts
from runner_driver import Driver, make_runner
from transformers_models import VOCAB
from worker_svc.errors import UnsupportedModel
from worker_svc.model.architecture import describe
from worker_svc.model.description import (
    AttentionSpec,
    ExpertGroups,
    ExpertScores,
    ExpertsSpec,
    InvalidDescription,
    ModelDescription,
    RopeKind,
)
from worker_svc.step import SamplingParams

Save = Callable[..., Path]
Change = Callable[[ModelDescription], ModelDescription]

PROMPTS = prompts(1, 15, 16, 17, 40, 65)


def _without_temperature(described: ModelDescription) -> ModelDescription:
    return _attention(described, lambda spec: replace(spec, scale=0.2236))


def _without_yarn(described: ModelDescription) -> ModelDescription:
    def unscaled(spec: AttentionSpec) -> AttentionSpec:
        assert spec.rope is not None
        return replace(spec, rope=replace(spec.rope, kind=RopeKind.DEFAULT))

    return _attention(described, unscaled)


def _other_pairs(described: ModelDescription) -> ModelDescription:
    def turned(spec: AttentionSpec) -> AttentionSpec:
        assert spec.latent is not None
        return replace(spec, latent=replace(spec.latent, rotates_neighbours=not spec.latent.rotates_neighbours))

    return _attention(described, turned)


WITHOUT: dict[str, tuple[str, Change]] = {
    "temperature": ("deepseek-v2", _without_temperature),
    "yarn": ("deepseek-v2", _without_yarn),
    "pairs": ("deepseek-v2", _other_pairs),
    "pairs of halves": ("deepseek-v3-plain", _other_pairs),
    "groups": ("deepseek-v2", lambda described: _experts(described, groups=None)),
    "groups of two": (
        "deepseek-v3",
        lambda described: _experts(described, groups=ExpertGroups(4, 2, 1)),
    ),
    "factor": ("deepseek-v2", lambda described: _experts(described, scale=1.0)),
    "sigmoids": ("deepseek-v3", lambda described: _experts(described, scores=ExpertScores.SOFTMAX)),
    "normalisation": ("deepseek-v3", lambda described: _experts(described, normalized=False)),
}


@pytest.mark.parametrize("feature", WITHOUT)
def test_each_feature_changes_the_result(feature: str, save_model: Save) -> None:
    """Otherwise the tests above would pass without it."""
    name, change = WITHOUT[feature]
    directory = latent_models.save(save_model, name)
    every = SamplingParams(logprobs=VOCAB)
    tops = []
    for described in (latent_models.describe_saved(directory), change(latent_models.describe_saved(directory))):
        driver = Driver(make_runner(directory, description=described))
        driver.generate([PROMPTS[-1]], 1, every)
        ((reported,),) = driver.logprobs.values()
        tops.append(dict(reported.top))
    assert tops[0] != pytest.approx(tops[1], abs=1e-3)


def test_the_bias_of_the_choice_changes_tokens(save_model: Save) -> None:
    config = latent_models.VARIANTS["deepseek-v3"]()
    plain, biased = save_model(config), latent_models.save(save_model, "deepseek-v3")
    asked = [PROMPTS[-1]]
    assert Driver(make_runner(plain)).generate(asked, 12) != Driver(make_runner(biased)).generate(asked, 12)


def test_layers_that_predict_further_tokens_are_left_out(save_model: Save) -> None:
    directory = latent_models.save(save_model, "deepseek-v3")
    path = directory / "model.safetensors"
    expected = Driver(make_runner(directory)).generate(PROMPTS[:3], 4)
    tensors = load_file(path)
    save_file(tensors | {"model.layers.3.eh_proj.weight": torch.ones(2, 2)}, path)
    with pytest.raises(UnsupportedModel, match=re.escape("model.layers.3.eh_proj.weight")):
        make_runner(directory)
    described = replace(latent_models.describe_saved(directory), unused_prefixes=("model.layers.3.",))
    assert Driver(make_runner(directory, description=described)).generate(PROMPTS[:3], 4) == expected
    config = latent_models.VARIANTS["deepseek-v3"]()
    config.num_nextn_predict_layers = 1
    assert describe(config) == replace(described)


@pytest.mark.parametrize("name", latent_models.NOT_DESCRIBED)
def test_what_a_description_cannot_hold_is_not_described(name: str) -> None:
    assert describe(latent_models.NOT_DESCRIBED[name]()) is None


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_kv_heads": 2}, "^num_kv_heads: must be 1"),
        ({"head_dim": 24}, "^head_dim: must be 32"),
        ({"window": 5}, "^window: must be absent"),
        ({"rope": None}, "^rope: must be of 8 rotated dimensions"),
        ({"latent": {"value_dim": 21}}, "^kv_up: must be of 132 outputs"),
        ({"latent": {"value_dim": 0}}, r"^latent: must be of a rank, .* above 0, not \(24, 8, 0"),
        ({"latent": {"rank": 25}}, "^head_dim: must be 33"),
        ({"latent": {"query_norm": None}}, "^query_norm: must be present with query_up alone"),
        ({"latent": {"query_norm": None, "query_up": None}}, r"^qkv: must be of the outputs \(80, 32\)"),
    ],
    ids=str,
)
def test_sizes_that_contradict_each_other_are_refused(changes: dict[str, Any], message: str) -> None:
    described = describe(latent_models.VARIANTS["deepseek-v2"]())
    assert described is not None
    spec = described.layers[0].attention
    assert spec.latent is not None
    if "latent" in changes:
        changes = {"latent": replace(spec.latent, **changes["latent"])} if changes["latent"] else changes
    with pytest.raises(InvalidDescription, match=message):
        replace(spec, **changes)


@pytest.mark.parametrize(
    ("groups", "message"),
    [
        (ExpertGroups(3, 1, 1), "^groups: must be a divisor of 8 experts"),
        (ExpertGroups(4, 5, 1), "^groups: must be chosen among 4"),
        (ExpertGroups(4, 2, 3), "^groups: must be of at least 3 experts"),
        (ExpertGroups(4, 1, 1), "^num_chosen: must be 1 to 2 experts"),
    ],
    ids=str,
)
def test_groups_that_do_not_fit_are_refused(groups: ExpertGroups, message: str) -> None:
    described = describe(latent_models.VARIANTS["deepseek-v2"]())
    assert described is not None
    with pytest.raises(InvalidDescription, match=message):
        _experts(described, groups=groups)


def test_more_groups_than_the_kernels_hold_are_refused_by_the_field() -> None:
    config = DeepseekV3Config(num_hidden_layers=2, n_routed_experts=512, n_group=512, topk_group=256)
    with pytest.raises(UnsupportedModel, match="groups: must be at most 256"):
        describe(config)


def _attention(described: ModelDescription, change: Callable[[AttentionSpec], AttentionSpec]) -> ModelDescription:
    layers = tuple(replace(layer, attention=change(layer.attention)) for layer in described.layers)
    return replace(described, layers=layers)


def _experts(described: ModelDescription, **changes: Any) -> ModelDescription:
    layers = tuple(
        replace(layer, mlp=replace(layer.mlp, **changes)) if isinstance(layer.mlp, ExpertsSpec) else layer
        for layer in described.layers
    )
    return replace(described, layers=layers)
