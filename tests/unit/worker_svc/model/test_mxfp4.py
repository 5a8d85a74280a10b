"""Checkpoints of MXFP4 compute what transformers' own unpacking makes of their codes."""

import json
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import GptOssConfig
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

import compiled
import llama_models
from quire_kernels.cpu.experts import PackedExperts
from quire_kernels.cpu.linear import MatrixFormat
from quire_kernels.cpu.nibbles import NibbleWeight
from runner_driver import Driver, make_runner
from transformers_models import COMMON, VOCAB, WINDOW
from worker_svc.attention import CompiledKernels
from worker_svc.errors import UnsupportedModel
from worker_svc.model.architecture import describe
from worker_svc.model.compiled_model import load_compiled_model
from worker_svc.model.config import read_config
from worker_svc.model.description import ComputedFormat, DecoderLayer, LinearLayer, ModelDescription
from worker_svc.model.device_formats import Quantization
from worker_svc.model.formats.mxfp4 import FORMAT
from worker_svc.model.weight_format import StridedWeight, block_codes
from worker_svc.model_checks import read_model
from worker_svc.settings import WorkerSettings
from worker_svc.step import SamplingParams
from worker_svc.weight_sizes import read_decoder_sizes

Save = Callable[..., Path]
Reference = Callable[..., list[list[int]]]

PROMPTS = llama_models.prompts(1, 17, 40)
NUM_EXPERTS, GROUP = 4, 32


@pytest.fixture(scope="module")
def directories(save_model: Save, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A model whose experts are in MXFP4, and the same model as transformers unpacks it."""
    sizes = {
        **COMMON, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4,
        "num_key_value_heads": 2, "head_dim": 16, "num_local_experts": NUM_EXPERTS, "num_experts_per_tok": 2,
        "sliding_window": WINDOW,
    }  # fmt: skip
    dense = save_model(GptOssConfig(**sizes))
    packed = tmp_path_factory.mktemp("packed")
    tensors, generator = load_file(dense / "model.safetensors"), torch.Generator().manual_seed(1)
    stored = dict(tensors)
    for name in tensors:
        if name.endswith(("gate_up_proj", "down_proj")):
            _, inputs, outputs = tensors[name].shape
            shape = NUM_EXPERTS, outputs, inputs // GROUP
            blocks = torch.randint(0, 256, (*shape, GROUP // 2), dtype=torch.uint8, generator=generator)
            scales = torch.randint(121, 126, shape, dtype=torch.uint8, generator=generator)
            stored |= {f"{name}_blocks": blocks, f"{name}_scales": scales}
            del stored[name]
            tensors[name] = convert_moe_packed_tensors(blocks, scales, dtype=torch.float32)
    save_file(tensors, dense / "model.safetensors", metadata={"format": "pt"})
    save_file(stored, packed / "model.safetensors", metadata={"format": "pt"})
    quantization = {"quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.*.self_attn", "lm_head"]}
    config = json.loads((dense / "config.json").read_text()) | {"quantization_config": quantization}
    (packed / "config.json").write_text(json.dumps(config))
    (packed / "tokenizer.json").write_text("{}")
    return packed, dense


@pytest.mark.parametrize("kernels", ["torch", "compiled"])
def test_tokens_are_those_of_transformers(kernels: str, directories: tuple[Path, Path], reference: Reference) -> None:
    packed, dense = directories
    runner = make_runner(packed, kernels)
    assert Driver(runner).generate(PROMPTS, 12) == reference(dense, PROMPTS, 12)
    settings: dict[str, Any] = {"model": str(packed), "kernels": "compiled", "device": "cpu"}
    assert read_model(WorkerSettings(**settings)).computed_by == "compiled kernels"


def _logprobs(directory: Path, kernels: str, **options: Any) -> Tensor:
    driver = Driver(make_runner(directory, kernels, **options))
    driver.generate([PROMPTS[-1]], 1, SamplingParams(logprobs=VOCAB))
    return torch.tensor([value for _, value in sorted(driver.logprobs[1][0].top)])


def test_the_triton_kernels_compute_what_torch_does(directories: tuple[Path, Path]) -> None:
    packed, dense = directories
    torch.testing.assert_close(_logprobs(packed, "triton"), _logprobs(dense, "torch"), rtol=0, atol=5e-4)


def _as_they_are(linear: LinearLayer) -> LinearLayer:
    return replace(linear, computed=ComputedFormat.MODEL)


@pytest.mark.parametrize(
    ("weights", "kept"),
    [
        (MatrixFormat.INT8, MatrixFormat.W4A16),
        (MatrixFormat.W4A16, MatrixFormat.W4A16),
        (MatrixFormat.W8A8, MatrixFormat.GROUPED_W8A8),
        (MatrixFormat.W4A8, MatrixFormat.GROUPED_W8A8),
    ],
    ids=str,
)
def test_experts_have_4_bits_where_activations_are_not_rounded(
    weights: MatrixFormat, kept: MatrixFormat, directories: tuple[Path, Path]
) -> None:
    packed, _ = directories
    description = describe(read_config(packed))
    assert description is not None
    kernels = CompiledKernels(compiled.thread_pool(), weights)
    mixture = load_compiled_model(description, packed, torch.float32, kernels).built.layers[0].mlp
    assert isinstance(mixture, PackedExperts)
    assert {matrix.matrix_format for matrix in (*mixture.gate_up, *mixture.down)} == {kept}


@pytest.mark.parametrize("weights", [MatrixFormat.INT8, MatrixFormat.W4A16], ids=str)
def test_experts_keep_their_numbers_whatever_bits_are_asked(
    weights: MatrixFormat, directories: tuple[Path, Path]
) -> None:
    packed, dense = directories
    described = describe(read_config(packed))
    assert described is not None

    def unrounded(layer: DecoderLayer) -> DecoderLayer:
        qkv, output = _as_they_are(layer.attention.qkv), _as_they_are(layer.attention.output)
        return replace(layer, attention=replace(layer.attention, qkv=qkv, output=output))

    layers = tuple(map(unrounded, described.layers))
    but_experts = replace(described, layers=layers, head=_as_they_are(described.head))
    kept = _logprobs(packed, "compiled", weights=weights, description=but_experts)
    torch.testing.assert_close(kept, _logprobs(dense, "torch"), rtol=0, atol=5e-4)


def test_the_triton_kernels_keep_the_same_numbers(directories: tuple[Path, Path]) -> None:
    """They round all other layers, as the compiled kernels do."""
    packed, _ = directories
    by_compiled = _logprobs(packed, "compiled", weights=MatrixFormat.W4A16)
    by_triton = _logprobs(packed, "triton", quantization=Quantization.W4A16)
    assert (by_triton - by_compiled).norm() < 0.05 * (by_compiled - by_compiled.mean()).norm()


def test_memory_is_that_of_unpacked_experts_where_their_codes_are_not_kept(directories: tuple[Path, Path]) -> None:
    described = describe(read_config(directories[0]))
    assert isinstance(described, ModelDescription)
    packed, dense = (read_decoder_sizes(directory, described, torch.bfloat16) for directory in directories)

    in_packed, in_dense = (each.num_bytes(torch.bfloat16, "none", "compiled") for each in (packed, dense))
    assert in_packed == in_dense
    in_packed, in_dense = (each.num_bytes(torch.bfloat16, "int8", "compiled") for each in (packed, dense))
    experts = load_file(directories[1] / "model.safetensors").items()
    numbers = sum(tensor.numel() for name, tensor in experts if name.endswith(("gate_up_proj", "down_proj")))
    assert in_dense - in_packed == 0.375 * numbers


def _weight(outputs: int = 6, groups: int = 3) -> tuple[Any, Tensor]:
    """One with each code and many scales, and its numbers by transformers."""
    generator = torch.Generator().manual_seed(2)
    blocks = torch.randint(0, 256, (outputs, groups, 16), dtype=torch.uint8, generator=generator)
    scales = torch.randint(0, 252, (outputs, groups), dtype=torch.uint8, generator=generator)
    weight = FORMAT({}).weight("layer", {"layer.blocks": blocks, "layer.scales": scales})
    return weight, convert_moe_packed_tensors(blocks[None], scales[None], dtype=torch.float32)[0].t()


def test_numbers_are_exactly_those_that_transformers_unpacks() -> None:
    weight, expected = _weight(64, 40)
    assert torch.equal(weight.dense().float(), expected)
    assert torch.equal(weight.outputs(3, 50).dense().float(), expected[3:50])
    assert torch.equal(weight.inputs(32, 1024).dense().float(), expected[:, 32:1024])
    assert isinstance(weight, StridedWeight)
    assert torch.equal(weight.strided(slice(1, 64, 2)).dense().float(), expected[1::2])


def test_codes_have_the_numbers() -> None:
    weight, expected = _weight()
    stored = block_codes(weight.outputs(1, 5))
    assert stored is not None
    assert (stored.bits, int(stored.codes.max())) == (4, 15)
    nibbles = NibbleWeight(stored.codes, stored.scales, torch.zeros_like(stored.scales), GROUP, is_e2m1=stored.is_e2m1)
    assert torch.equal(nibbles.dense(), expected[1:5])
    codes = stored.whole()
    assert codes.codes.max() < 2**codes.bits
    steps = (codes.codes.float() - codes.zero).view(4, 3, codes.group)
    assert torch.equal((steps * codes.scales[..., None]).flatten(1), expected[1:5])


def test_a_scale_that_is_no_number_makes_none() -> None:
    tensors = {"layer.blocks": torch.zeros(1, 2, 16, dtype=torch.uint8), "layer.scales": torch.tensor([[255, 127]])}
    weight = FORMAT({}).weight("layer", tensors | {"layer.scales": tensors["layer.scales"].to(torch.uint8)})
    assert weight.dense().isnan().tolist() == [[True] * 32 + [False] * 32]


def test_groups_are_not_cut() -> None:
    weight, _ = _weight()
    with pytest.raises(UnsupportedModel, match="layer: groups of 32 inputs cannot be cut into inputs 16 to 32"):
        weight.inputs(16, 32)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda tensors: {"gate_up_proj_scales": None}, "has no tensor model.layers.0.mlp.experts.0.gate_up_proj.sc"),
        (lambda tensors: {"down_proj_blocks": tensors["down_proj_blocks"][:, :8]}, "is [4, 8, 3, 16], not [4, 64, 3, "),
        (lambda tensors: {"down_proj_scales": tensors["down_proj_scales"].float()}, "down_proj.scales"),
    ],
    ids=["missing", "shape", "dtype"],
)  # fmt: skip
def test_tensors_that_do_not_match_are_named(
    change: Callable[[dict[str, Tensor]], dict[str, Tensor | None]],
    message: str,
    directories: tuple[Path, Path],
    tmp_path: Path,
) -> None:
    packed, _ = directories
    tensors, prefix = load_file(packed / "model.safetensors"), "model.layers.0.mlp.experts."
    of_experts = {name.removeprefix(prefix): tensor for name, tensor in tensors.items() if name.startswith(prefix)}
    for name, tensor in change(of_experts).items():
        if tensor is None:
            del tensors[f"{prefix}{name}"]
        else:
            tensors[f"{prefix}{name}"] = tensor.contiguous()
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    (tmp_path / "config.json").write_text((packed / "config.json").read_text())
    with pytest.raises(UnsupportedModel, match=re.escape(message)):
        make_runner(tmp_path)


def test_inputs_that_are_no_whole_groups_are_refused(directories: tuple[Path, Path], tmp_path: Path) -> None:
    """Tensors of a width of 80 have as many groups as those of 96."""
    packed, _ = directories
    tensors, narrow = load_file(packed / "model.safetensors"), 80
    for name, tensor in tensors.items():
        if "gate_up_proj" in name:
            tensors[name] = tensor[:, : 2 * narrow].contiguous()
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((packed / "config.json").read_text()) | {"intermediate_size": narrow}
    (tmp_path / "config.json").write_text(json.dumps(config))
    message = "the weight of model.layers.0.mlp.experts.0.down_proj is [64, 96], not [64, 80]"
    for kernels in ("torch", "compiled"):
        with pytest.raises(UnsupportedModel, match=re.escape(message)):
            make_runner(tmp_path, kernels)


def test_a_field_of_another_kind_is_named() -> None:
    with pytest.raises(UnsupportedModel, match=r"modules_to_not_convert: must be a list of names, not 7"):
        FORMAT({"modules_to_not_convert": 7})
