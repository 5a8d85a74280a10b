"""Checkpoints of FP8 compute what their codes mean: a scale for a weight or for each block, under all names."""

import json
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import LlamaConfig
from transformers.integrations.finegrained_fp8 import Fp8Dequantize

import latent_models
import llama_models
from bert_models import hidden_states, random_prompts, save_bert
from described_models import description_of
from llama_models import SIZES
from quantized_models import Fp8Weight, quantize_fp8, save_quantized
from quire_kernels.cpu.linear import MatrixFormat
from runner_driver import Driver, make_runner
from worker_svc.errors import UnsupportedModel
from worker_svc.model.encoder_description import EncoderDescription
from worker_svc.model.formats.fp8 import FORMAT
from worker_svc.model.torch_encoder import load_torch_encoder

Save = Callable[..., Path]
Reference = Callable[..., list[list[int]]]
Stored = tuple[Mapping[str, Tensor], Tensor] | None

WIDE = {**SIZES, "vocab_size": 128, "hidden_size": 96, "intermediate_size": 160}
PROMPTS = llama_models.prompts(1, 17, 40)


def _config(block: tuple[int, int] | None, **others: Any) -> dict[str, Any]:
    fields = {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic", "modules_to_not_convert": None}
    return fields | {"weight_block_size": None if block is None else list(block)} | others


def _tensors(layer: str, weight: Fp8Weight, name: str) -> dict[str, Tensor]:
    return {f"{layer}.weight": weight.codes, f"{layer}.{name}": weight.scales}


def _quantized(block: tuple[int, int] | None, left: tuple[str, ...] = ("lm_head",)) -> Callable[[str, Tensor], Stored]:
    """A function that quantizes layers so, except those that are left."""

    def quantized(layer: str, weight: Tensor) -> Stored:
        if layer.endswith(left):
            return None
        made = quantize_fp8(weight, block)
        return _tensors(layer, made, "weight_scale_inv"), made.dense()

    return quantized


@pytest.mark.parametrize("kernels", ["torch", "compiled"])
@pytest.mark.parametrize("block", [(32, 32), (128, 128), (64, 40)], ids=str)
def test_a_model_computes_what_its_codes_mean(
    block: tuple[int, int], kernels: str, save_model: Save, reference: Reference, tmp_path: Path
) -> None:
    directory = save_model(LlamaConfig(**WIDE))
    packed = save_quantized(directory, tmp_path / "packed", _quantized(block), quantization_config=_config(block))
    assert Driver(make_runner(packed, kernels)).generate(PROMPTS, 12) == reference(directory, PROMPTS, 12)


@pytest.mark.parametrize("name", ["weight_scale", "weight_scale_inv"])
@pytest.mark.parametrize("dims", [0, 1, 2])
def test_a_scale_for_a_whole_weight(
    name: str, dims: int, save_model: Save, reference: Reference, tmp_path: Path
) -> None:
    directory = save_model(LlamaConfig(**WIDE))

    def quantized(layer: str, weight: Tensor) -> Stored:
        if layer == "lm_head":
            return None
        made = quantize_fp8(weight, None)
        scale = made.scales.view((1,) * dims).clone()
        more = {f"{layer}.input_scale": torch.ones(()), f"{layer}.activation_scale": torch.ones(())}
        if layer.endswith(("k_proj", "v_proj")):
            more[f"{layer}.{layer[-6]}_scale"] = torch.ones(())
        return {f"{layer}.weight": made.codes, f"{layer}.{name}": scale, **more}, made.dense()

    config = _config(None, activation_scheme="static", kv_cache_scheme="static", ignored_layers=["lm_head"])
    packed = save_quantized(directory, tmp_path / "packed", quantized, quantization_config=config)
    assert Driver(make_runner(packed)).generate(PROMPTS, 12) == reference(directory, PROMPTS, 12)


def test_it_is_quantized_again_to_int8_as_its_dense_weights_are(save_model: Save, tmp_path: Path) -> None:
    directory = save_model(LlamaConfig(**WIDE))
    packed = save_quantized(directory, tmp_path / "packed", _quantized((32, 32)), quantization_config=_config((32, 32)))
    runners = [make_runner(each, "compiled", weights=MatrixFormat.INT8) for each in (packed, directory)]
    of_codes, of_dense = [Driver(runner).generate(PROMPTS, 12) for runner in runners]
    assert of_codes == of_dense


def test_layers_that_were_left_dense(save_model: Save, reference: Reference, tmp_path: Path) -> None:
    directory = save_model(LlamaConfig(**WIDE))
    config = _config((32, 32), modules_to_not_convert=["lm_head", "model.layers.0.mlp", "o_proj"])
    quantized = _quantized((32, 32), ("lm_head", "o_proj", "0.mlp.gate_proj", "0.mlp.up_proj", "0.mlp.down_proj"))
    packed = save_quantized(directory, tmp_path / "packed", quantized, quantization_config=config)
    assert Driver(make_runner(packed)).generate(PROMPTS, 12) == reference(directory, PROMPTS, 12)


@given(
    block=st.sampled_from([None, (1, 32), (16, 16), (128, 128), (24, 40)]),
    outputs=st.integers(1, 150),
    inputs=st.integers(1, 150),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
    data=st.data(),
)
def test_any_part_of_any_weight_is_what_its_codes_mean(
    block: tuple[int, int] | None, outputs: int, inputs: int, dtype: torch.dtype, data: st.DataObject
) -> None:
    generator = torch.Generator().manual_seed(data.draw(st.integers(0, 99)))
    made = quantize_fp8(torch.randn(outputs, inputs, generator=generator), block, dtype)
    stored = _tensors("layer", made, "weight_scale")
    weight_format = FORMAT(_config(block))
    shapes = weight_format.tensors("layer", outputs, inputs)
    assert {name: tuple(tensor.shape) for name, tensor in stored.items()} == shapes
    # In float32, whatever the dtype of the scales.
    expected = Fp8Weight(made.codes, made.scales.float(), made.block).dense()
    weight = weight_format.weight("layer", stored)
    assert torch.equal(weight.dense(), expected)
    rows, columns = (
        sorted(data.draw(st.lists(st.integers(0, size), min_size=2, max_size=2, unique=True)))
        for size in (outputs, inputs)
    )
    part = weight.inputs(*columns).outputs(*rows)
    assert torch.equal(part.dense(), expected[slice(*rows), slice(*columns)])
    again = part.outputs(0, 1).inputs(columns[1] - columns[0] - 1, columns[1] - columns[0])
    assert torch.equal(again.dense(), expected[rows[0] : rows[0] + 1, columns[1] - 1 : columns[1]])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float8_e8m0fnu])
def test_it_is_what_transformers_dequantizes(dtype: torch.dtype) -> None:
    made = quantize_fp8(torch.randn(96, 128, generator=torch.Generator().manual_seed(0)), (32, 64))
    scales = made.scales.to(dtype)
    reference: Any = Fp8Dequantize
    expected = reference(None)._dequantize_one(made.codes, scales, torch.float32)
    stored = {"layer.weight": made.codes, "layer.weight_scale": scales}
    weight = FORMAT(_config((32, 64), scale_fmt="ue8m0")).weight("layer", stored)
    assert torch.equal(weight.dense(), expected)


def test_latent_attention_and_experts_in_blocks_that_end_within_parts(
    save_model: Save, reference: Reference, tmp_path: Path
) -> None:
    directory = save_model(latent_models.VARIANTS["deepseek-v3"]())
    packed = save_quantized(directory, tmp_path / "packed", _quantized((10, 14)), quantization_config=_config((10, 14)))
    stored = load_file(packed / "model.safetensors")
    assert {"mlp.experts.3.up_proj", "self_attn.kv_b_proj", "self_attn.q_b_proj"} <= {
        name.removeprefix("model.layers.1.").removesuffix(".weight_scale_inv") for name in stored
    }
    prompts = llama_models.prompts(1, 17, 40)
    assert Driver(make_runner(packed)).generate(prompts, 12) == reference(directory, prompts, 12)


def test_an_encoder(tmp_path: Path) -> None:
    model = save_bert(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    for name, parameter in model.named_parameters():
        if name.startswith("encoder.") and parameter.dim() == 2:
            made = quantize_fp8(parameter.detach(), None)
            tensors |= {name: made.codes, f"{name}_scale_inv": made.scales[0, 0].clone()}
            parameter.data = made.dense()
    save_file(tensors, tmp_path / "model.safetensors")
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"quantization_config": _config(None)}))
    description = description_of(tmp_path, EncoderDescription)
    encoder = load_torch_encoder(description, tmp_path, torch.float32, torch.device("cpu"))
    (prompt,) = random_prompts([30])
    with torch.inference_mode():
        torch.testing.assert_close(encoder([prompt])[0], hidden_states(model, prompt), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"fmt": "e5m2"}, "fmt: must be e4m3, not 'e5m2'"),
        ({"scale_fmt": "e5m2"}, "scale_fmt: must be float or ue8m0, not 'e5m2'"),
        ({"expert_dtype": "fp4"}, "expert_dtype: must be fp8, not 'fp4'"),
        ({"activation_scheme": "none"}, "activation_scheme: must be dynamic or static, not 'none'"),
        ({"weight_block_size": 128}, "weight_block_size: must be two positive numbers, of outputs and inputs, not 128"),
        ({"weight_block_size": [128, -1]}, "weight_block_size: must be two positive numbers"),
        ({"weight_block_size": [128, 128.0]}, "weight_block_size: must be two positive numbers"),
        ({"modules_to_not_convert": "lm_head"}, "modules_to_not_convert: must be a list of names, not 'lm_head'"),
        ({"ignored_layers": [1]}, "ignored_layers: must be a list of names, not [1]"),
        ({"modules_to_convert": ["model.embed_tokens"]}, "modules_to_convert: must be null"),
    ],
    ids=str,
)
def test_a_field_that_is_not_supported_is_named(change: dict[str, Any], message: str) -> None:
    with pytest.raises(UnsupportedModel, match=f"^{re.escape(f'quantization_config.{message}')}"):
        FORMAT(_config((128, 128)) | change)


@pytest.mark.parametrize(
    ("name", "dtype", "message"),
    [
        ("weight", torch.float8_e5m2, "layer.weight is float8_e5m2, not float8_e4m3fn"),
        ("weight", torch.bfloat16, "layer.weight is bfloat16, not float8_e4m3fn"),
        ("weight_scale", torch.int8, "layer.weight_scale is int8, not float16 or bfloat16 or float32 or float8_e8m0"),
    ],
)
def test_tensors_that_do_not_match_are_named(name: str, dtype: torch.dtype, message: str) -> None:
    stored = _tensors("layer", quantize_fp8(torch.randn(32, 64), (32, 32)), "weight_scale")
    stored[f"layer.{name}"] = stored[f"layer.{name}"].to(dtype)
    with pytest.raises(UnsupportedModel, match=f"the tensor {message}"):
        FORMAT(_config((32, 32))).weight("layer", stored)


def test_scales_of_other_blocks_and_missing_ones_are_refused(save_model: Save, tmp_path: Path) -> None:
    packed = save_quantized(
        save_model(LlamaConfig(**WIDE)),
        tmp_path / "packed",
        _quantized((32, 32)),
        quantization_config=_config((32, 64)),
    )
    with pytest.raises(UnsupportedModel, match=r"q_proj\.weight_scale_inv .* is \[12, 3\], not \[12, 2\]"):
        make_runner(packed)
    tensors = load_file(packed / "model.safetensors")
    kept = {name: tensor for name, tensor in tensors.items() if not name.endswith("_scale_inv")}
    save_file(kept, packed / "model.safetensors")
    with pytest.raises(UnsupportedModel, match=r"q_proj\.weight is float8_e4m3fn, .* has no scale of it"):
        make_runner(packed)
