"""Codes of groups of inputs are kept on a processor, in the bits that they have, whatever bits are asked of weights."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import GlmConfig, LlamaConfig, OlmoeConfig

import compiled
from joined_heads import joined_heads
from llama_models import SIZES
from quantized_models import QuantizedWeight, compressed_config, in_act_order, in_order, quantize, save_quantized
from quire_kernels.cpu.experts import PackedExperts
from quire_kernels.cpu.linear import MatrixFormat, PackedMatrix, linear
from quire_kernels.cpu.norms import PackedNorm
from worker_svc.attention import CompiledKernels
from worker_svc.model.architecture import describe
from worker_svc.model.building import BuiltModel
from worker_svc.model.compiled_builder import CompiledHead
from worker_svc.model.compiled_model import load_compiled_model
from worker_svc.model.config import read_config

Save = Callable[..., Path]
Store = Callable[[str, QuantizedWeight], dict[str, Tensor]]

HEAD_DIM: int = SIZES["head_dim"]
WIDE = {**SIZES, "vocab_size": 128, "hidden_size": 192, "intermediate_size": 256}
EXPERTS: dict[str, Any] = {
    **{name: size for name, size in WIDE.items() if name != "head_dim"},
    "num_attention_heads": 3,
    "num_key_value_heads": 1,
    "num_experts": 4,
    "num_experts_per_tok": 2,
}


def _gptq(bits: int, group_size: int, **others: Any) -> dict[str, Any]:
    return {"quant_method": "gptq", "bits": bits, "group_size": group_size, **others}


def _awq(group_size: int) -> dict[str, Any]:
    return {"quant_method": "awq", "bits": 4, "group_size": group_size}


def _saved(directory: Path, packed: Path, config: dict[str, Any], group_size: int, *, sym: bool) -> Path:
    """The model with all layers but the head in groups; with `dynamic`, layer 1 in 8 bits."""

    def stored(layer: str, weight: Tensor) -> tuple[dict[str, Tensor], Tensor] | None:
        if layer == "lm_head":
            return None
        method = config["quant_method"]
        bits = config["bits"] if "bits" in config else config["config_groups"]["group_0"]["weights"]["num_bits"]
        if ".layers.1." in layer and "dynamic" in config:
            bits = 8
        groups = in_act_order if config.get("desc_act") else in_order
        numbers = quantize(weight, bits, groups(weight.shape[1], group_size), sym=sym)
        if method in ("gptq", "awq"):
            return (numbers.gptq if method == "gptq" else numbers.awq)(layer), numbers.dense()
        store = numbers.packed if config["format"] == "pack-quantized" else numbers.in_bytes
        return store(layer, sym=sym), numbers.dense()

    return save_quantized(directory, packed, stored, quantization_config=config)


def _built(packed: Path, asked: MatrixFormat) -> BuiltModel[PackedMatrix, PackedNorm, PackedExperts, CompiledHead]:
    """The model as the compiled kernels compute it, in float32."""
    description = describe(read_config(packed))
    assert description is not None
    kernels = CompiledKernels(compiled.thread_pool(), asked)
    return load_compiled_model(description, packed, torch.float32, kernels).built


def _dense_qkv(directory: Path, layer: int) -> Tensor:
    """What the codes of a layer's queries, keys and values mean, in the order of the compiled code."""
    meant = load_file(directory / "model.safetensors")
    return joined_heads([meant[f"model.layers.{layer}.self_attn.{part}_proj.weight"] for part in "qkv"], HEAD_DIM)


CONFIGS: dict[str, tuple[dict[str, Any], int, bool]] = {
    "gptq, 8 bits in groups of 32": (_gptq(8, 32), 32, True),
    "gptq, 8 bits in groups of 128": (_gptq(8, 128), 128, False),
    "gptq, 4 bits": (_gptq(4, 64), 64, False),
    "gptq, 4 bits, act-order": (_gptq(4, 32, desc_act=True), 32, True),
    "gptq, 4 and 8 bits": (_gptq(4, 32, dynamic={r"+:model\.layers\.1\.": {"bits": 8}}), 32, True),
    "awq": (_awq(64), 64, False),
    "packed, 8 bits": (compressed_config("pack-quantized", 8, 64, sym=False), 64, False),
    "packed, 4 bits": (compressed_config("pack-quantized", 4, 32, sym=False), 32, False),
    "in bytes, 8 bits": (compressed_config("int-quantized", 8, 32, sym=True), 32, True),
    "in bytes, 8 bits with zero points": (compressed_config("int-quantized", 8, 16, sym=False), 16, False),
}


@pytest.mark.parametrize("asked", [MatrixFormat.INT8, MatrixFormat.W8A8, MatrixFormat.W4A16, MatrixFormat.W4A8])
@pytest.mark.parametrize("name", CONFIGS)
def test_a_model_is_computed_with_its_own_codes(
    name: str, asked: MatrixFormat, save_model: Save, tmp_path: Path
) -> None:
    config, group_size, sym = CONFIGS[name]
    directory = save_model(LlamaConfig(**WIDE))
    packed = _saved(directory, tmp_path / "packed", config, group_size, sym=sym)
    built = _built(packed, asked)
    for number, layer in enumerate(built.layers):
        bits = 8 if "8 bits" in name and ("4 and" not in name or number == 1) else 4
        nibbles = MatrixFormat.W4A8 if asked.takes_codes else MatrixFormat.W4A16
        grouped = MatrixFormat.GROUPED_W8A8 if asked.takes_codes else MatrixFormat.GROUPED_W8A16
        assert layer.qkv.matrix_format is (grouped if bits == 8 else nibbles)
        if not asked.takes_codes:
            dense = _dense_qkv(directory, number)
            # `dense` is rounded to float16, and zero points are rounded to 11 bits where they become minimums.
            torch.testing.assert_close(_held(layer.qkv), dense, rtol=1e-3, atol=2e-4 * float(dense.abs().max()))
    asked_of_head = {MatrixFormat.W4A16: MatrixFormat.INT8, MatrixFormat.W4A8: MatrixFormat.W8A8}
    assert built.head.matrix.matrix_format is asked_of_head.get(asked, asked), "it is dense"


@pytest.mark.parametrize("name", ["gptq, 4 bits, act-order", "awq", "in bytes, 8 bits", "one group of 8 bits"])
def test_rows_of_neighbours_that_are_rotated_take_their_codes_along(
    name: str, save_model: Save, tmp_path: Path
) -> None:
    directory = save_model(GlmConfig(**WIDE, attention_bias=False))
    one_group = compressed_config("pack-quantized", 8, -1, sym=True), -1, True
    config, group_size, sym = CONFIGS.get(name, one_group)
    packed = _saved(directory, tmp_path / "packed", config, group_size, sym=sym)
    tensors = load_file(directory / "model.safetensors")
    for part in ("q_proj", "k_proj"):
        weight = tensors[f"model.layers.1.self_attn.{part}.weight"]
        # Half of each head is rotated.
        pairs, rest = weight.view(-1, 2, HEAD_DIM // 2, weight.shape[1]).unbind(1)
        halves = torch.cat((pairs[:, ::2], pairs[:, 1::2], rest), 1)
        tensors[f"model.layers.1.self_attn.{part}.weight"] = halves.flatten(0, 1)
    save_file(tensors, directory / "model.safetensors")
    qkv, dense = _built(packed, MatrixFormat.INT8).layers[1].qkv, _dense_qkv(directory, 1)
    torch.testing.assert_close(_held(qkv), dense, rtol=1e-3, atol=2e-4 * float(dense.abs().max()))


@pytest.mark.parametrize(
    ("bits", "asked", "of_attention"),
    [
        (4, MatrixFormat.INT8, MatrixFormat.W4A16),
        (4, MatrixFormat.W8A8, MatrixFormat.W4A8),
        (8, MatrixFormat.INT8, MatrixFormat.GROUPED_W8A16),
        (8, MatrixFormat.W4A8, MatrixFormat.GROUPED_W8A8),
    ],
)
def test_experts_have_the_bits_that_are_asked(
    bits: int, asked: MatrixFormat, of_attention: MatrixFormat, save_model: Save, tmp_path: Path
) -> None:
    """Their products share rows, so they are all alike; the other layers keep their codes."""
    directory = save_model(OlmoeConfig(**EXPERTS))
    packed = _saved(directory, tmp_path / "packed", _gptq(bits, 32), 32, sym=True)
    for layer in _built(packed, asked).layers:
        assert layer.qkv.matrix_format is of_attention
        assert isinstance(layer.mlp, PackedExperts)
        assert {each.matrix_format for each in (*layer.mlp.gate_up, *layer.mlp.down)} == {asked}


def test_groups_of_8_bits_in_another_order_are_rounded_again(save_model: Save, tmp_path: Path) -> None:
    directory = save_model(LlamaConfig(**WIDE))
    packed = _saved(directory, tmp_path / "packed", _gptq(8, 32, desc_act=True), 32, sym=True)
    qkv, dense = _built(packed, MatrixFormat.INT8).layers[0].qkv, _dense_qkv(directory, 0)
    assert qkv.matrix_format is MatrixFormat.GROUPED_W8A16
    assert 0 < (_held(qkv) - dense).abs().max() < dense.abs().max() / 100


def test_codes_of_4_bits_that_cannot_be_kept_are_rounded_to_the_bits_that_are_asked(
    save_model: Save, tmp_path: Path
) -> None:
    """Here groups are of 24 inputs. Rounded to 4 bits again, they would lose much."""
    directory = save_model(LlamaConfig(**WIDE | {"intermediate_size": 264}))
    packed = _saved(directory, tmp_path / "packed", _gptq(4, 24), 24, sym=True)
    qkv, dense = _built(packed, MatrixFormat.INT8).layers[0].qkv, _dense_qkv(directory, 0)
    assert qkv.matrix_format is MatrixFormat.INT8
    assert 0 < (_held(qkv) - dense).abs().max() < dense.abs().max() / 100


def test_a_product_of_parts_in_4_and_8_bits_has_the_numbers_of_both(save_model: Save, tmp_path: Path) -> None:
    directory = save_model(LlamaConfig(**WIDE))
    dynamic = {r"+:.*v_proj": {"bits": 8}}

    def stored(layer: str, weight: Tensor) -> tuple[dict[str, Tensor], Tensor] | None:
        if layer == "lm_head":
            return None
        bits = 8 if layer.endswith("v_proj") else 4
        numbers = quantize(weight, bits, in_order(weight.shape[1], 32), sym=False)
        return numbers.gptq(layer), numbers.dense()

    packed = save_quantized(directory, tmp_path / "packed", stored, quantization_config=_gptq(4, 32, dynamic=dynamic))
    qkv, dense = _built(packed, MatrixFormat.INT8).layers[0].qkv, _dense_qkv(directory, 0)
    assert qkv.matrix_format is MatrixFormat.GROUPED_W8A16
    torch.testing.assert_close(_held(qkv), dense, rtol=1e-3, atol=2e-4 * float(dense.abs().max()))


def test_one_group_of_8_bits_is_a_scale_for_each_output(save_model: Save, tmp_path: Path) -> None:
    directory = save_model(LlamaConfig(**WIDE))
    packed = _saved(directory, tmp_path / "packed", compressed_config("pack-quantized", 8, -1, sym=True), -1, sym=True)
    assert _built(packed, MatrixFormat.W8A8).layers[0].qkv.matrix_format is MatrixFormat.W8A8


def _held(matrix: PackedMatrix) -> Tensor:
    """The weight that a matrix holds."""
    return linear(compiled.thread_pool(), torch.eye(matrix.inputs, dtype=matrix.dtype), matrix).t()
