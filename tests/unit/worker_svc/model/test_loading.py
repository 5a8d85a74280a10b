"""Loading a directory gives a model, native if supported, or an error that says why."""

import json
from collections.abc import Callable
from functools import partialmethod
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import (
    BartConfig,
    BertConfig,
    BloomConfig,
    DeepseekV2Config,
    GraniteMoeHybridConfig,
    JambaConfig,
    Lfm2Config,
    Llama4TextConfig,
    LlamaConfig,
    MambaConfig,
    MiniMaxConfig,
    MistralConfig,
    RecurrentGemmaConfig,
    RwkvConfig,
    T5Config,
    WhisperConfig,
    ZayaConfig,
)
from transformers.models.llama.modeling_llama import LlamaAttention

from llama_models import SIZES, VARIANTS
from transformers_models import VARIANTS as OTHERS
from worker_svc.attention import AttentionKind
from worker_svc.errors import UnsupportedModel
from worker_svc.model import transformers_model
from worker_svc.model.architecture import describe
from worker_svc.model.config import read_config
from worker_svc.model.loading import LoadedModel, load
from worker_svc.model.torch_model import TorchModel

Save = Callable[..., Path]
_SMALL: dict[str, Any] = {name: size for name, size in SIZES.items() if name != "head_dim"}
_MLA: dict[str, Any] = {
    "q_lora_rank": 16, "kv_lora_rank": 16, "qk_rope_head_dim": 16, "qk_nope_head_dim": 16, "v_head_dim": 16,
    "first_k_dense_replace": 2,
}  # fmt: skip


def _load(directory: Path) -> LoadedModel:
    return load(directory, describe(read_config(directory)), torch.float32, torch.device("cpu"), AttentionKind.TORCH)


def _change_config(directory: Path, **changes: Any) -> Path:
    path = directory / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))
    return directory


@pytest.mark.parametrize("variant", VARIANTS)
def test_the_llama_family_is_native(variant: str, save_model: Save) -> None:
    assert isinstance(_load(save_model(VARIANTS[variant]())), TorchModel)


@pytest.mark.parametrize(
    ("variant", "windows"),
    [("mistral-window", [20, 20]), ("qwen2-window", [None, 20]), ("qwen3-window", [20, None]), ("qwen3", [None, None])],
)
def test_windows_are_those_of_the_config(variant: str, windows: list[int | None], save_model: Save) -> None:
    assert [layer.window for layer in _load(save_model(VARIANTS[variant]())).layout.layers] == windows


def test_a_window_as_wide_as_the_context_is_none(save_model: Save) -> None:
    layers = _load(save_model(MistralConfig(**SIZES, sliding_window=256))).layout.layers
    assert {layer.window for layer in layers} == {None}


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (BloomConfig(vocab_size=97, hidden_size=16, n_layer=1, n_head=2), "BloomForCausalLM, whose attention"),
        (BertConfig(**_SMALL, is_decoder=False), "other tokens than those before"),
        (Llama4TextConfig(**SIZES, attention_chunk_size=16), "other tokens than those before"),
        (DeepseekV2Config(**_SMALL, **_MLA, norm_topk_prob=True), "keys of 32 dimensions and values of 16"),
    ],
    ids=lambda value: type(value).__name__ if not isinstance(value, str) else "",
)
def test_attention_of_other_kinds_is_refused(config: Any, message: str, save_model: Save) -> None:
    with pytest.raises(UnsupportedModel, match=message):
        _load(save_model(config))


@pytest.mark.parametrize(
    "arguments", [{"position_bias": torch.ones(1)}, {"s_aux": torch.ones(1, 6)}, {"s_aux": torch.ones(2)}], ids=str
)
def test_arguments_of_attention_that_are_not_computed_are_refused_by_name(
    arguments: dict[str, Any], save_model: Save, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(LlamaAttention, "forward", partialmethod(LlamaAttention.forward, **arguments))
    directory = save_model(VARIANTS["llama"]())
    with pytest.raises(UnsupportedModel, match=f"unsupported attention arguments: {next(iter(arguments))}$"):
        load(directory, None, torch.float32, torch.device("cpu"), AttentionKind.TORCH)


@pytest.mark.parametrize(
    "config", [MiniMaxConfig(**SIZES, num_local_experts=2), Lfm2Config(**_SMALL, full_attn_idxs=[1])]
)
def test_states_that_a_config_does_not_show_are_found(
    config: Any, save_model: Save, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(transformers_model, "_KINDS_WITH_STATES", frozenset())
    with pytest.raises(UnsupportedModel, match="states, convolutions"):
        _load(save_model(config))


@pytest.mark.parametrize(
    ("config", "named"),
    [
        (T5Config(architectures=["T5ForConditionalGeneration"]), "an encoder-decoder, .* T5ForConditionalGeneration;"),
        (BartConfig(is_encoder_decoder=True), "an encoder-decoder, of the architecture bart;"),
        (WhisperConfig(), "an encoder-decoder, of the architecture whisper;"),
        (MambaConfig(architectures=["MambaForCausalLM"]), "a state-space or recurrent model, .* MambaForCausalLM;"),
        (RwkvConfig(), "a state-space or recurrent model, .* rwkv;"),
        (JambaConfig(), "a state-space or recurrent model, or a hybrid with such layers, .* jamba;"),
        (Lfm2Config(**_SMALL, full_attn_idxs=[1]), "a state-space or recurrent model, or a hybrid .* lfm2;"),
        (MiniMaxConfig(**SIZES, num_local_experts=2), "a state-space or recurrent model, or a hybrid .* minimax;"),
        (RecurrentGemmaConfig(), "a state-space or recurrent model, or a hybrid .* recurrent_gemma;"),
        (GraniteMoeHybridConfig(), "a state-space or recurrent model, or a hybrid .* granitemoehybrid;"),
        (
            ZayaConfig(layer_types=["hybrid_sliding"] * 40, sliding_window=8),
            "a state-space or recurrent model, .* zaya;",
        ),
        (ZayaConfig(), "a state-space or recurrent model, or a hybrid .* zaya;"),
    ],
    ids=lambda value: "" if isinstance(value, str) else value.model_type,
)
def test_a_model_of_another_kind_is_refused_before_its_weights_are_read(
    config: Any, named: str, tmp_path: Path
) -> None:
    config.save_pretrained(tmp_path)
    with pytest.raises(UnsupportedModel, match=f"is {named}") as refused:
        _load(tmp_path)
    assert "served" in str(refused.value)


def test_another_head_than_that_of_a_language_model_is_refused(save_model: Save) -> None:
    directory = _change_config(save_model(OTHERS["phi"]()), architectures=["PhiForSequenceClassification"])
    with pytest.raises(UnsupportedModel, match="PhiForSequenceClassification, which is no causal"):
        _load(directory)


@pytest.mark.parametrize(
    "changes",
    [
        {"model_type": "none-such"},
        {"model_type": None},
        {"model_type": "none-such", "auto_map": {"AutoConfig": "code.NoneSuch"}},
    ],
    ids=str,
)
def test_an_unknown_architecture_is_refused_by_its_name(changes: dict[str, Any], save_model: Save) -> None:
    directory = _change_config(save_model(OTHERS["phi"]()), architectures=["NoneSuch"], **changes)
    with pytest.raises(UnsupportedModel, match=r"NoneSuch, which .* does not know"):
        _load(directory)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_hidden_layers": 10_000_000}, r"config\.json: num_hidden_layers is 10000000; at most 10000 are read"),
        ({"text_config": {"n_layer": 10_001}}, r"config\.json: n_layer is 10001; at most 10000 are read"),
        ({"hidden_size": "wide"}, r"config\.json: transformers refuses it: .*hidden_size"),
        ({"hidden_act": "none-such"}, "transformers cannot load the model in .*none-such"),
        (
            {"architectures": "PhiForCausalLM"},
            r"config\.json: architectures must be a list of names, not 'PhiForCausalLM'",
        ),
        ({"architectures": [1]}, r"config\.json: architectures must be a list of names, not \[1\]"),
    ],
    ids=str,
)
def test_a_config_with_values_that_nothing_expects_is_refused(
    changes: dict[str, Any], message: str, save_model: Save
) -> None:
    directory = _change_config(save_model(OTHERS["phi"]()), **changes)
    with pytest.raises(UnsupportedModel, match=message):
        _load(directory)


@pytest.mark.parametrize("names", [None, []])
def test_a_config_may_name_no_class(names: list[str] | None, save_model: Save) -> None:
    for config in (LlamaConfig(**SIZES), OTHERS["phi"]()):
        _load(_change_config(save_model(config), architectures=names))


def test_a_missing_shard_is_named(save_model: Save) -> None:
    for config in (LlamaConfig(**SIZES), OTHERS["phi"]()):
        sharded = save_model(config, max_shard_size="40KB")
        gone = sorted(sharded.glob("*.safetensors"))[1]
        gone.unlink()
        with pytest.raises(UnsupportedModel, match=gone.name):
            _load(sharded)


def test_quantized_weights_are_refused(save_model: Save) -> None:
    for config in (LlamaConfig(**SIZES), OTHERS["phi"]()):
        directory = _change_config(save_model(config), quantization_config={"quant_method": "aqlm"})
        with pytest.raises(UnsupportedModel, match="format aqlm, which is not read"):
            _load(directory)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda tensors: tensors.pop("model.final_layernorm.weight"), "no tensors model.final_layernorm.weight"),
        (lambda tensors: tensors.update({"model.final_layernorm.weight": torch.zeros(3)}), "final_layernorm.weight"),
        (lambda tensors: tensors.update({"model.layers.0.extra": torch.zeros(3)}), "not use: model.layers.0.extra"),
    ],
)
def test_tensors_that_do_not_fit_are_named(
    change: Callable[[dict[str, torch.Tensor]], object], message: str, save_model: Save
) -> None:
    directory = save_model(OTHERS["phi"]())
    tensors = load_file(directory / "model.safetensors")
    change(tensors)
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(UnsupportedModel, match=message):
        _load(directory)
