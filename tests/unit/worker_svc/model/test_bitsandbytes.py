"""Checkpoints of bitsandbytes compute what their codes mean."""

import json
import math
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import LlamaConfig

import llama_models
from llama_models import SIZES
from quantized_models import save_quantized
from quire_kernels.cpu.linear import MatrixFormat
from runner_driver import Driver, make_runner
from worker_svc.errors import UnsupportedModel
from worker_svc.model.formats.bitsandbytes import FORMAT

Save = Callable[..., Path]
Reference = Callable[..., list[list[int]]]
Stored = tuple[dict[str, Tensor], Tensor] | None

WIDE = {**SIZES, "vocab_size": 128, "hidden_size": 96, "intermediate_size": 160}
PROMPTS = llama_models.prompts(1, 17, 40)
OFFSET = 0.125


def _nearest(numbers: Tensor, meanings: Tensor) -> Tensor:
    return torch.from_numpy(np.abs(numbers.numpy()[..., None] - meanings.numpy()).argmin(-1))


def _in_4_bits(weight: Tensor, kind: str, block: int, *, nested: bool) -> tuple[dict[str, Tensor], Tensor]:
    """The tensors of a layer by the last parts of their names, and what they mean."""
    generator = torch.Generator().manual_seed(1)
    meanings = torch.linspace(-1, 1, 16) + 0.01 * torch.randn(16, generator=generator)
    numbers = weight.float().flatten()
    blocks = torch.nn.functional.pad(numbers, (0, -len(numbers) % block)).view(-1, block)
    largest = blocks.abs().amax(1)
    state: dict[str, Any] = {"quant_type": kind, "blocksize": block, "dtype": "bfloat16", "shape": list(weight.shape)}
    tensors = {"": Tensor(), "absmax": largest, "quant_map": meanings}
    if nested:
        of_codes = torch.linspace(-1, 1, 256)
        groups = torch.nn.functional.pad(largest - OFFSET, (0, -len(largest) % 256)).view(-1, 256)
        most = groups.abs().amax(1)
        codes = _nearest(groups / most[:, None], of_codes)
        largest = (of_codes[codes] * most[:, None]).flatten()[: len(largest)] + OFFSET
        state |= {"nested_blocksize": 256, "nested_dtype": "float32", "nested_offset": OFFSET}
        tensors |= {
            "absmax": codes.flatten()[: len(largest)].to(torch.uint8),
            "nested_absmax": most,
            "nested_quant_map": of_codes,
        }
    codes = _nearest(blocks / largest[:, None], meanings)
    meant = (meanings[codes] * largest[:, None]).flatten()[: len(numbers)]
    stored = codes.flatten()[: len(numbers)].to(torch.uint8)
    tensors[""] = (stored[::2] << 4 | stored[1::2]).view(-1, 1)
    tensors[f"quant_state.bitsandbytes__{kind}"] = torch.tensor(list(json.dumps(state).encode()), dtype=torch.uint8)
    return tensors, meant.view(weight.shape)


def _named(layer: str, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    return {f"{layer}.weight.{name}".removesuffix("."): tensor for name, tensor in tensors.items()}


def _config(kind: str, *, nested: bool, **others: Any) -> dict[str, Any]:
    fields = {"quant_method": "bitsandbytes", "load_in_4bit": True, "load_in_8bit": False, "bnb_4bit_quant_type": kind}
    storage = {"bnb_4bit_quant_storage": "uint8", "bnb_4bit_compute_dtype": "bfloat16"}
    return fields | storage | {"bnb_4bit_use_double_quant": nested, "llm_int8_skip_modules": ["lm_head"]} | others


@pytest.mark.parametrize("kernels", ["torch", "compiled"])
@pytest.mark.parametrize("nested", [False, True], ids=["plain", "nested"])
@pytest.mark.parametrize(("kind", "block"), [("nf4", 64), ("fp4", 128)])
def test_a_model_computes_what_its_codes_mean(
    kind: str, block: int, kernels: str, save_model: Save, reference: Reference, tmp_path: Path, *, nested: bool
) -> None:
    directory = save_model(LlamaConfig(**WIDE))

    def stored(layer: str, weight: Tensor) -> Stored:
        if layer == "lm_head":
            return None
        tensors, meant = _in_4_bits(weight, kind, block, nested=nested)
        return _named(layer, tensors), meant

    config = _config(kind, nested=nested)
    packed = save_quantized(directory, tmp_path / "packed", stored, quantization_config=config)
    assert Driver(make_runner(packed, kernels)).generate(PROMPTS, 12) == reference(directory, PROMPTS, 12)


def _in_8_bits(layer: str, weight: Tensor) -> tuple[dict[str, Tensor], Tensor]:
    largest = weight.float().abs().amax(1)
    codes = (weight.float() / largest[:, None] * 127).round().to(torch.int8)
    tensors = {"weight": codes, "SCB": largest, "weight_format": torch.tensor(0, dtype=torch.uint8)}
    return {f"{layer}.{name}": tensor for name, tensor in tensors.items()}, codes * (largest / 127)[:, None]


def test_codes_of_8_bits_are_those_that_are_multiplied(save_model: Save, reference: Reference, tmp_path: Path) -> None:
    directory = save_model(LlamaConfig(**WIDE))
    packed = save_quantized(
        directory,
        tmp_path / "packed",
        lambda layer, weight: None if layer == "lm_head" else _in_8_bits(layer, weight),
        quantization_config={"quant_method": "bitsandbytes", "load_in_8bit": True, "llm_int8_threshold": 6.0},
    )
    expected = reference(directory, PROMPTS, 12)
    assert Driver(make_runner(packed, "torch")).generate(PROMPTS, 12) == expected
    described = make_runner(packed, "compiled", weights=MatrixFormat.INT8)
    assert Driver(described).generate(PROMPTS[:1], 4) == [tokens[:4] for tokens in expected[:1]]


def test_codes_in_another_order_are_refused() -> None:
    tensors, _ = _in_8_bits("layer", torch.randn(4, 96))
    changed = tensors | {"layer.weight_format": torch.tensor(2, dtype=torch.uint8)}
    with pytest.raises(UnsupportedModel, match=re.escape("the tensor layer.weight_format is 2, not 0")):
        FORMAT({"load_in_8bit": True}).weight("layer", changed)


def _changed(state: dict[str, Any]) -> Tensor:
    return torch.tensor(list(json.dumps(state).encode()), dtype=torch.uint8)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"quant_state.bitsandbytes__nf4": torch.tensor([255, 0], dtype=torch.uint8)}, "does not have a layer's shape"),
        ({"quant_state.bitsandbytes__nf4": _changed({"blocksize": 64})}, "does not have a layer's shape and blocksize"),
        ({"quant_state.bitsandbytes__nf4": _changed({"shape": [4, 96], "blocksize": 0})}, "has sizes below 1"),
        ({"quant_state.bitsandbytes__nf4": _changed({"shape": [4, 96], "blocksize": 32})}, "scales of 6 blocks"),
        ({"quant_state.bitsandbytes__nf4": _changed({"shape": [4, 96], "blocksize": 10**13})}, "scales of 6 blocks"),
        (
            {"quant_state.bitsandbytes__nf4": _changed({"shape": [4, 99], "blocksize": 64})},
            "has 384 codes, and is [4, 99]",
        ),
        (
            {"quant_state.bitsandbytes__nf4": _changed({"shape": [4, 96], "blocksize": math.inf})},
            "does not have a layer",
        ),
        ({"": torch.zeros(192)}, "the tensor layer.weight is float32, not uint8"),
        ({"absmax": torch.zeros(6, dtype=torch.uint8)}, "the tensor layer.weight.absmax is uint8, not float16"),
    ],
    ids=["no JSON", "no shape", "no block", "blocks", "a large block", "sizes", "infinite", "codes", "scales"],
)
def test_tensors_that_do_not_match_are_named(changes: dict[str, Tensor], message: str) -> None:
    tensors, _ = _in_4_bits(torch.randn(4, 96), "nf4", 64, nested=False)
    with pytest.raises(UnsupportedModel, match=re.escape(message)):
        FORMAT(_config("nf4", nested=False)).weight("layer", _named("layer", tensors | changes))


def test_a_weight_of_another_shape_is_refused(save_model: Save, tmp_path: Path) -> None:
    """As many numbers, but another shape."""
    directory = save_model(LlamaConfig(**WIDE))

    def stored(layer: str, weight: Tensor) -> Stored:
        if layer == "lm_head":
            return None
        tensors, meant = _in_4_bits(weight.t() if layer.endswith("gate_proj") else weight, "nf4", 64, nested=False)
        return _named(layer, tensors), meant.view(weight.shape)

    packed = save_quantized(directory, tmp_path / "packed", stored, quantization_config=_config("nf4", nested=False))
    with pytest.raises(UnsupportedModel, match=re.escape("gate_proj is [96, 160], not [160, 96]")):
        make_runner(packed)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"load_in_4bit": False}, "quantization_config.load_in_4bit: must be true, or load_in_8bit, not False"),
        ({"load_in_8bit": True}, "quantization_config.load_in_4bit: must be true, or load_in_8bit, not True"),
        ({"bnb_4bit_quant_storage": "bfloat16"}, "bnb_4bit_quant_storage: must be uint8, not 'bfloat16'"),
        ({"bnb_4bit_quant_type": "int4"}, "quantization_config.bnb_4bit_quant_type: must be fp4 or nf4, not 'int4'"),
    ],
)
def test_variants_that_are_not_read_are_named(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(UnsupportedModel, match=re.escape(message)):
        FORMAT(_config("nf4", nested=False, **changes))
