"""Checkpoints of GPTQ compute what their codes mean: all bits, groups, layouts and orders of activations."""

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import LlamaConfig

import llama_models
from llama_models import SIZES
from quantized_models import in_act_order, in_order, quantize, save_quantized
from runner_driver import Driver, make_runner
from worker_svc.errors import UnsupportedModel
from worker_svc.fingerprint import model_fingerprint
from worker_svc.model.description import LinearLayer, LinearRole, SplitDimension, StoredLinear
from worker_svc.model.formats.gptq import FORMAT
from worker_svc.model.linear_weights import LinearWeights, Shard
from worker_svc.model.weight_format import format_of
from worker_svc.model.weights import Checkpoint

Save = Callable[..., Path]
Reference = Callable[..., list[list[int]]]

# Multiples of 32, as 3 bits need.
WIDE = {**SIZES, "vocab_size": 128, "hidden_size": 96, "intermediate_size": 160}
PROMPTS = llama_models.prompts(1, 17, 40)


def _config(bits: int, group_size: int, **others: Any) -> dict[str, Any]:
    return {"quant_method": "gptq", "bits": bits, "group_size": group_size, **others}


def _gptq(bits: int, group_size: int, *, sym: bool, act_order: bool, v2: bool, head: bool = False) -> Any:
    """A function that quantizes layers so."""

    def quantized(layer: str, weight: Tensor) -> tuple[dict[str, Tensor], Tensor] | None:
        if layer == "lm_head" and not head:
            return None
        groups = (in_act_order if act_order else in_order)(weight.shape[1], group_size)
        codes = quantize(weight, bits, groups, sym=sym)
        return codes.gptq(layer, v2=v2), codes.dense()

    return quantized


@pytest.mark.parametrize("kernels", ["torch", "compiled"])
@pytest.mark.parametrize(
    ("bits", "group_size", "sym", "act_order", "v2", "head"),
    [
        (4, 128, True, False, False, False),
        (4, 32, False, True, False, True),
        (8, -1, True, False, True, False),
        (3, 64, False, True, True, True),
        (2, 32, False, False, True, False),
    ],
)
def test_a_model_computes_what_its_codes_mean(
    bits: int, group_size: int, sym: bool, act_order: bool, v2: bool, head: bool, kernels: str,
    save_model: Save, reference: Reference, tmp_path: Path,
) -> None:  # fmt: skip
    directory = save_model(LlamaConfig(**WIDE))
    config = _config(
        bits, group_size, sym=sym, desc_act=act_order, checkpoint_format="gptq_v2" if v2 else "gptq", lm_head=head
    )
    quantized = _gptq(bits, group_size, sym=sym, act_order=act_order, v2=v2, head=head)
    packed = save_quantized(directory, tmp_path / "packed", quantized, quantization_config=config)
    assert Driver(make_runner(packed, kernels)).generate(PROMPTS, 12) == reference(directory, PROMPTS, 12)


def test_layers_that_were_left_dense_or_quantized_otherwise(
    save_model: Save, reference: Reference, tmp_path: Path
) -> None:
    directory = save_model(LlamaConfig(**WIDE))

    def quantized(layer: str, weight: Tensor) -> tuple[dict[str, Tensor], Tensor] | None:
        if layer.endswith(("o_proj", "lm_head")):
            return None
        bits, group_size = (8, 32) if layer.startswith("model.layers.1.") else (4, 64)
        codes = quantize(weight, bits, in_order(weight.shape[1], group_size), sym=True)
        return codes.gptq(layer), codes.dense()

    dynamic = {r"-:.*\.o_proj": {}, r"+:model\.layers\.1\.": {"bits": 8, "group_size": 32}, r".*": {}}
    packed = save_quantized(
        directory, tmp_path / "packed", quantized, quantization_config=_config(4, 64, dynamic=dynamic)
    )
    assert Driver(make_runner(packed)).generate(PROMPTS, 12) == reference(directory, PROMPTS, 12)


def test_biases_of_zeros_that_old_tools_wrote_are_left_out_and_no_others(
    save_model: Save, reference: Reference, tmp_path: Path
) -> None:
    directory = save_model(LlamaConfig(**WIDE))
    config = _config(4, 32, sym=True)
    quantized = _gptq(4, 32, sym=True, act_order=False, v2=False)
    packed = save_quantized(directory, tmp_path / "packed", quantized, quantization_config=config)
    tensors = load_file(packed / "model.safetensors")
    layers = [name.removesuffix(".qweight") for name in tensors if name.endswith(".qweight")]
    biases = {f"{layer}.bias": torch.zeros(tensors[f"{layer}.scales"].shape[1]).half() for layer in layers}
    save_file(tensors | biases, packed / "model.safetensors")
    assert Driver(make_runner(packed)).generate(PROMPTS, 12) == reference(directory, PROMPTS, 12)
    named = "model.layers.1.mlp.down_proj.bias"
    biases[named][-1] = 1
    save_file(tensors | biases, packed / "model.safetensors")
    with pytest.raises(UnsupportedModel, match=f"tensors that its architecture does not: {re.escape(named)}$"):
        make_runner(packed)


def test_the_config_of_an_old_model_is_beside_config_json(
    save_model: Save, reference: Reference, tmp_path: Path
) -> None:
    directory = save_model(LlamaConfig(**WIDE))
    packed = save_quantized(directory, tmp_path / "packed", _gptq(4, 64, sym=True, act_order=False, v2=False))
    (packed / "quantize_config.json").write_text(json.dumps({"bits": 4, "group_size": 64, "desc_act": False}))
    assert Driver(make_runner(packed)).generate(PROMPTS, 12) == reference(directory, PROMPTS, 12)
    fingerprint = model_fingerprint(packed, torch.float32)
    (packed / "quantize_config.json").write_text(json.dumps({"bits": 4, "group_size": 32, "desc_act": False}))
    assert model_fingerprint(packed, torch.float32) != fingerprint
    (packed / "quantize_config.json").write_text("[]")
    with pytest.raises(UnsupportedModel, match=r"quantize_config\.json must be an object"):
        format_of(packed)


@given(
    bits=st.sampled_from([2, 3, 4, 8]),
    group_size=st.sampled_from([-1, 32, 48, 64, 128]),
    blocks=st.tuples(st.integers(1, 3), st.integers(1, 4)),
    sym=st.booleans(),
    act_order=st.booleans(),
    v2=st.booleans(),
    data=st.data(),
)
def test_any_part_of_any_weight_is_what_its_codes_mean(
    bits: int, group_size: int, blocks: tuple[int, int], sym: bool, act_order: bool, v2: bool, data: st.DataObject
) -> None:
    outputs, inputs = 32 * blocks[0], 32 * blocks[1]
    generator = torch.Generator().manual_seed(data.draw(st.integers(0, 99)))
    groups = (in_act_order if act_order else in_order)(inputs, group_size)
    numbers = quantize(torch.randn(outputs, inputs, generator=generator), bits, groups, sym=sym)
    stored = numbers.gptq("layer", v2=v2)
    weight_format = FORMAT(_config(bits, group_size, checkpoint_format="gptq_v2" if v2 else "gptq"))
    shapes = weight_format.tensors("layer", outputs, inputs)
    assert {name: tuple(tensor.shape) for name, tensor in stored.items()} == shapes
    weight, expected = weight_format.weight("layer", stored), numbers.dense()
    dense = weight.dense()
    assert dense.dtype is torch.float16
    assert torch.equal(dense, expected)
    rows, columns = (
        sorted(data.draw(st.lists(st.integers(0, size), min_size=2, max_size=2, unique=True)))
        for size in (outputs, inputs)
    )
    part = weight.inputs(*columns).outputs(*rows)
    assert torch.equal(part.dense(), expected[slice(*rows), slice(*columns)])
    again = part.outputs(0, 1).inputs(columns[1] - columns[0] - 1, columns[1] - columns[0])
    assert torch.equal(again.dense(), expected[rows[0] : rows[0] + 1, columns[1] - 1 : columns[1]])


def test_ranks_share_parts_of_a_fused_weight(tmp_path: Path) -> None:
    qkv = LinearLayer(LinearRole.QKV, 96, (StoredLinear("qkv", (32, 16, 16)),), SplitDimension.OUTPUTS, split_unit=4)
    down = LinearLayer(LinearRole.DOWN, 96, (StoredLinear("down", (32,)),), SplitDimension.INPUTS)
    generator = torch.Generator().manual_seed(0)
    stored: dict[str, Tensor] = {}
    dense: dict[str, Tensor] = {}
    for name, outputs in (("qkv", 64), ("down", 32)):
        codes = quantize(torch.randn(outputs, 96, generator=generator), 3, in_act_order(96, 32), sym=False)
        stored |= codes.gptq(name)
        dense[name] = codes.dense()
    save_file(stored, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps({"quantization_config": _config(3, 32)}))

    def read(layer: LinearLayer, shard: Shard) -> Tensor:
        checkpoint = Checkpoint(tmp_path, format_of(tmp_path), torch.float16, torch.device("cpu"))
        return LinearWeights(layer, checkpoint, shard).fused()[0]

    assert torch.equal(read(qkv, Shard()), dense["qkv"])
    second = torch.cat([part.chunk(4)[1] for part in torch.split(dense["qkv"], [32, 16, 16])])
    assert torch.equal(read(qkv, Shard(1, 4)), second)
    assert torch.equal(read(down, Shard(1, 4)), dense["down"][:, 24:48])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"bits": 5}, "bits: must be 2, 3, 4 or 8, not 5"),
        ({"bits": "4"}, "bits: must be 2, 3, 4 or 8, not '4'"),
        ({"bits": True}, "bits: must be 2, 3, 4 or 8, not True"),
        ({"bits": None}, "bits: must be 2, 3, 4 or 8, not None"),
        ({"group_size": 0}, "group_size: must be a positive number of inputs, or -1, not 0"),
        ({"group_size": 64.0}, "group_size: must be a positive number of inputs, or -1, not 64.0"),
        ({"checkpoint_format": "marlin"}, "checkpoint_format: must be gptq or gptq_v2, not 'marlin'"),
        ({"format": "bitblas"}, "format: must be gptq or gptq_v2, not 'bitblas'"),
        ({"format": "gptq", "checkpoint_format": "gptq_v2"}, "checkpoint_format: must be gptq, as format is"),
        ({"is_marlin_format": True}, "is_marlin_format: must be false"),
        ({"pack_dtype": "int64"}, "pack_dtype: must be int32, not 'int64'"),
        ({"adapter": {"rank": 64}}, "adapter: must be null"),
        ({"rotation": "hadamard"}, "rotation: must be null"),
        ({"desc_act": 1}, "desc_act: must be true or false, not 1"),
        ({"lm_head": "yes"}, "lm_head: must be true or false, not 'yes'"),
        ({"modules_in_block_to_quantize": "q_proj"}, "modules_in_block_to_quantize: must be a list of names"),
        ({"dynamic": []}, "dynamic: must be an object, not []"),
        ({"dynamic": {"+:(": {}}}, "dynamic: '(' is no regular expression: "),
        ({"dynamic": {"+:a": 4}}, "dynamic: '+:a' must have an object, not 4"),
        ({"dynamic": {"+:a": {"bits": 7}}}, "dynamic['+:a'].bits: must be 2, 3, 4 or 8, not 7"),
    ],
    ids=str,
)
def test_a_field_that_is_not_supported_is_named(change: dict[str, Any], message: str) -> None:
    with pytest.raises(UnsupportedModel, match=f"^{re.escape(f'quantization_config.{message}')}"):
        FORMAT(_config(4, 128) | change)


def test_fields_of_how_a_model_was_quantized_are_of_no_effect() -> None:
    described = {"damp_percent": 0.1, "true_sequential": True, "model_name_or_path": None, "static_groups": False}
    lists = {"modules_in_block_to_quantize": [["self_attn.q_proj"], ["mlp.down_proj"]], "meta": {"quantizer": "any"}}
    shapes = [FORMAT(_config(4, 64) | more).tensors("layer", 8, 64) for more in ({}, described, lists)]
    assert shapes[0] == shapes[1] == shapes[2]


def _as(name: str, dtype: torch.dtype) -> Callable[[dict[str, Tensor]], None]:
    def change(stored: dict[str, Tensor]) -> None:
        stored[f"layer.{name}"] = stored[f"layer.{name}"].to(dtype)

    return change


def _one_group_more(stored: dict[str, Tensor]) -> None:
    stored["layer.g_idx"][5] = 2


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (_as("qweight", torch.int64), "layer.qweight is int64, not int32"),
        (_as("qzeros", torch.float32), "layer.qzeros is float32, not int32"),
        (_as("scales", torch.int32), "layer.scales is int32, not float16 or bfloat16 or float32"),
        (_as("g_idx", torch.float16), "layer.g_idx is float16, not int32 or int64"),
        (_one_group_more, "layer.g_idx must have groups from 0 to 1, not from 0 to 2"),
        (lambda stored: stored["layer.g_idx"].neg_(), "layer.g_idx must have groups from 0 to 1, not from -1 to 0"),
    ],
)
def test_tensors_that_do_not_match_are_named(change: Callable[[dict[str, Tensor]], object], message: str) -> None:
    stored = quantize(torch.randn(32, 64), 4, in_order(64, 32), sym=True).gptq("layer")
    change(stored)
    with pytest.raises(UnsupportedModel, match=f"the tensor {message}"):
        FORMAT(_config(4, 32)).weight("layer", stored)


def test_a_weight_that_does_not_fill_words_is_named() -> None:
    stored = quantize(torch.randn(32, 64), 4, in_order(64, 32), sym=True).gptq("layer")
    with pytest.raises(UnsupportedModel, match=r"layer: GPTQ .* a multiple of 8 outputs and inputs, not of 31 and 64"):
        FORMAT(_config(4, 32)).weight("layer", stored | {"layer.scales": stored["layer.scales"][:, 1:]})


def test_a_tensor_of_another_shape_or_a_missing_one_is_named(save_model: Save, tmp_path: Path) -> None:
    quantized = _gptq(4, 64, sym=True, act_order=False, v2=False)
    packed = save_quantized(
        save_model(LlamaConfig(**WIDE)), tmp_path / "packed", quantized, quantization_config=_config(4, 32)
    )
    with pytest.raises(UnsupportedModel, match=r"layers\.0\.self_attn\.q_proj\.qzeros .* is \[2, 48\], not \[3, 48\]"):
        make_runner(packed)
    tensors = load_file(packed / "model.safetensors")
    del tensors["model.layers.0.self_attn.q_proj.qweight"]
    save_file(tensors, packed / "model.safetensors")
    with pytest.raises(UnsupportedModel, match=r"has no tensor model\.layers\.0\.self_attn\.q_proj\.qweight"):
        make_runner(packed)
