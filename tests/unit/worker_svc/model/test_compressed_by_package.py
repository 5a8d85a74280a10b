"""Checkpoints that the package compressed-tensors writes are read as it reads them, and what `quire quantize` writes is
what the package reads.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from compressed_tensors.compressors import ModelCompressor
from compressed_tensors.quantization import QuantizationConfig, apply_quantization_config, preset_name_to_scheme
from compressed_tensors.quantization.utils import calculate_qparams, generate_gparam
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoModelForCausalLM, LlamaConfig

import llama_models
from compressed_files import decompressed
from llama_models import SIZES
from runner_driver import Driver, make_runner
from worker_svc.compressed_writer import scheme_named
from worker_svc.model.device_formats import Quantization
from worker_svc.model.weight_format import format_of
from worker_svc.quantize import FORMATS, quantize_model

Save = Callable[..., Path]
Reference = Callable[..., list[list[int]]]

WIDE = {**SIZES, "vocab_size": 128, "hidden_size": 96, "intermediate_size": 160}
PROMPTS = llama_models.prompts(1, 17, 40)


def _weights(bits: int, strategy: str, **others: Any) -> dict[str, Any]:
    return {"num_bits": bits, "type": "int", "symmetric": True, "strategy": strategy, **others}


SCHEMES: dict[str, dict[str, Any]] = {
    "mxfp4": {"all": preset_name_to_scheme("MXFP4A16", ["Linear"])},
    "mxfp8": {"all": preset_name_to_scheme("MXFP8A16", ["Linear"])},
    "w4a16": {"all": {"targets": ["Linear"], "weights": _weights(4, "group", group_size=32)}},
    "w4a16 with zero points": {
        "all": {"targets": ["Linear"], "weights": _weights(4, "group", group_size=16, symmetric=False)}
    },
    "w8a8": {
        "all": {
            "targets": ["Linear"],
            "weights": _weights(8, "channel"),
            "input_activations": _weights(8, "token", dynamic=True),
        }
    },
    "fp8": {
        "all": {
            "targets": ["Linear"],
            "weights": _weights(8, "channel", type="float"),
            "input_activations": _weights(8, "token", type="float", dynamic=True),
        }
    },
    "mixed": {
        "mlp": {"targets": ["re:.*mlp.*"], "weights": _weights(4, "group", group_size=32), "format": "pack-quantized"},
        "attention": {
            "targets": ["re:.*self_attn.*"], "weights": _weights(8, "channel"), "format": "int-quantized"
        },
    },
}  # fmt: skip


def _set_scales(module: torch.nn.Module) -> None:
    """Those of the largest number of each group, as a calibration sets them."""
    scheme: Any = module.quantization_scheme
    fields = scheme.weights
    weight, scale = module.get_parameter("weight").data, module.get_parameter("weight_scale").data
    groups = weight.view(len(weight), scale.shape[1], -1)
    if fields.scale_dtype is not None:
        of_all = None
        if fields.strategy == "tensor_group":
            of_all = module.get_parameter("weight_global_scale").data
            of_all.copy_(generate_gparam(weight.min(), weight.max()))
        made, _ = calculate_qparams(groups.amin(-1), groups.amax(-1), fields, global_scale=of_all)
        scale.copy_(made)
        return
    largest = groups.abs().amax(-1)
    scale.copy_(largest / (448 if fields.type == "float" else 2 ** (fields.num_bits - 1) - 0.5))
    if not fields.symmetric:
        module.get_parameter("weight_zero_point").data.fill_(1)


def _compress(directory: Path, packed: Path, meant: Path, groups: dict[str, Any]) -> None:
    """`packed` gets the model as the package compresses it, `meant` what the package decompresses of that."""
    model: Any = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
    apply_quantization_config(
        model, QuantizationConfig(config_groups=groups, ignore=["lm_head"], quantization_status="compressed")
    )
    for module in model.modules():
        if hasattr(module, "quantization_scheme"):
            _set_scales(module)
    compressor: Any = ModelCompressor.from_pretrained_model(model)
    compressor.compress_model(model)
    model.save_pretrained(packed)
    compressor.update_config(packed)
    compressor.decompress_model(model)
    dense: Any = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
    state = model.state_dict()
    dense.load_state_dict({name: state[name].float() for name in dense.state_dict()})
    dense.save_pretrained(meant)
    for each in (packed, meant):
        (each / "tokenizer.json").write_text("{}")


@pytest.fixture(params=SCHEMES)
def checkpoint(request: pytest.FixtureRequest, save_model: Save, tmp_path: Path) -> tuple[Path, Path]:
    """What the package compressed, and what it means."""
    packed, meant = tmp_path / "packed", tmp_path / "meant"
    _compress(save_model(LlamaConfig(**WIDE)), packed, meant, SCHEMES[request.param])
    return packed, meant


def test_a_model_computes_what_the_package_decompresses(checkpoint: tuple[Path, Path], reference: Reference) -> None:
    packed, meant = checkpoint
    for kernels in ("torch", "compiled"):
        assert Driver(make_runner(packed, kernels)).generate(PROMPTS, 12) == reference(meant, PROMPTS, 12)


def test_numbers_of_nvfp4_are_those_of_the_package(save_model: Save, tmp_path: Path) -> None:
    """It rounds them to bfloat16."""
    packed, meant = tmp_path / "packed", tmp_path / "meant"
    nvfp4 = {"all": preset_name_to_scheme("NVFP4A16", ["Linear"])}
    _compress(save_model(LlamaConfig(**WIDE)), packed, meant, nvfp4)
    stored, ours = load_file(packed / "model.safetensors"), format_of(packed)
    expected = load_file(meant / "model.safetensors")
    layers = [name.removesuffix(".weight_packed") for name in stored if name.endswith(".weight_packed")]
    assert len(layers) == 14
    for layer in layers:
        weight = expected[f"{layer}.weight"]
        tensors = {name: stored[name] for name in ours.tensors(layer, *weight.shape)}
        assert torch.equal(ours.weight(layer, tensors).dense().to(torch.bfloat16).float(), weight)
    assert Driver(make_runner(packed)).generate(PROMPTS[:1], 1)


@pytest.mark.parametrize("name", FORMATS)
def test_the_package_reads_what_is_written(name: str, save_model: Save, tmp_path: Path) -> None:
    source, target = save_model(LlamaConfig(**WIDE)), tmp_path / "out"
    quantize_model(source, target, scheme_named(name, 32), lambda line: None)
    written, ours = load_file(target / "model.safetensors"), format_of(target)
    for layer, module in decompressed(source, target).named_modules():
        if layer.endswith("_proj"):
            weight: Tensor = module.weight.data
            stored = {each: written[each] for each in ours.tensors(layer, *weight.shape)}
            torch.testing.assert_close(weight.float(), ours.weight(layer, stored).dense().float(), rtol=1e-6, atol=0)


def test_its_codes_are_kept_on_a_gpu(save_model: Save, tmp_path: Path, reference: Reference) -> None:
    """By the Triton kernels, which multiply the same numbers in float32."""
    packed, meant = tmp_path / "packed", tmp_path / "meant"
    _compress(save_model(LlamaConfig(**WIDE | {"num_hidden_layers": 1})), packed, meant, SCHEMES["w4a16"])
    runner = make_runner(
        packed,
        "triton",
        device="cuda" if torch.cuda.is_available() else "cpu",
        quantization=Quantization.W4A16,
    )
    assert Driver(runner).generate(PROMPTS[:2], 3) == reference(meant, PROMPTS[:2], 3)
