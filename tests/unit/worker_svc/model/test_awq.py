"""Checkpoints of AWQ compute what their codes mean, and other layouts of AWQ are refused."""

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from transformers import LlamaConfig

import llama_models
from llama_models import SIZES
from quantized_models import in_order, quantize, save_quantized
from runner_driver import Driver, make_runner
from worker_svc.errors import UnsupportedModel
from worker_svc.model.formats.awq import FORMAT

Save = Callable[..., Path]
Reference = Callable[..., list[list[int]]]

WIDE = {**SIZES, "vocab_size": 128, "hidden_size": 128, "intermediate_size": 256, "num_attention_heads": 4}
PROMPTS = llama_models.prompts(1, 17, 40)


def _config(group_size: int, **others: Any) -> dict[str, Any]:
    return {"quant_method": "awq", "bits": 4, "group_size": group_size, "version": "gemm", "zero_point": True, **others}


def _awq(group_size: int, left: tuple[str, ...] = ("lm_head",), *, sym: bool = False) -> Any:
    """A function that quantizes layers so, except those that are left."""

    def quantized(layer: str, weight: Tensor) -> tuple[dict[str, Tensor], Tensor] | None:
        if layer.endswith(left):
            return None
        codes = quantize(weight, 4, in_order(weight.shape[1], group_size), sym=sym)
        return codes.awq(layer), codes.dense()

    return quantized


@pytest.mark.parametrize("kernels", ["torch", "compiled"])
@pytest.mark.parametrize("group_size", [-1, 32, 64, 128])
def test_a_model_computes_what_its_codes_mean(
    group_size: int, kernels: str, save_model: Save, reference: Reference, tmp_path: Path
) -> None:
    directory = save_model(LlamaConfig(**WIDE))
    packed = save_quantized(
        directory, tmp_path / "packed", _awq(group_size), quantization_config=_config(group_size, version="GEMM")
    )
    assert Driver(make_runner(packed, kernels)).generate(PROMPTS, 12) == reference(directory, PROMPTS, 12)


def test_layers_that_were_left_dense(save_model: Save, reference: Reference, tmp_path: Path) -> None:
    directory = save_model(LlamaConfig(**WIDE))
    config = _config(64, zero_point=False, modules_to_not_convert=["o_proj", "model.layers.0.mlp"])
    quantized = _awq(64, ("o_proj", "0.mlp.gate_proj", "0.mlp.up_proj", "0.mlp.down_proj"), sym=True)
    packed = save_quantized(directory, tmp_path / "packed", quantized, quantization_config=config)
    assert Driver(make_runner(packed)).generate(PROMPTS, 12) == reference(directory, PROMPTS, 12)


def test_a_tied_head_is_not_read(save_model: Save, reference: Reference, tmp_path: Path) -> None:
    # Of a width that AWQ could not store
    directory = save_model(LlamaConfig(**WIDE | {"vocab_size": 131}, tie_word_embeddings=True))
    packed = save_quantized(directory, tmp_path / "packed", _awq(64), quantization_config=_config(64))
    assert Driver(make_runner(packed)).generate(PROMPTS, 12) == reference(directory, PROMPTS, 12)


def test_the_config_of_an_old_model_is_beside_config_json(
    save_model: Save, reference: Reference, tmp_path: Path
) -> None:
    directory = save_model(LlamaConfig(**WIDE))
    packed = save_quantized(directory, tmp_path / "packed", _awq(64))
    old = {"zero_point": True, "q_group_size": 64, "w_bit": 4, "version": "GEMM"}
    (packed / "quant_config.json").write_text(json.dumps(old))
    assert Driver(make_runner(packed)).generate(PROMPTS, 12) == reference(directory, PROMPTS, 12)


@given(
    group_size=st.sampled_from([-1, 16, 32]),
    blocks=st.tuples(st.integers(1, 6), st.integers(1, 4)),
    sym=st.booleans(),
    data=st.data(),
)
def test_any_part_of_any_weight_is_what_its_codes_mean(
    group_size: int, blocks: tuple[int, int], sym: bool, data: st.DataObject
) -> None:
    outputs, inputs = 8 * blocks[0], 32 * blocks[1]
    generator = torch.Generator().manual_seed(data.draw(st.integers(0, 99)))
    numbers = quantize(torch.randn(outputs, inputs, generator=generator), 4, in_order(inputs, group_size), sym=sym)
    stored, weight_format = numbers.awq("layer"), FORMAT(_config(group_size))
    shapes = weight_format.tensors("layer", outputs, inputs)
    assert {name: tuple(tensor.shape) for name, tensor in stored.items()} == shapes
    weight, expected = weight_format.weight("layer", stored), numbers.dense()
    dense = weight.dense()
    assert dense.dtype is torch.float16
    assert torch.equal(dense, expected)
    rows, columns = (
        slice(*sorted(data.draw(st.lists(st.integers(0, size), min_size=2, max_size=2, unique=True))))
        for size in (outputs, inputs)
    )
    part = weight.outputs(rows.start, rows.stop).inputs(columns.start, columns.stop)
    assert torch.equal(part.dense(), expected[rows, columns])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"bits": 8}, "bits: must be 4, not 8"),
        ({"bits": None, "w_bit": 3}, "w_bit: must be 4, not 3"),
        ({"group_size": -2}, "group_size: must be a positive number of inputs, or -1, not -2"),
        ({"group_size": None}, "group_size: must be a positive number of inputs, or -1, not None"),
        ({"version": "gemv"}, "version: must be gemm, not 'gemv'"),
        ({"version": "gemv_fast"}, "version: must be gemm, not 'gemv_fast'"),
        ({"version": None, "format": "marlin"}, "format: must be gemm, not 'marlin'"),
        ({"backend": "llm-awq"}, "backend: must be autoawq"),
        ({"zero_point": "yes"}, "zero_point: must be true or false, not 'yes'"),
        ({"modules_to_not_convert": ["lm_head", 3]}, "modules_to_not_convert: must be a list of names"),
    ],
    ids=str,
)
def test_a_field_that_is_not_supported_is_named(change: dict[str, Any], message: str) -> None:
    with pytest.raises(UnsupportedModel, match=f"^{re.escape(f'quantization_config.{message}')}"):
        FORMAT(_config(128) | change)


@pytest.mark.parametrize(
    ("name", "tensor", "message"),
    [
        ("qweight", torch.zeros(64, 4, dtype=torch.int64), "the tensor layer.qweight is int64, not int32"),
        ("qzeros", torch.zeros(2, 4), "the tensor layer.qzeros is float32, not int32"),
        ("scales", torch.zeros(2, 32, dtype=torch.int8), "the tensor layer.scales is int8, not float16"),
        ("scales", torch.zeros(2, 31), "layer: AWQ stores weights of a multiple of 8 outputs and 32 inputs, not of 31"),
        (
            "qweight",
            torch.zeros(60, 4, dtype=torch.int32),
            "of a multiple of 8 outputs and 32 inputs, not of 32 and 60",
        ),
    ],
)
def test_tensors_that_do_not_match_are_named(name: str, tensor: Tensor, message: str) -> None:
    stored = quantize(torch.randn(32, 64), 4, in_order(64, 32), sym=True).awq("layer")
    with pytest.raises(UnsupportedModel, match=message):
        FORMAT(_config(32)).weight("layer", stored | {f"layer.{name}": tensor})
