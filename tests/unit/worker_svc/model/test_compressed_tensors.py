"""Checkpoints of compressed-tensors compute what their codes mean: all layouts, strategies and groups of layers."""

import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from compressed_tensors import compressors, quantization
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import LlamaConfig

import llama_models
from llama_models import SIZES
from quantized_models import (
    in_act_order,
    in_order,
    quantize,
    quantize_fp8,
    save_quantized,
)
from quire_kernels.cpu.linear import MatrixFormat
from runner_driver import Driver, make_runner
from worker_svc.errors import UnsupportedModel
from worker_svc.model.formats.compressed_tensors import FORMAT

Save = Callable[..., Path]
Reference = Callable[..., list[list[int]]]
Made = tuple[Mapping[str, Tensor], Tensor]

WIDE = {**SIZES, "vocab_size": 128, "hidden_size": 96, "intermediate_size": 160}
PROMPTS = llama_models.prompts(1, 17, 40)
PACKED = "pack-quantized"


def _ints(bits: int, group_size: int, *, sym: bool = True, act_order: bool = False, **others: Any) -> dict[str, Any]:
    """The fields of weights in codes; -1: one group for all inputs."""
    return {
        "num_bits": bits,
        "type": "int",
        "symmetric": sym,
        "strategy": "channel" if group_size == -1 else "group",
        "group_size": group_size,
        "actorder": "group" if act_order else None,
        "dynamic": False,
        "observer": "minmax",
        "observer_kwargs": {},
        "block_structure": None,
        **others,
    }


def _floats(strategy: str, block: list[int] | None = None, group_size: int | None = None) -> dict[str, Any]:
    fields = {"num_bits": 8, "type": "float", "symmetric": True, "dynamic": False, "actorder": None}
    return fields | {"strategy": strategy, "block_structure": block, "group_size": group_size}


def _group(weights: dict[str, Any] | None, *targets: str, **others: Any) -> dict[str, Any]:
    return {"targets": list(targets or ("Linear",)), "weights": weights, "input_activations": None, **others}


def _config(layout: str, *groups: dict[str, Any], **others: Any) -> dict[str, Any]:
    return {
        "quant_method": "compressed-tensors",
        "format": layout,
        "config_groups": {f"group_{number}": group for number, group in enumerate(groups)},
        "ignore": ["lm_head"],
        "quantization_status": "frozen",
        "kv_cache_scheme": None,
        "global_compression_ratio": 1.5,
        **others,
    }


def _made(layer: str, weight: Tensor, fields: Mapping[str, Any], layout: str) -> Made:
    """The tensors of a layer with these fields, and the weight that they mean."""
    inputs = weight.shape[1]
    if fields["type"] == "float":
        block = {
            "tensor": None,
            "channel": (1, inputs),
            "group": (1, fields["group_size"]),
            "block": fields["block_structure"],
        }[fields["strategy"]]
        codes = quantize_fp8(weight, block, torch.bfloat16)
        scales = codes.scales.flatten() if block is None else codes.scales
        return {f"{layer}.weight": codes.codes, f"{layer}.weight_scale": scales}, codes.dense()
    act_order = fields["actorder"] == "group"
    groups = (in_act_order if act_order else in_order)(inputs, fields["group_size"])
    numbers = quantize(weight, fields["num_bits"], groups, sym=fields["symmetric"])
    store = numbers.packed if layout == PACKED else numbers.in_bytes
    return store(layer, sym=fields["symmetric"], act_order=act_order), numbers.dense()


def _quantized(fields: Mapping[str, Any], layout: str) -> Callable[[str, Tensor], Made | None]:
    """A function that quantizes all layers but the head so."""
    return lambda layer, weight: None if layer == "lm_head" else _made(layer, weight, fields, layout)


VARIANTS = [
    (PACKED, _ints(4, 32)),
    (PACKED, _ints(4, 16, sym=False)),
    (PACKED, _ints(4, 32, sym=False, act_order=True)),
    (PACKED, _ints(8, -1)),
    (PACKED, _ints(2, -1, sym=False)),
    ("int-quantized", _ints(8, -1)),
    ("int-quantized", _ints(8, 32, sym=False, act_order=True)),
    ("naive-quantized", _ints(4, -1, sym=False)),
    ("naive-quantized", _floats("channel")),
    ("float-quantized", _floats("tensor")),
    ("float-quantized", _floats("channel")),
    ("float-quantized", _floats("group", group_size=32)),
    ("float-quantized", _floats("block", [64, 40])),
]
NAMES = [f"{layout}-{fields['type']}{fields['num_bits']}-{fields['strategy']}" for layout, fields in VARIANTS]


@pytest.mark.parametrize("kernels", ["torch", "compiled"])
@pytest.mark.parametrize(("layout", "fields"), VARIANTS, ids=NAMES)
def test_a_model_computes_what_its_codes_mean(
    layout: str, fields: dict[str, Any], kernels: str, save_model: Save, reference: Reference, tmp_path: Path
) -> None:
    directory = save_model(LlamaConfig(**WIDE))
    packed = save_quantized(
        directory,
        tmp_path / "packed",
        _quantized(fields, layout),
        quantization_config=_config(layout, _group(fields)),
    )
    assert Driver(make_runner(packed, kernels)).generate(PROMPTS, 12) == reference(directory, PROMPTS, 12)


def test_codes_of_fp8_are_quantized_again_to_int8_as_dense_weights_are(save_model: Save, tmp_path: Path) -> None:
    layout, fields = VARIANTS[12]
    directory = save_model(LlamaConfig(**WIDE))
    config = _config(layout, _group(fields))
    packed = save_quantized(directory, tmp_path / "packed", _quantized(fields, layout), quantization_config=config)
    runners = [make_runner(each, "compiled", weights=MatrixFormat.INT8) for each in (packed, directory)]
    of_codes, of_dense = [Driver(runner).generate(PROMPTS, 12) for runner in runners]
    assert of_codes == of_dense


def test_groups_of_layers_have_schemes_and_layouts_of_their_own(
    save_model: Save, reference: Reference, tmp_path: Path
) -> None:
    directory = save_model(LlamaConfig(**WIDE))
    linear, down, one = _floats("tensor"), _ints(4, 32, sym=False), _ints(8, -1)
    name = "model.layers.1.mlp.down_proj"

    def quantized(layer: str, weight: Tensor) -> Made | None:
        if layer.endswith(("o_proj", "lm_head")):
            return None
        if layer == name:
            return _made(layer, weight, one, "int-quantized")
        if "down_proj" in layer:
            return _made(layer, weight, down, PACKED)
        return _made(layer, weight, linear, "float-quantized")

    config = _config(
        "mixed-precision",
        _group(linear, format="float-quantized"),
        # Patterns begin where names do. The first in the alphabet that matches is of effect, and a name before it.
        _group(_ints(8, 16), "re:layers", "re:model.layers.*down_proj", format=PACKED),
        _group(down, r"re:.*down_proj$", format=PACKED),
        _group(one, name, format="int-quantized"),
        _group(None, "LlamaAttention"),
        ignore=["re:.*o_proj", "lm_head"],
    )
    packed = save_quantized(directory, tmp_path / "packed", quantized, quantization_config=config)
    assert Driver(make_runner(packed)).generate(PROMPTS, 12) == reference(directory, PROMPTS, 12)


def test_scales_of_activations_and_of_the_cache_are_not_read(
    save_model: Save, reference: Reference, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    directory = save_model(LlamaConfig(**WIDE))
    fields, cache = _floats("tensor"), _floats("tensor")

    def quantized(layer: str, weight: Tensor) -> Made | None:
        if layer == "lm_head":
            return None
        tensors, meant = _made(layer, weight, fields, "float-quantized")
        more = {f"{layer}.input_scale": torch.ones(1), f"{layer}.input_zero_point": torch.zeros(1)}
        if layer.endswith("k_proj"):
            attention = layer.removesuffix(".k_proj")
            more |= {f"{attention}.k_scale": torch.ones(1), f"{attention}.v_scale": torch.ones(1)}
            more[f"{layer}.output_scale"] = torch.ones(1)
        # One number is stored without a dimension by some.
        return {**tensors, **more, f"{layer}.weight_scale": tensors[f"{layer}.weight_scale"][0].clone()}, meant

    config = _config("float-quantized", _group(fields, input_activations=_floats("tensor")), kv_cache_scheme=cache)
    packed = save_quantized(directory, tmp_path / "packed", quantized, quantization_config=config)
    caplog.set_level("INFO", "quire.worker")
    assert Driver(make_runner(packed)).generate(PROMPTS, 12) == reference(directory, PROMPTS, 12)
    assert "the model's kv_cache_scheme is not used: QUIRE_KV_CACHE_DTYPE" in caplog.text


@given(
    variant=st.sampled_from(VARIANTS),
    outputs=st.integers(1, 70),
    blocks=st.integers(1, 3),
    data=st.data(),
)
def test_any_part_of_any_weight_is_what_its_codes_mean(
    variant: tuple[str, dict[str, Any]], outputs: int, blocks: int, data: st.DataObject
) -> None:
    layout, fields = variant
    # Codes of a whole row need not fill its words.
    inputs = 32 * blocks if fields["strategy"] == "group" else 32 * blocks - data.draw(st.integers(0, 9))
    generator = torch.Generator().manual_seed(data.draw(st.integers(0, 99)))
    stored, expected = _made("layer", torch.randn(outputs, inputs, generator=generator), fields, layout)
    weight_format = FORMAT(_config(layout, _group(fields)))
    shapes = weight_format.tensors("layer", outputs, inputs)
    assert {name: tuple(tensor.shape) for name, tensor in stored.items()} == shapes
    weight = weight_format.weight("layer", stored)
    dense = weight.dense()
    assert dense.dtype is expected.dtype
    assert torch.equal(dense, expected)
    rows, columns = (
        sorted(data.draw(st.lists(st.integers(0, size), min_size=2, max_size=2, unique=True)))
        for size in (outputs, inputs)
    )
    part = weight.inputs(*columns).outputs(*rows)
    assert torch.equal(part.dense(), expected[slice(*rows), slice(*columns)])
    again = part.outputs(0, 1).inputs(columns[1] - columns[0] - 1, columns[1] - columns[0])
    assert torch.equal(again.dense(), expected[rows[0] : rows[0] + 1, columns[1] - 1 : columns[1]])


@pytest.mark.parametrize(
    ("layout", "fields"), [(layout, fields) for layout, fields in VARIANTS if not fields["actorder"]]
)
def test_it_is_what_the_package_compresses_and_decompresses(layout: str, fields: dict[str, Any]) -> None:
    scheme = quantization.QuantizationScheme(targets=["Linear"], weights=fields)
    compressor: Any = compressors.BaseCompressor.get_value_from_registry(layout)
    outputs, inputs = 72, 96
    weight = torch.randn(outputs, inputs, generator=torch.Generator().manual_seed(0))
    groups = inputs // (fields["group_size"] or inputs)
    shapes_of = {"tensor": (1,), "channel": (outputs, 1), "group": (outputs, groups), "block": (2, 3)}
    shape = shapes_of[fields["strategy"]]
    largest = 448 if fields["type"] == "float" else 2 ** (fields["num_bits"] - 1)
    scale = (3 * torch.rand(shape) / largest).to(torch.bfloat16)
    state: dict[str, Tensor] = {"weight": weight, "weight_scale": scale}
    if not fields["symmetric"]:
        state["weight_zero_point"] = torch.randint(-2, 2, shape, dtype=torch.int8)
    stored = compressor.compress(state, scheme)
    expected = compressor.decompress(stored, scheme)["weight"]
    weight_format = FORMAT(_config(layout, _group(fields)))
    found = {f"layer.{name}": tensor for name, tensor in stored.items()}
    shapes = {name: tuple(tensor.shape) for name, tensor in found.items()}
    assert shapes == weight_format.tensors("layer", outputs, inputs)
    assert torch.equal(weight_format.weight("layer", found).dense(), expected)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"format": "sparse-24-bitmask"}, "format: must be float-quantized, int-quantized, mixed-precision, mxfp4-"),
        ({"format": "marlin-24"}, "format: must be float-quantized, "),
        ({"format": "mxfp6-pack-quantized"}, "format: must be float-quantized, "),
        ({"format": "mixed-precision"}, "config_groups.group_0.format: must be pack-quantized, int-quantized"),
        ({"sparsity_config": {"format": "sparse-bitmask"}}, "sparsity_config.format: must be dense, not 'sparse-"),
        ({"sparsity_config": []}, "sparsity_config: must be an object, not []"),
        ({"transform_config": {"config_groups": {"R1": {}}}}, "transform_config: must be null"),
        ({"moe_sparsity_config": {"method": "prune"}}, "moe_sparsity_config: must be null"),
        ({"ignore": "lm_head"}, "ignore: must be a list of names, not 'lm_head'"),
        ({"config_groups": []}, "config_groups: must be an object, not []"),
        ({"config_groups": {"W4A16": ["Linear"]}}, "config_groups.W4A16: must be an object, not ['Linear']"),
        ({"config_groups": {"a": _group(_ints(4, 32), "re:(")}}, "config_groups: '(' is no regular expr"),
        ({"config_groups": {"a": {"targets": "Linear"}}}, "config_groups.a.targets: must be a list of texts"),
        ({"config_groups": {"a": _group(_ints(4, 32), format="mxfp6-pack-quantized")}}, "config_groups.a.format: must"),
    ],
    ids=str,
)
def test_a_field_that_is_not_supported_is_named(change: dict[str, Any], message: str) -> None:
    with pytest.raises(UnsupportedModel, match=f"^{re.escape(f'quantization_config.{message}')}"):
        FORMAT(_config(PACKED, _group(_ints(4, 32))) | change)


@pytest.mark.parametrize(
    ("layout", "fields", "message"),
    [
        (PACKED, _ints(3, 32), "num_bits: must be 2, 4 or 8, not 3"),
        (PACKED, _ints(4, 0), "group_size: must be a positive number of inputs, or -1, not 0"),
        (PACKED, _ints(4, 32, strategy="tensor_group"), "strategy: must be channel or group, not 'tensor_group'"),
        (PACKED, _ints(4, 32, strategy="tensor"), "strategy: must be channel or group, not 'tensor'"),
        (PACKED, _floats("channel"), "type: must be int, not 'float'"),
        (PACKED, _ints(4, 32, symmetric="yes"), "symmetric: must be true or false, not 'yes'"),
        (PACKED, _ints(4, 32, dynamic=True), "dynamic: must be false"),
        (PACKED, _ints(4, 32, actorder="random"), "actorder: must be dynamic, group, static or weight, not 'random'"),
        ("int-quantized", _floats("channel"), "type: must be int, not 'float'"),
        ("int-quantized", _ints(9, -1), "num_bits: must be 2, 3, 4, 5, 6, 7 or 8, not 9"),
        ("float-quantized", _ints(8, -1), "type: must be float, not 'int'"),
        ("float-quantized", _floats("channel") | {"num_bits": 4}, "num_bits: must be 8, not 4"),
        ("float-quantized", _floats("channel") | {"symmetric": False}, "symmetric: must be true"),
        ("float-quantized", _floats("block"), "block_structure: must be two numbers"),
        ("float-quantized", _floats("block", [128]), "block_structure: must be two positive numbers"),
        ("float-quantized", _floats("block", [128, 0]), "block_structure: must be two positive numbers"),
    ],
    ids=str,
)
def test_weights_that_are_not_supported_are_named(layout: str, fields: dict[str, Any], message: str) -> None:
    expected = re.escape(f"quantization_config.config_groups.group_0.weights.{message}")
    with pytest.raises(UnsupportedModel, match=f"^{expected}"):
        FORMAT(_config(layout, _group(fields)))


def _as(name: str, dtype: torch.dtype) -> Callable[[dict[str, Tensor]], None]:
    def change(stored: dict[str, Tensor]) -> None:
        stored[f"layer.{name}"] = stored[f"layer.{name}"].to(dtype)

    return change


def _set(name: str, *numbers: int) -> Callable[[dict[str, Tensor]], None]:
    def change(stored: dict[str, Tensor]) -> None:
        stored[f"layer.{name}"][: len(numbers)] = torch.tensor(numbers)

    return change


@pytest.mark.parametrize(
    ("layout", "fields", "change", "message"),
    [
        (PACKED, _ints(4, 32), _as("weight_packed", torch.int64), "layer.weight_packed is int64, not int32"),
        (PACKED, _ints(4, 32), _as("weight_shape", torch.float32), "layer.weight_shape is float32, not int32 or int64"),
        (PACKED, _ints(4, 32), _set("weight_shape", 24), "layer.weight_shape is [24, 64], and layer.weight_packed [32"),
        (PACKED, _ints(4, 32), _set("weight_shape", 32, 72), "layer.weight_shape is [32, 72], and layer.weight_packed"),
        (PACKED, _ints(4, 32, sym=False), _as("weight_zero_point", torch.int8), "layer.weight_zero_point is int8, not"),
        (PACKED, _ints(4, 32), _as("weight_scale", torch.int8), "layer.weight_scale is int8, not float16"),
        (PACKED, _ints(4, 32, act_order=True), _as("weight_g_idx", torch.int8), "layer.weight_g_idx is int8, not int"),
        (PACKED, _ints(4, 32, act_order=True), _set("weight_g_idx", 0, 0, 0, 0, 0, 0, 0), "layer.weight_g_idx must"),
        ("int-quantized", _ints(8, -1), _as("weight", torch.float16), "layer.weight is float16, not int8"),
        ("float-quantized", _floats("channel"), _as("weight", torch.float8_e5m2), "layer.weight is float8_e5m2, not"),
    ],
)
def test_tensors_that_do_not_match_are_named(
    layout: str, fields: dict[str, Any], change: Callable[[dict[str, Tensor]], None], message: str
) -> None:
    stored = dict(_made("layer", torch.randn(32, 64), fields, layout)[0])
    change(stored)
    with pytest.raises(UnsupportedModel, match=re.escape(f"the tensor {message}")):
        FORMAT(_config(layout, _group(fields))).weight("layer", stored)


def test_an_order_of_activations_that_is_not_known_is_that_of_the_inputs() -> None:
    stored, expected = _made("layer", torch.randn(32, 64), _ints(4, 32), PACKED)
    weight_format = FORMAT(_config(PACKED, _group(_ints(4, 32, act_order=True))))
    unknown = torch.full((64,), -1, dtype=torch.int32)
    assert torch.equal(weight_format.weight("layer", {**stored, "layer.weight_g_idx": unknown}).dense(), expected)


def test_inputs_that_are_no_multiple_of_the_group_size_are_named() -> None:
    stored = dict(_made("layer", torch.randn(32, 64), _ints(4, 32), PACKED)[0])
    with pytest.raises(UnsupportedModel, match="layer: its 64 inputs are no multiple of the group size 48"):
        FORMAT(_config(PACKED, _group(_ints(4, 48)))).weight("layer", stored)


@pytest.mark.parametrize("inputs", [153, 159])
def test_a_stored_shape_of_as_many_words_must_be_that_of_the_layer(
    inputs: int, save_model: Save, tmp_path: Path
) -> None:
    fields = _ints(4, -1)
    packed = save_quantized(
        save_model(LlamaConfig(**WIDE)),
        tmp_path / "packed",
        _quantized(fields, PACKED),
        quantization_config=_config(PACKED, _group(fields)),
    )
    tensors = load_file(packed / "model.safetensors")
    layer = "model.layers.0.mlp.down_proj"
    tensors[f"{layer}.weight_shape"] = torch.tensor([96, inputs])
    save_file(tensors, packed / "model.safetensors")
    message = re.escape(f"the weight of {layer} is [96, {inputs}], not [96, 160]")
    with pytest.raises(UnsupportedModel, match=message):
        make_runner(packed)


def test_codes_without_a_scale_or_a_group_are_refused(save_model: Save, tmp_path: Path) -> None:
    layout, fields = VARIANTS[5]
    packed = save_quantized(
        save_model(LlamaConfig(**WIDE)),
        tmp_path / "packed",
        _quantized(fields, layout),
        quantization_config=_config(layout, _group(fields, "re:.*mlp")),
    )
    name = "model.layers.0.self_attn.q_proj.weight"
    with pytest.raises(UnsupportedModel, match=re.escape(f"{name} is int8, and config.json names no format")):
        make_runner(packed)
    tensors = load_file(packed / "model.safetensors")
    attention = [each for each in tensors if "self_attn" in each and each.endswith("weight_scale")]
    save_file({each: tensors[each] for each in tensors if each not in attention}, packed / "model.safetensors")
    with pytest.raises(UnsupportedModel, match="or the checkpoint has no scale of it"):
        make_runner(packed)
