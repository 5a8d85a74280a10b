"""Checkpoints of AutoRound in whole numbers compute what their codes mean; test_float_formats.py has its others."""

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import LlamaConfig

import compiled
import llama_models
from llama_models import SIZES
from quantized_models import QuantizedWeight, in_order, quantize, save_quantized
from quire_kernels.cpu.linear import MatrixFormat
from runner_driver import Driver, make_runner
from worker_svc.attention import CompiledKernels
from worker_svc.errors import UnsupportedModel
from worker_svc.model.architecture import describe
from worker_svc.model.compiled_model import load_compiled_model
from worker_svc.model.config import read_config
from worker_svc.model.description import ModelDescription
from worker_svc.model.formats.auto_round import FORMAT

Save = Callable[..., Path]
Reference = Callable[..., list[list[int]]]
Stored = tuple[dict[str, Tensor], Tensor] | None

WIDE = {**SIZES, "vocab_size": 128, "hidden_size": 96, "intermediate_size": 160}
PROMPTS = llama_models.prompts(1, 17, 40)


def _config(bits: int, group_size: int, packing: str = "auto_round:auto_gptq", **others: Any) -> dict[str, Any]:
    fields = {"quant_method": "auto-round", "bits": bits, "group_size": group_size, "sym": True, "data_type": "int"}
    return fields | {"packing_format": packing, "autoround_version": "0.16.1", "iters": 200} | others


def _tensors(made: QuantizedWeight, layer: str, packing: str) -> dict[str, Tensor]:
    """Without the groups of inputs, which are neighbours."""
    if packing.endswith("awq"):
        return made.awq(layer)
    tensors = made.gptq(layer, v2=not packing.endswith("auto_gptq"))
    del tensors[f"{layer}.g_idx"]
    return tensors


def _quantized(bits: int, group_size: int, packing: str, *, sym: bool = True) -> Callable[[str, Tensor], Stored]:
    def stored(layer: str, weight: Tensor) -> Stored:
        if layer == "lm_head":
            return None
        made = quantize(weight, bits, in_order(weight.shape[1], group_size), sym=sym)
        return _tensors(made, layer, packing), made.dense()

    return stored


@pytest.mark.parametrize("kernels", ["torch", "compiled"])
@pytest.mark.parametrize(
    ("packing", "bits", "group_size", "sym"),
    [
        ("auto_round:auto_gptq", 4, 32, True),
        ("auto_round:auto_gptq", 2, 16, False),
        ("auto_round:auto_gptq", 3, 32, False),
        ("auto_round", 4, 32, False),
        ("auto_round", 8, -1, True),
        ("auto_round:exllamav2", 5, 32, False),
        ("auto_round:auto_awq", 4, 32, False),
    ],
)
def test_a_model_computes_what_its_codes_mean(
    packing: str, bits: int, group_size: int, kernels: str, save_model: Save, reference: Reference, tmp_path: Path,
    *, sym: bool,
) -> None:  # fmt: skip
    directory = save_model(LlamaConfig(**WIDE))
    packed = save_quantized(
        directory,
        tmp_path / "packed",
        _quantized(bits, group_size, packing, sym=sym),
        quantization_config=_config(bits, group_size, packing, sym=sym),
    )
    assert Driver(make_runner(packed, kernels)).generate(PROMPTS, 12) == reference(directory, PROMPTS, 12)


def test_its_codes_are_kept(save_model: Save, tmp_path: Path) -> None:
    directory = save_model(LlamaConfig(**WIDE))
    config = _config(4, 32, "auto_round")
    packed = save_quantized(directory, tmp_path / "packed", _quantized(4, 32, "auto_round"), quantization_config=config)
    description = describe(read_config(packed))
    assert isinstance(description, ModelDescription)
    kernels = CompiledKernels(compiled.thread_pool(), MatrixFormat.INT8)
    layers = load_compiled_model(description, packed, torch.float32, kernels).built.layers
    assert {layer.qkv.matrix_format for layer in layers} == {MatrixFormat.W4A16}


@pytest.mark.parametrize("pattern", [".*down_proj.*", r"mlp\.down_proj$", "down_proj"])
def test_layers_may_have_other_bits_or_none(
    pattern: str, save_model: Save, reference: Reference, tmp_path: Path
) -> None:
    """By name or by a pattern; with more bits than codes have a layer is dense."""
    directory = save_model(LlamaConfig(**WIDE))

    def stored(layer: str, weight: Tensor) -> Stored:
        if layer in ("lm_head", "model.layers.1.mlp.up_proj"):
            return None
        bits, group = (8, 16) if "down_proj" in layer else (2, 32) if layer.endswith("0.self_attn.o_proj") else (4, 32)
        made = quantize(weight, bits, in_order(weight.shape[1], group), sym=True)
        return _tensors(made, layer, "auto_gptq"), made.dense()

    others = {
        pattern: {"bits": 8, "group_size": 16},
        "model.layers.0.self_attn.o_proj": {"bits": 2},
        "model.layers.1.mlp.up_proj": {"bits": 16, "data_type": "float"},
    }
    config = _config(4, 32, extra_config=others)
    packed = save_quantized(directory, tmp_path / "packed", stored, quantization_config=config)
    for kernels in ("torch", "compiled"):
        assert Driver(make_runner(packed, kernels)).generate(PROMPTS, 12) == reference(directory, PROMPTS, 12)


def test_groups_that_are_stored_are_left_unread() -> None:
    made = FORMAT(_config(4, 32, "auto_round:gptqmodel"))
    assert made.read_as("model.layers.0.mlp.up_proj.g_idx") is None
    assert made.read_as("model.layers.0.mlp.up_proj.qzeros") == "model.layers.0.mlp.up_proj.qzeros"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"bits": 9}, "quantization_config.bits: must be 2, 3, 4, 5, 6, 7 or 8, not 9"),
        (
            {"group_size": "all"},
            "quantization_config.group_size: must be a positive number of inputs, or -1, not 'all'",
        ),
        ({"packing_format": "auto_round:auto_awq", "bits": 8}, "quantization_config.bits: must be 4, not 8"),
        ({"data_type": "nv_fp"}, "data_type: must be int with the packing_format auto_round:auto_gptq, not 'nv_fp'"),
        ({"act_bits": 8}, "quantization_config.act_bits: must be 16 or 32, not 8"),
        ({"extra_config": {"o_proj": {"act_bits": 8}}}, "extra_config['o_proj'].act_bits: must be 16 or 32, not 8"),
        ({"spinquant_config": {}}, "quantization_config.spinquant_config: must be null"),
        ({"extra_config": {"a{99999999999999999999}": {"bits": 8}}}, "is no regular expression"),
        ({"super_bits": 6}, "quantization_config.super_bits: must be null: it would change the weights"),
        ({"extra_config": {"(": {"bits": 8}}}, "quantization_config.extra_config: '(' is no regular expression"),
        ({"extra_config": {"up_proj": 8}}, "extra_config: 'up_proj' must have an object, not 8"),
        ({"extra_config": {"up_proj": {"bits": 1}}}, "quantization_config.extra_config['up_proj'].bits: must be 2, "),
    ],
)
def test_variants_that_are_not_read_are_named(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(UnsupportedModel, match=re.escape(message)):
        FORMAT(_config(4, 32) | changes)


def test_a_tensor_of_another_dtype_is_named() -> None:
    made = quantize(torch.randn(32, 64), 4, in_order(64, 32), sym=True)
    tensors = _tensors(made, "layer", "auto_round") | {"layer.qweight": torch.zeros(8, 32)}
    with pytest.raises(UnsupportedModel, match=re.escape("the tensor layer.qweight is float32, not int32")):
        FORMAT(_config(4, 32, "auto_round")).weight("layer", tensors)
