"""An adapter beside a model's weights is found, placed on linear layers, and refused: it would change every answer."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from llama_models import VARIANTS
from transformers_models import VARIANTS as OTHERS
from worker_svc.attention import AttentionKind
from worker_svc.model.adapters import read_adapters
from worker_svc.model.architecture import describe
from worker_svc.model.config import UnsupportedModel, read_config
from worker_svc.model.loading import load
from worker_svc.model.support import adapter_places

Save = Callable[..., Path]


def _adapted(directory: Path, **config: Any) -> Path:
    (directory / "adapter_config.json").write_text(json.dumps({"peft_type": "LORA", "r": 8, **config}))
    return directory


@pytest.mark.parametrize(
    ("targets", "count", "first"),
    [
        (["q_proj", "v_proj"], 4, "model.layers.0.self_attn.q_proj"),
        (["lm_head"], 1, "lm_head"),
        (["layers.1.mlp.down_proj"], 1, "model.layers.1.mlp.down_proj"),
        (r".*\.1\.mlp\..*_proj", 3, "model.layers.1.mlp.gate_proj"),
        ("all-linear", 14, "model.layers.0.self_attn.q_proj"),
    ],
    ids=str,
)
def test_an_adapter_is_refused_with_the_layers_that_it_changes(
    targets: list[str] | str, count: int, first: str, save_model: Save
) -> None:
    directory = _adapted(save_model(VARIANTS["llama"]()), target_modules=targets)
    description = describe(read_config(directory))
    assert description is not None
    (adapter,) = read_adapters(directory)
    places = [place for linear in description.linear_layers for place in adapter_places(linear, adapter)]
    assert (len(places), places[0]) == (count, first)
    with pytest.raises(UnsupportedModel, match=f"lora adapter .* attaches to {count} linear layers, {first} first"):
        load(directory, description, torch.float32, torch.device("cpu"), AttentionKind.TORCH)


def test_an_adapter_of_a_model_that_is_not_described_is_refused(save_model: Save) -> None:
    directory = _adapted(save_model(OTHERS["gpt2"]()), target_modules=["c_attn"])
    with pytest.raises(UnsupportedModel, match="adapters are not served"):
        load(directory, None, torch.float32, torch.device("cpu"), AttentionKind.TORCH)


def test_a_model_without_an_adapter_has_none(tiny_llama: Path) -> None:
    assert read_adapters(tiny_llama) == ()
