"""Checkpoints of floating-point codes in 4 and 8 bits, of the tools that write them, compute what their codes mean."""

import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import LlamaConfig, LlavaConfig, Qwen3MoeConfig

import compiled
import llama_models
from llama_models import SIZES
from quantized_models import E2m1Numbers, quantize_e2m1, quantize_fp8, save_quantized
from quire_kernels.cpu.linear import MatrixFormat
from runner_driver import Driver, make_runner
from worker_svc.attention import CompiledKernels
from worker_svc.errors import UnsupportedModel
from worker_svc.model.architecture import describe
from worker_svc.model.compiled_model import load_compiled_model
from worker_svc.model.config import read_config
from worker_svc.model.description import ComputedFormat, ModelDescription
from worker_svc.model.device_formats import Quantization
from worker_svc.model.weight_format import block_codes, block_form, format_of
from worker_svc.step import SamplingParams
from worker_svc.weight_sizes import read_decoder_sizes

Save = Callable[..., Path]
Reference = Callable[..., list[list[int]]]
Stored = tuple[Mapping[str, Tensor], Tensor] | None

WIDE = {**SIZES, "vocab_size": 128, "hidden_size": 96, "intermediate_size": 160}
PROMPTS = llama_models.prompts(1, 17, 40)


@dataclass(frozen=True)
class Variant:
    """How a tool stores a layer, and what it writes into config.json."""

    config: Mapping[str, Any]
    store: Callable[[str, Tensor], tuple[Mapping[str, Tensor], Tensor]]
    file: str | None = None
    """The file that has the config in place of config.json."""


def _float8(
    block: tuple[int | None, int | None],
    *,
    shape: Callable[[Tensor], Tensor] = lambda scales: scales,
    name: str = "weight_scale",
) -> Callable[[str, Tensor], tuple[Mapping[str, Tensor], Tensor]]:
    """Stores codes of 8 bits with a scale for each block; `shape` changes the scales [rows, columns]."""

    def store(layer: str, weight: Tensor) -> tuple[Mapping[str, Tensor], Tensor]:
        rows, columns = (size or whole for size, whole in zip(block, weight.shape, strict=True))
        made = quantize_fp8(weight, (rows, columns))
        tensors = {f"{layer}.weight": made.codes, f"{layer}.{name}": shape(made.scales)}
        return tensors | {f"{layer}.input_scale": torch.ones(())}, made.dense()

    return store


def _mxfp8(layer: str, weight: Tensor) -> tuple[Mapping[str, Tensor], Tensor]:
    groups = weight.float().view(len(weight), -1, 32)
    powers = (groups.abs().amax(2).log2().floor() - 8).clamp(-127)
    codes = (groups / 2.0 ** powers[..., None]).clamp(-448, 448).to(torch.float8_e4m3fn)
    meant = (codes.float() * 2.0 ** powers[..., None]).flatten(1)
    return {f"{layer}.weight": codes.flatten(1), f"{layer}.weight_scale": (powers + 127).to(torch.uint8)}, meant


def _e2m1(
    tensors: Callable[[E2m1Numbers], Mapping[str, Tensor]], group: int
) -> Callable[[str, Tensor], tuple[Mapping[str, Tensor], Tensor]]:
    def store(layer: str, weight: Tensor) -> tuple[Mapping[str, Tensor], Tensor]:
        made = quantize_e2m1(weight, group, powers_of_two=group == 32)
        return {f"{layer}.{name}": tensor for name, tensor in tensors(made).items()}, made.dense()

    return store


def _nvfp4_of_compressed_tensors(made: E2m1Numbers) -> Mapping[str, Tensor]:
    """Also as AutoRound has them: the number by which scales are divided."""
    return {
        "weight_packed": made.packed(),
        "weight_scale": made.scales.to(torch.float8_e4m3fn),
        "weight_global_scale": torch.tensor([1 / made.factor]),
        "input_global_scale": torch.ones(1),
    }


def _nvfp4_of_modelopt(made: E2m1Numbers) -> Mapping[str, Tensor]:
    return {
        "weight": made.packed(),
        "weight_scale": made.scales.to(torch.float8_e4m3fn),
        "weight_scale_2": torch.tensor(made.factor),
        "input_scale": torch.ones(()),
    }


def _compressed(layout: str, group: int, bits: int, strategy: str = "group") -> dict[str, Any]:
    weights = {"num_bits": bits, "type": "float", "symmetric": True, "strategy": strategy, "group_size": group}
    inputs = weights | {"dynamic": "local"}
    groups = {"group_0": {"targets": ["Linear"], "weights": weights, "input_activations": inputs}}
    return {"quant_method": "compressed-tensors", "format": layout, "config_groups": groups, "ignore": ["lm_head"]}


def _modelopt(algorithm: str, **others: Any) -> dict[str, Any]:
    producer = {"name": "modelopt", "version": "0.47.0"}
    return {"quant_method": "modelopt", "quant_algo": algorithm, "ignore": ["lm_head"], "producer": producer, **others}


def _auto_round(bits: int, data_type: str, group: Any, packing: str = "llm_compressor") -> dict[str, Any]:
    fields = {
        "bits": bits,
        "data_type": data_type,
        "group_size": group,
        "sym": True,
        "act_bits": 8,
        "act_dynamic": True,
    }
    return {"quant_method": "auto-round", "packing_format": f"auto_round:{packing}", **fields}


def _quark(dtype: str, scheme: str, **others: Any) -> dict[str, Any]:
    weight = {"dtype": dtype, "is_dynamic": False, "qscheme": scheme, "group_size": None, "scale_format": None} | others
    return {
        "quant_method": "quark",
        "global_quant_config": {"weight": weight, "input_tensors": None, "output_tensors": None, "bias": None},
        "layer_quant_config": {},
        "layer_type_quant_config": {},
        "exclude": ["lm_head"],
        "export": {"kv_cache_group": [], "pack_method": "reorder", "weight_format": "real_quantized"},
    }


def _mxfp4(codes: str) -> Callable[[E2m1Numbers], Mapping[str, Tensor]]:
    return lambda made: {codes: made.packed(), "weight_scale": made.powers()}


VARIANTS = {
    "compressed-tensors NVFP4": Variant(
        _compressed("nvfp4-pack-quantized", 16, 4, "tensor_group"), _e2m1(_nvfp4_of_compressed_tensors, 16)
    ),
    "compressed-tensors MXFP4": Variant(_compressed("mxfp4-pack-quantized", 32, 4), _e2m1(_mxfp4("weight_packed"), 32)),
    "compressed-tensors MXFP8": Variant(_compressed("mxfp8-quantized", 32, 8), _mxfp8),
    "modelopt NVFP4": Variant(_modelopt("NVFP4", group_size=16), _e2m1(_nvfp4_of_modelopt, 16)),
    "modelopt NVFP4, old file": Variant(
        {
            "producer": {"name": "modelopt"},
            "quantization": {"quant_algo": "W4A16_NVFP4", "exclude_modules": ["lm_head"]},
        },
        _e2m1(_nvfp4_of_modelopt, 16),
        "hf_quant_config.json",
    ),
    "modelopt NVFP4, by vLLM's name": Variant(
        _modelopt("NVFP4") | {"quant_method": "modelopt_fp4"}, _e2m1(_nvfp4_of_modelopt, 16)
    ),
    "modelopt MXFP4": Variant(_modelopt("MXFP4"), _e2m1(_mxfp4("weight"), 32)),
    "modelopt MXFP8": Variant(_modelopt("MXFP8"), _mxfp8),
    "modelopt FP8": Variant(_modelopt("FP8"), _float8((None, None), shape=lambda scales: scales.view(()).clone())),
    "modelopt FP8 of outputs": Variant(
        _modelopt("FP8_PER_CHANNEL_PER_TOKEN"), _float8((1, None), shape=lambda scales: scales.flatten())
    ),
    "modelopt FP8 of blocks": Variant(
        _modelopt("fp8_pb_wo"), _float8((128, 128), shape=lambda scales: scales[:, None, :, None].contiguous())
    ),
    "auto-round NVFP4": Variant(_auto_round(4, "nv_fp4", 16), _e2m1(_nvfp4_of_compressed_tensors, 16)),
    "auto-round MXFP4": Variant(_auto_round(4, "mx_fp", 32), _e2m1(_mxfp4("weight_packed"), 32)),
    "auto-round MXFP8": Variant(_auto_round(8, "mx_fp8e4m3", 32), _mxfp8),
    "auto-round FP8 of blocks": Variant(
        _auto_round(8, "fp", [32, 48], "fp8"), _float8((32, 48), name="weight_scale_inv")
    ),
    "auto-round FP8 of outputs": Variant(
        _auto_round(8, "fp8", -1, "fp8_static"), _float8((1, None), shape=lambda scales: scales.flatten())
    ),
    "auto-round FP8": Variant(
        _auto_round(8, "fp8", 0, "fp8_static"), _float8((None, None), shape=lambda scales: scales.flatten())
    ),
    "quark FP8": Variant(
        _quark("fp8_e4m3", "per_tensor"), _float8((None, None), shape=lambda scales: scales.view(()).clone())
    ),
    "quark FP8 of outputs": Variant(
        _quark("fp8_e4m3", "per_channel"), _float8((1, None), shape=lambda scales: scales.flatten())
    ),
    "quark FP8 of blocks": Variant(_quark("fp8_e4m3", "per_block", block_size=[32, 48]), _float8((32, 48))),
    "quark MXFP8": Variant(_quark("fp8_e4m3", "per_group", group_size=32, scale_format="e8m0"), _mxfp8),
    "quark MXFP4": Variant(_quark("fp4", "per_group", group_size=32, scale_format="e8m0"), _e2m1(_mxfp4("weight"), 32)),
    "FBGEMM": Variant({"quant_method": "fbgemm_fp8", "activation_scale_ub": 1200.0}, _float8((1, None))),
}
IN_4_BITS = [name for name in VARIANTS if "FP4" in name]


def _save(variant: Variant, directory: Path, packed: Path, *, dense: tuple[str, ...] = ("lm_head",)) -> Path:
    """Writes the model of a directory as a tool does; `directory` gets the weights that its codes mean."""

    def quantized(layer: str, weight: Tensor) -> Stored:
        return None if layer.endswith(dense) else variant.store(layer, weight)

    config = {} if variant.file else {"quantization_config": variant.config}
    save_quantized(directory, packed, quantized, **config)
    if variant.file:
        (packed / variant.file).write_text(json.dumps(variant.config))
    return packed


@pytest.mark.parametrize("kernels", ["torch", "compiled"])
@pytest.mark.parametrize("name", VARIANTS)
def test_a_model_computes_what_its_codes_mean(
    name: str, kernels: str, save_model: Save, reference: Reference, tmp_path: Path
) -> None:
    directory = save_model(LlamaConfig(**WIDE))
    packed = _save(VARIANTS[name], directory, tmp_path / "packed")
    assert Driver(make_runner(packed, kernels)).generate(PROMPTS, 12) == reference(directory, PROMPTS, 12)


@pytest.mark.parametrize("name", ["compressed-tensors NVFP4", "modelopt NVFP4", "quark MXFP4", "modelopt FP8"])
def test_experts_and_layers_that_were_left_dense(
    name: str, save_model: Save, reference: Reference, tmp_path: Path
) -> None:
    sizes = WIDE | {"num_key_value_heads": 2, "moe_intermediate_size": 32}
    config = Qwen3MoeConfig(**sizes, num_experts=4, num_experts_per_tok=2, decoder_sparse_step=1, mlp_only_layers=[])
    directory = save_model(config)
    packed = _save(VARIANTS[name], directory, tmp_path / "packed", dense=("lm_head", "o_proj"))
    for kernels in ("torch", "compiled"):
        assert Driver(make_runner(packed, kernels)).generate(PROMPTS, 8) == reference(directory, PROMPTS, 8)


def _logprobs(directory: Path, kernels: str, **options: Any) -> Tensor:
    driver = Driver(make_runner(directory, kernels, **options))
    driver.generate([PROMPTS[-1]], 1, SamplingParams(logprobs=WIDE["vocab_size"]))
    return torch.tensor([value for _, value in sorted(driver.logprobs[1][0].top)])


@pytest.mark.parametrize("weights", [MatrixFormat.INT8, MatrixFormat.W4A16], ids=str)
@pytest.mark.parametrize("name", IN_4_BITS)
def test_codes_of_4_bits_are_kept_whatever_bits_are_asked(
    name: str, weights: MatrixFormat, save_model: Save, tmp_path: Path
) -> None:
    directory = save_model(LlamaConfig(**WIDE))
    packed = _save(VARIANTS[name], directory, tmp_path / "packed")
    described = describe(read_config(packed))
    assert isinstance(described, ModelDescription)
    dense_head = replace(described, head=replace(described.head, computed=ComputedFormat.MODEL))
    kept = _logprobs(packed, "compiled", weights=weights, description=dense_head)
    torch.testing.assert_close(kept, _logprobs(directory, "torch"), rtol=0, atol=5e-4)


@pytest.mark.parametrize("name", ["compressed-tensors NVFP4", "modelopt MXFP4"])
def test_activations_in_8_bits_leave_the_codes(name: str, save_model: Save, tmp_path: Path) -> None:
    packed = _save(VARIANTS[name], save_model(LlamaConfig(**WIDE)), tmp_path / "packed")
    description = describe(read_config(packed))
    assert isinstance(description, ModelDescription)
    kept = {MatrixFormat.W8A8: MatrixFormat.GROUPED_W8A8, MatrixFormat.W4A16: MatrixFormat.W4A16}
    for asked, found in kept.items():
        kernels = CompiledKernels(compiled.thread_pool(), asked)
        (layer, *_) = load_compiled_model(description, packed, torch.float32, kernels).built.layers
        assert layer.qkv.matrix_format is found
        assert layer.qkv.group == format_group(packed)


def format_group(directory: Path) -> int:
    form = block_form(format_of(directory), "model.layers.0.self_attn.q_proj")
    assert form is not None
    return form.group


@pytest.mark.parametrize("name", ["modelopt NVFP4", "compressed-tensors MXFP4"])
def test_the_triton_kernels_keep_the_same_numbers(name: str, save_model: Save, tmp_path: Path) -> None:
    directory = save_model(LlamaConfig(**WIDE | {"num_hidden_layers": 1}))
    packed = _save(VARIANTS[name], directory, tmp_path / "packed")
    device = "cuda" if torch.cuda.is_available() else "cpu"
    kept = _logprobs(packed, "triton", quantization=Quantization.W4A16, device=device)
    torch.testing.assert_close(kept, _logprobs(directory, "torch"), rtol=0, atol=5e-4)


@pytest.mark.parametrize("name", IN_4_BITS)
def test_a_weight_is_cut_where_its_groups_end(name: str) -> None:
    weight = torch.randn(6, 96, generator=torch.Generator().manual_seed(1))
    tensors, meant = VARIANTS[name].store("layer", weight)
    made = _format(VARIANTS[name]).weight(
        "layer", {name: each for name, each in tensors.items() if "input" not in name}
    )
    assert torch.equal(made.dense().float(), meant)
    assert torch.equal(made.outputs(1, 5).inputs(32, 96).dense().float(), meant[1:5, 32:])
    stored = block_codes(made.outputs(1, 5))
    assert stored is not None
    codes = stored.whole()
    factors = torch.ones(4) if codes.factors is None else codes.factors
    steps = (codes.codes.float() - codes.zero).view(4, -1, codes.group)
    numbers = (steps * codes.scales[..., None]).flatten(1) * factors[:, None]
    torch.testing.assert_close(numbers, meant[1:5], rtol=1e-6, atol=0)
    with pytest.raises(UnsupportedModel, match=r"layer: groups of \d\d inputs cannot be cut into inputs 8 to 32"):
        made.inputs(8, 32)


def _format(variant: Variant) -> Any:
    from worker_svc.model.formats import auto_round, compressed_tensors, fbgemm_fp8, modelopt, quark

    modules: dict[str, Any] = {
        "auto-round": auto_round, "compressed-tensors": compressed_tensors, "fbgemm_fp8": fbgemm_fp8,
        "modelopt": modelopt, "quark": quark,
    }  # fmt: skip
    return modules[variant.config.get("quant_method", "modelopt").removesuffix("_fp4")].FORMAT(variant.config)


def test_layers_of_modelopt_may_differ(save_model: Save, reference: Reference, tmp_path: Path) -> None:
    """Layers that the config does not name are dense, and scales of keys and values are not read."""
    directory = save_model(LlamaConfig(**WIDE))
    layers = {
        layer: "FP8" if "self_attn" in layer else "NVFP4"
        for name in load_file(directory / "model.safetensors")
        if (layer := name.removesuffix(".weight")).endswith("_proj") and not layer.endswith("o_proj")
    }

    def stored(layer: str, weight: Tensor) -> Stored:
        if layer not in layers:
            return None
        tensors, meant = VARIANTS[f"modelopt {layers[layer]}"].store(layer, weight)
        scales = {f"{layer}.{layer[-6]}_scale": torch.ones(())} if layer.endswith(("k_proj", "v_proj")) else {}
        return {**tensors, **scales}, meant

    named = {layer: {"quant_algo": algorithm, "group_size": 16} for layer, algorithm in layers.items()}
    config = _modelopt("MIXED_PRECISION", quantized_layers=named, kv_cache_scheme="FP8")
    packed = save_quantized(directory, tmp_path / "packed", stored, quantization_config=config)
    assert Driver(make_runner(packed)).generate(PROMPTS, 12) == reference(directory, PROMPTS, 12)


@pytest.mark.parametrize("prefix", ["language_model.", ""], ids=["of a model with images", "without its first part"])
def test_layers_that_differ_are_known_by_the_names_that_the_checkpoint_has(
    prefix: str, save_model: Save, reference: Reference, tmp_path: Path
) -> None:
    directory = save_model(LlamaConfig(**WIDE, tie_word_embeddings=True))

    def stored_name(name: str) -> str:
        return f"{prefix}{name}" if prefix else name.removeprefix("model.")

    def stored(layer: str, weight: Tensor) -> Stored:
        return VARIANTS["modelopt NVFP4" if "mlp" in layer else "modelopt FP8"].store(layer, weight)

    packed = save_quantized(directory, tmp_path / "packed", stored)
    tensors = {stored_name(name): tensor for name, tensor in load_file(packed / "model.safetensors").items()}
    save_file(tensors, packed / "model.safetensors")
    layers = [name.removesuffix(".weight") for name in tensors if name.endswith("_proj.weight")]
    named = {layer: {"quant_algo": "NVFP4" if "mlp" in layer else "FP8"} for layer in layers}
    text = json.loads((packed / "config.json").read_text())
    config = text
    if prefix:
        of_images = LlavaConfig(text_config=LlamaConfig(**WIDE))
        config = json.loads(of_images.to_json_string()) | {"architectures": ["LlavaForConditionalGeneration"]}
        config["text_config"] = text
    config["quantization_config"] = _modelopt("MIXED_PRECISION", quantized_layers=named)
    (packed / "config.json").write_text(json.dumps(config))
    assert Driver(make_runner(packed)).generate(PROMPTS, 4) == reference(directory, PROMPTS, 4)
    if prefix:
        description = describe(read_config(packed))
        assert isinstance(description, ModelDescription)
        sizes = read_decoder_sizes(packed, description, torch.bfloat16)
        assert sizes.num_bytes(torch.bfloat16, "w4a16", "compiled") < sizes.num_bytes(
            torch.bfloat16, "int8", "compiled"
        )


def test_layers_of_quark_may_differ(save_model: Save, reference: Reference, tmp_path: Path) -> None:
    directory = save_model(LlamaConfig(**WIDE))

    def stored(layer: str, weight: Tensor) -> Stored:
        if layer == "lm_head":
            return None
        return VARIANTS["quark MXFP4" if "mlp" in layer else "quark FP8"].store(layer, weight)

    of_mlps = VARIANTS["quark MXFP4"].config["global_quant_config"]
    config = {**VARIANTS["quark FP8"].config, "layer_quant_config": {"*.mlp.*": {"weight": [of_mlps["weight"]]}}}
    packed = save_quantized(directory, tmp_path / "packed", stored, quantization_config=config)
    assert Driver(make_runner(packed)).generate(PROMPTS, 12) == reference(directory, PROMPTS, 12)


@pytest.mark.parametrize(
    ("name", "changes", "message"),
    [
        ("modelopt NVFP4", {"quant_algo": "NVFP4_AWQ"}, "quantization_config.quant_algo: must be fp8, fp8_block"),
        ("modelopt NVFP4", {"quant_algo": None}, "quantization_config.quant_algo: must be fp8, fp8_block_scales, "),
        ("modelopt NVFP4", {"group_size": 32}, "quantization_config.group_size: must be 16, not 32"),
        (
            "modelopt FP8",
            {"quant_algo": "MIXED_PRECISION", "quantized_layers": {"a": {"quant_algo": "INT4"}}},
            "quantization_config.quantized_layers.a.quant_algo: must be fp8, ",
        ),
        (
            "compressed-tensors NVFP4",
            {"config_groups": {"g": {"targets": ["Linear"], "weights": {"num_bits": 4, "group_size": 32}}}},
            "quantization_config.config_groups.g.weights.group_size: must be 16, not 32",
        ),
        (
            "compressed-tensors MXFP8",
            {"config_groups": {"g": {"targets": ["Linear"], "weights": {"num_bits": 4, "group_size": 32}}}},
            "quantization_config.config_groups.g.weights.num_bits: must be 8, not 4",
        ),
        ("auto-round MXFP4", {"group_size": 16}, "quantization_config.group_size: must be 32, not 16"),
        ("auto-round MXFP4", {"data_type": "mx_int"}, "quantization_config.data_type: must be fp, mx_fp or nv_fp"),
        ("auto-round FP8", {"fmt": "e5m2"}, "quantization_config.fmt: must be e4m3, not 'e5m2'"),
        ("auto-round MXFP4", {"packing_format": "auto_round:mlx"}, "quantization_config.packing_format: must be auto"),
        ("auto-round FP8 of blocks", {"group_size": [32, 10**25]}, "quantization_config.group_size: must be two posi"),
        (
            "quark FP8",
            {"global_quant_config": {"weight": {"dtype": "fp8_e4m3"}}},
            "weight.qscheme: must be per_block, ",
        ),
        ("quark MXFP4", {"global_quant_config": {"weight": {"qscheme": "per_group"}}}, "weight.dtype: must be fp4 or "),
        (
            "modelopt FP8",
            {"quant_algo": "MIXED_PRECISION", "quantized_layers": {"a": {}}},
            "quantization_config.quantized_layers.a.quant_algo: must be fp8, ",
        ),
        ("auto-round MXFP4", {"rotation_config": {"r1": True}}, "quantization_config.rotation_config: must be null"),
        ("quark FP8", {"algo_config": [{"name": "rotation"}]}, "quantization_config.algo_config: must be without rot"),
        ("quark FP8", {"layer_type_quant_config": {"Linear": {}}}, "quantization_config.layer_type_quant_config: must"),
        (
            "quark FP8",
            {"global_quant_config": {"weight": {"dtype": "int4", "qscheme": "per_group"}}},
            "quantization_config.global_quant_config.weight.dtype: must be fp4 or fp8_e4m3, not 'int4'",
        ),
        (
            "quark FP8",
            {"global_quant_config": {"weight": [{"dtype": "fp4"}, {"dtype": "fp8_e4m3"}]}},
            "quantization_config.global_quant_config.weight: must be one object",
        ),
    ],
)
def test_variants_that_are_not_read_are_named(name: str, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(UnsupportedModel, match=re.escape(message)):
        _format(Variant({**VARIANTS[name].config, **changes}, VARIANTS[name].store))


@pytest.mark.parametrize(
    ("name", "tensor", "changed", "message"),
    [
        ("modelopt NVFP4", "weight", torch.int8, "the tensor layer.weight is int8, not uint8"),
        ("modelopt NVFP4", "weight_scale", torch.float32, "layer.weight_scale is float32, not float8_e4m3fn"),
        ("modelopt NVFP4", "weight_scale_2", torch.int32, "layer.weight_scale_2 is int32, not float16 or "),
        ("modelopt MXFP4", "weight_scale", torch.float32, "layer.weight_scale is float32, not uint8 or float8_e8m0fnu"),
        ("quark FP8", "weight", torch.float8_e5m2, "layer.weight is float8_e5m2, not float8_e4m3fn"),
        ("FBGEMM", "weight_scale", torch.int64, "layer.weight_scale is int64, not float16 or bfloat16 or float32"),
    ],
)
def test_a_tensor_of_another_dtype_is_named(name: str, tensor: str, changed: torch.dtype, message: str) -> None:
    tensors, _ = VARIANTS[name].store("layer", torch.randn(4, 32, generator=torch.Generator().manual_seed(1)))
    whole = f"layer.{tensor}"
    with pytest.raises(UnsupportedModel, match=re.escape(message)):
        _format(VARIANTS[name]).weight("layer", {**tensors, whole: tensors[whole].to(changed)})
