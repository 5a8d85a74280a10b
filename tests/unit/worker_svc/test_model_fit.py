"""A model that does not fit is refused before it is loaded, with what would fit."""

import json
import re
import shutil
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from math import prod
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import LlamaConfig, OlmoeConfig

import compiled
from llama_models import SIZES
from quantized_models import in_order, quantize, save_quantized
from quire_kernels.cpu.experts import PackedExperts
from quire_kernels.weight_only_matrix import GroupScales, WeightOnlyMatrix, pack_codes
from svc_common.settings import read_settings
from tiny_gguf import TOKENS, TinyGguf, write_tiny_gguf
from worker_svc import model_fit, weight_sizes
from worker_svc.attention import CompiledKernels
from worker_svc.cache import CacheShape
from worker_svc.errors import UnsupportedModel
from worker_svc.kernel_choice import MATRIX_FORMATS
from worker_svc.load import load_model
from worker_svc.memory import OutOfMemory
from worker_svc.model import compiled_builder
from worker_svc.model.architecture import describe
from worker_svc.model.attention_description import KVFormat
from worker_svc.model.compiled_model import load_compiled_model
from worker_svc.model.config import read_config
from worker_svc.model.description import ModelDescription
from worker_svc.model.device_formats import Quantization
from worker_svc.model.weight_format import CodeForm, WeightFormat, format_of
from worker_svc.model_fit import check_fits
from worker_svc.prepare import convert_gguf
from worker_svc.settings import WorkerSettings
from worker_svc.weight_sizes import DecoderSizes, read_decoder_sizes, read_header_sizes

CPU = torch.device("cpu")


@pytest.fixture
def fits(tiny_llama: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Checks the model, or that of a directory, with so many free bytes and some settings."""
    monkeypatch.setattr(model_fit, "has_bfloat16", lambda: True)

    def check(
        free: float,
        *args: str,
        dtype: torch.dtype = torch.float32,
        cache_dtype: torch.dtype | None = None,
        changed: ModelDescription | None = None,
        directory: Path = tiny_llama,
    ) -> None:
        monkeypatch.setattr(model_fit, "_free", lambda *_: (int(free), "the container (cgroup v2)"))
        settings = read_settings(WorkerSettings, ["--model", str(directory), *args])
        described = changed or described_in(directory)
        kernels = settings.kernels if settings.kernels != "auto" else "compiled"
        sizes = read_decoder_sizes(directory, described, dtype)
        check_fits(settings, sizes, kernels, described, CPU, dtype, cache_dtype)

    return check


@pytest.mark.parametrize(
    ("difference", "kernels", "does_fit"),
    [(0, "torch", True), (0, "compiled", False), (1, "torch", False)],
    ids=["a copy", "compiled kernels have it twice", "another head"],
)
def test_a_stored_copy_of_the_embedding_takes_no_memory(
    fits: Callable[..., None], tiny_llama: Path, tmp_path: Path, difference: int, kernels: str, *, does_fit: bool
) -> None:
    model = Path(shutil.copytree(tiny_llama, tmp_path / "model"))
    tensors = load_file(model / "model.safetensors")
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"] + difference
    save_file(tensors, model / "model.safetensors")
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps(config | {"tie_word_embeddings": True}))
    stored = 4 * sum(tensor.numel() for tensor in tensors.values())  # with both, and without keys and values
    with nullcontext() if does_fit else pytest.raises(OutOfMemory):
        fits(stored, "--kernels", kernels, "--num-blocks", "1", "--block-size", "8", directory=model)


def described_in(directory: Path) -> ModelDescription:
    found = describe(read_config(directory))
    assert isinstance(found, ModelDescription)
    return found


def weights_of(directory: Path, quantization: str = "none", kernels: str = "compiled") -> int:
    """Bytes in float32."""
    sizes = read_decoder_sizes(directory, described_in(directory), torch.float32)
    return sizes.num_bytes(torch.float32, quantization, kernels)


def test_without_a_description_the_sizes_are_those_of_the_tensors(tmp_path: Path) -> None:
    tensors = {
        "embeddings.word_embeddings.weight": torch.zeros(10, 8, dtype=torch.bfloat16),
        "layers.0.mlp.up_proj.weight": torch.zeros(6, 8),
        "layers.1.mlp.experts.down_proj": torch.zeros(2, 8, 6),
        "norm.weight": torch.zeros(8),
        "layers.0.mlp.down_proj.qweight": torch.zeros(4, 4, dtype=torch.int32),
    }
    save_file(tensors, tmp_path / "model.safetensors")
    sizes = read_header_sizes(tmp_path)
    assert (sizes.matrices, sizes.others, sizes.packed_bytes) == (144, 88, 64)
    assert sizes.num_weights == 144 + 88
    assert sizes.num_bytes(torch.float32, "none", "torch") == 4 * (144 + 88) + 64
    assert sizes.num_bytes(torch.bfloat16, "w8a8", "compiled") == 144 + 2 * 88 + 64
    assert sizes.num_bytes(torch.bfloat16, "w4a16", "compiled") == 144 // 8 * 5 + 2 * 88 + 64


def test_tensors_that_are_not_used_do_not_count(tiny_llama: Path, tmp_path: Path) -> None:
    model = Path(shutil.copytree(tiny_llama, tmp_path / "model"))
    tensors = load_file(model / "model.safetensors")
    tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.zeros(2**20)
    save_file(tensors, model / "model.safetensors")
    assert weights_of(model) == weights_of(tiny_llama)


@pytest.mark.parametrize("tied", [True, False], ids=["tied", "head of its own"])
def test_blocks_are_counted_as_they_are_computed(tmp_path: Path, *, tied: bool) -> None:
    """Dense in the worker's dtype, or with their own codes; the embedding is dense in any case."""

    def stored(name: str) -> str:
        return "Q4_0" if name.startswith("blk") else "Q8_0"

    gguf = write_tiny_gguf(tmp_path / "tiny.gguf", TinyGguf(stored=stored, tied=tied))
    convert_gguf(gguf, tmp_path, print)
    embedding, layers, norms = 64 * len(TOKENS), 2 * (64 * (64 + 32 + 32 + 64) + 3 * 64 * 96), 5 * 64
    sizes = read_decoder_sizes(tmp_path, described_in(tmp_path), torch.bfloat16)
    of_both = embedding * (1 if tied else 2)
    assert sizes.num_weights == of_both + layers + norms
    assert sizes.num_bytes(torch.bfloat16, "none", "torch") == 2 * (of_both + layers + norms)
    held = layers * 5 // 8 + embedding * 17 // 16
    assert sizes.num_bytes(torch.bfloat16, "w4a8", "compiled") == 2 * (embedding + norms) + held
    # Of outputs with 64 and 96 inputs: a block of words, and four bytes for each group
    in_words = 2 * ((2 * 64 + 2 * 32 + 2 * 96) * (128 + 2 * 4) + 64 * (128 + 3 * 4))
    assert sizes.num_bytes(torch.bfloat16, "w4a16", "triton") == 2 * (of_both + norms) + in_words
    without_head = read_decoder_sizes(tmp_path, described_in(tmp_path), torch.bfloat16, has_head=False)
    assert without_head.num_bytes(torch.bfloat16, "w4a16", "compiled") == 2 * (embedding + norms) + layers * 5 // 8


@pytest.mark.parametrize(("bits", "group"), [(4, 32), (8, 32)])
def test_packed_weights_are_counted_as_they_are_unpacked(
    bits: int, group: int, save_model: Callable[..., Path], tmp_path: Path
) -> None:
    directory = save_model(LlamaConfig(**WIDE))

    def stored(layer: str, weight: Tensor) -> tuple[dict[str, Tensor], Tensor] | None:
        codes = quantize(weight, bits, in_order(weight.shape[1], group), sym=True)
        return None if layer == "lm_head" else (codes.gptq(layer), codes.dense())

    config = {"quant_method": "gptq", "bits": bits, "group_size": group}
    packed = save_quantized(directory, tmp_path / "packed", stored, quantization_config=config)
    assert weights_of(packed) == weights_of(directory)


def test_files_that_cannot_be_read_are_named(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedModel, match=r"index\.json cannot be read: .*No such file"):
        read_header_sizes(tmp_path)
    for text, message in (
        ("[]", "must be an object"),
        ("[" * 100_000, "cannot be read: maximum recursion depth"),
        ('{"weight_map": ["model.safetensors"]}', "has no weight_map"),
    ):
        (tmp_path / "model.safetensors.index.json").write_text(text)
        with pytest.raises(UnsupportedModel, match=rf"model\.safetensors\.index\.json {message}"):
            read_header_sizes(tmp_path)
    names: list[object] = [None, 1, [], "", "..", "/etc/passwd", "model-00001-of-00001.safetensors"]
    for name in names:
        (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"model.norm.weight": name}}))
        with pytest.raises(UnsupportedModel, match=re.escape(f"has no weights file {name}")):
            read_header_sizes(tmp_path)
    (tmp_path / "model.safetensors").write_bytes(b"no header")
    with pytest.raises(UnsupportedModel, match=r"model\.safetensors is damaged or not complete: .*header"):
        read_header_sizes(tmp_path)


def test_a_model_that_fits_is_not_refused(fits: Callable[..., None], tiny_llama: Path) -> None:
    fits(weights_of(tiny_llama) + 4 * 2**20)


@pytest.mark.parametrize(
    ("share", "args", "expected"),
    [
        (0.9, [], ["QUIRE_DTYPE=bfloat16", "million weights in float32", "for the keys and values of 16 tokens"]),
        (0.9, [], ["QUIRE_QUANTIZATION=int8 ("]),
        (0.0, [], ["What would fit: a model of at most 0 million parameters"]),
        (0.9, ["--quantization", "none", "--kernels", "torch"], ["QUIRE_DTYPE=bfloat16"]),
    ],
)
def test_the_line_says_what_is_needed_what_there_is_and_what_would_fit(
    share: float, args: list[str], expected: list[str], fits: Callable[..., None], tiny_llama: Path
) -> None:
    with pytest.raises(OutOfMemory) as refused:
        fits(share * weights_of(tiny_llama), "--num-blocks", "1", *args)
    text = str(refused.value)
    assert "\n" not in text
    assert "the container (cgroup v2) has" in text
    for part in expected:
        assert part in text, text
    if "torch" in args:
        assert "int8" not in text


@pytest.mark.parametrize(
    ("share", "args", "least"),
    [
        (0.9, ["--num-blocks", "1"], 2),
        (0.45, ["--num-blocks", "1"], 1),
        (0.9, ["--num-blocks", "1", "--quantization", "int8"], 1),
        (2.2, ["--num-blocks", "1000"], 3),
        (1.2, ["--num-blocks", "1000"], 2),
        (2.2, ["--max-model-len", "16000"], 3),
    ],
)
def test_the_model_fits_with_each_way_that_the_refusal_names(
    share: float, args: list[str], least: int, fits: Callable[..., None], tiny_llama: Path
) -> None:
    free = share * weights_of(tiny_llama)
    quantization = "int8" if "int8" in args else "none"
    free *= weights_of(tiny_llama, quantization) / weights_of(tiny_llama)
    with pytest.raises(OutOfMemory) as refused:
        fits(free, *args)
    ways = str(refused.value).partition("What would fit: ")[2].split("; ")
    named = [dict(re.findall(r"QUIRE_(\w+)=(\w+)", way)) for way in ways[:-1]]
    assert len(named) >= least
    assert all(named)
    for settings in named:
        dtype = getattr(torch, settings.pop("DTYPE", "float32"))
        flags = [f"--{name.lower().replace('_', '-')}={value}" for name, value in settings.items()]
        fits(free, *args, *flags, dtype=dtype)


@pytest.mark.parametrize(
    ("quantization", "smaller"), [("int8", "w4a16"), ("w8a8", "w4a16"), ("fp8", "w4a16"), ("w4a16", None)]
)
def test_weights_in_8_bits_may_have_4_on_a_gpu(
    quantization: str, smaller: str | None, gpu: Callable[..., None], save_model: Callable[..., Path]
) -> None:
    """Of layers that fill blocks of words."""
    directory = save_model(LlamaConfig(**WIDE | {"hidden_size": 256, "num_attention_heads": 4}))
    free = 0.99 * weights_of(directory, quantization, "triton")
    with pytest.raises(OutOfMemory) as refused:
        gpu(free, "--num-blocks", "1", "--quantization", quantization, dtype=torch.float32, directory=directory)
    assert (f"QUIRE_QUANTIZATION={smaller} (" in str(refused.value)) == (smaller is not None)


@pytest.mark.parametrize(("quantization", "smaller"), [("int8", "w4a16"), ("w8a8", "w4a8"), ("w4a16", None)])
def test_weights_in_8_bits_may_have_4(
    quantization: str, smaller: str | None, fits: Callable[..., None], tiny_llama: Path
) -> None:
    free = 0.99 * weights_of(tiny_llama, quantization)
    with pytest.raises(OutOfMemory) as refused:
        fits(free, "--num-blocks", "1", "--quantization", quantization)
    assert (f"QUIRE_QUANTIZATION={smaller} (" in str(refused.value)) == (smaller is not None)
    assert "QUIRE_QUANTIZATION=int8" not in str(refused.value)


def test_a_smaller_cache_or_a_shorter_context_is_named_where_it_is_enough(
    fits: Callable[..., None], tiny_llama: Path
) -> None:
    description = describe(read_config(tiny_llama))
    assert description is not None
    kv = CacheShape.of(description.layout, 16, torch.float32).block_bytes
    free = weights_of(tiny_llama) + 20 * kv
    with pytest.raises(OutOfMemory, match=r"What would fit: QUIRE_NUM_BLOCKS=20 \("):
        fits(free, "--num-blocks", "1000")
    fits(free, "--num-blocks", "20")
    with pytest.raises(OutOfMemory, match=r"320|bfloat16"):
        fits(free, "--max-model-len", "100000")


def test_weights_in_8_bits_are_named_only_where_the_compiled_kernels_compute_the_model(
    fits: Callable[..., None], tiny_llama: Path
) -> None:
    description = describe(read_config(tiny_llama))
    assert isinstance(description, ModelDescription)
    first, *others = description.layers
    attention = replace(first.attention, kv_format=KVFormat.INT8)
    unsupported = replace(description, layers=(replace(first, attention=attention), *others))
    with pytest.raises(OutOfMemory) as refused:
        fits(0.9 * weights_of(tiny_llama), "--num-blocks", "1", changed=unsupported)
    assert "QUIRE_DTYPE=bfloat16" in str(refused.value)
    assert "QUIRE_QUANTIZATION" not in str(refused.value)


def test_keys_and_values_in_8_bits_are_counted_as_such_on_a_processor(
    fits: Callable[..., None], tiny_llama: Path
) -> None:
    description = describe(read_config(tiny_llama))
    assert description is not None
    free = weights_of(tiny_llama) + 16 * CacheShape.of(description.layout, 16, torch.int8).block_bytes
    blocks, in_8_bits = ("--num-blocks", "16"), {"cache_dtype": torch.int8}
    with pytest.raises(OutOfMemory, match=r"QUIRE_KV_CACHE_DTYPE=int8 \("):
        fits(free, *blocks)
    fits(free, *blocks, "--kv-cache-dtype", "int8", **in_8_bits)
    with pytest.raises(OutOfMemory) as refused:
        fits(free - 1, *blocks, "--kv-cache-dtype", "int8", **in_8_bits)
    assert "QUIRE_KV_CACHE_DTYPE" not in str(refused.value)


def test_keys_and_values_in_8_bits_are_named_only_where_kernels_compute_them(
    fits: Callable[..., None], tiny_llama: Path
) -> None:
    """The compiled kernels do not support blocks of 24 tokens."""
    free = 1.01 * weights_of(tiny_llama)
    for args in (("--block-size", "24"), ("--kernels", "torch")):
        with pytest.raises(OutOfMemory) as refused:
            fits(free, "--num-blocks", "1000", *args)
        assert "QUIRE_KV_CACHE_DTYPE" not in str(refused.value)


WIDE: dict[str, Any] = {
    **{name: size for name, size in SIZES.items() if name != "head_dim"},
    "vocab_size": 128,
    "hidden_size": 192,
    "intermediate_size": 256,
    "num_attention_heads": 3,
    "num_key_value_heads": 1,
}


@pytest.mark.parametrize("quantization", ["none", "int8", "w8a8", "w4a16", "w4a8"])
@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("family", ["llama", "llama, tied", "olmoe"])
def test_codes_of_a_checkpoint_are_counted_as_they_are_kept(
    family: str, bits: int, quantization: str, save_model: Callable[..., Path], tmp_path: Path
) -> None:
    """4 bits where 8 are asked, and 8 where 4 are asked; but experts as it is asked."""
    if family == "olmoe":
        directory = save_model(OlmoeConfig(**WIDE, num_experts=4, num_experts_per_tok=2))
    else:
        directory = save_model(LlamaConfig(**WIDE, tie_word_embeddings="tied" in family))

    def stored(layer: str, weight: Tensor) -> tuple[dict[str, Tensor], Tensor] | None:
        if layer == "lm_head":
            return None
        codes = quantize(weight, bits, in_order(weight.shape[1], 32), sym=True)
        return codes.gptq(layer), codes.dense()

    config = {"quant_method": "gptq", "bits": bits, "group_size": 32}
    packed = save_quantized(directory, tmp_path / "packed", stored, quantization_config=config)
    _assert_counted(packed, quantization, rel=0.05)  # the router has 4 outputs of 32


@pytest.mark.parametrize("tied", [True, False], ids=["tied", "head of its own"])
@pytest.mark.parametrize("quantization", ["none", "int8", "w4a16", "w4a8"])
@pytest.mark.parametrize("kind", ["Q4_0", "MXFP4"])
def test_blocks_are_counted_as_they_are_kept(kind: str, quantization: str, tmp_path: Path, *, tied: bool) -> None:
    """Codes of e2m1 have 8 bits where products take codes."""

    def stored(name: str) -> str:
        return kind if name.startswith("blk") else "Q8_0"

    convert_gguf(write_tiny_gguf(tmp_path / "tiny.gguf", TinyGguf(stored=stored, tied=tied)), tmp_path, print)
    _assert_counted(tmp_path, quantization, rel=0.05)


@pytest.mark.parametrize("has_bounds", [True, False])
def test_bounds_of_logits_are_counted(
    save_model: Callable[..., Path], monkeypatch: pytest.MonkeyPatch, *, has_bounds: bool
) -> None:
    monkeypatch.setattr(compiled_builder, "multiplies_bytes", lambda: has_bounds)
    _assert_counted(save_model(LlamaConfig(**WIDE)), "none", rel=0.05)


def _assert_counted(directory: Path, quantization: str, rel: float) -> None:
    """Compares the estimate with the matrices that the compiled kernels have, and with the embedding."""
    description = describe(read_config(directory))
    assert isinstance(description, ModelDescription)
    kernels = CompiledKernels(compiled.thread_pool(), MATRIX_FORMATS[quantization])
    built = load_compiled_model(description, directory, torch.float32, kernels).built
    matrices = [built.head.matrix]
    if built.head.bounds is not None:
        matrices.append(built.head.bounds.codes)
    for layer in built.layers:
        matrices += [layer.qkv, layer.output]
        if isinstance(layer.mlp, PackedExperts):
            matrices += [layer.mlp.router, *layer.mlp.gate_up, *layer.mlp.down]
        else:
            matrices += [layer.mlp.gate_up, layer.mlp.down]
    held = built.embedding.nbytes + sum(matrix.panels.nbytes for matrix in matrices)
    sizes = read_decoder_sizes(directory, description, torch.float32)
    counted = sizes.num_bytes(torch.float32, quantization, "compiled")
    assert counted == pytest.approx(held, rel=rel)


def test_a_gpu_keeps_codes_of_4_bits_with_int8_alone(save_model: Callable[..., Path], tmp_path: Path) -> None:
    directory = save_model(LlamaConfig(**WIDE | {"hidden_size": 256, "num_attention_heads": 4}))
    description = describe(read_config(directory))
    assert isinstance(description, ModelDescription)
    numbers = {
        name: sum(layer.inputs * sum(layer.outputs) for layer in layers)
        for name, layers in {
            "layers": [each for each in description.linear_layers if each is not description.head],
            "head": [description.head],
        }.items()
    }
    in_dtype = 4 * (numbers["head"] + sum(map(prod, description.shapes.values())))
    gptq = {bits: format_of_gptq(bits, tmp_path / str(bits)) for bits in (4, 8)}

    def of_layers(bits: int, quantization: str) -> float:
        counted = DecoderSizes(description, gptq[bits], ()).num_bytes(torch.float32, quantization, "triton")
        return (counted - in_dtype) / numbers["layers"]

    assert [of_layers(4, each) for each in ("int8", "w4a16", "w8a8", "fp8")] == [0.625, 0.625, 1, 1]
    assert {of_layers(8, each) for each in Quantization} == {1.125}


@pytest.mark.parametrize(("bits", "group", "inputs"), [(4, 32, 2880), (4, 16, 1408), (8, 32, 896), (4, 32, 256)])
def test_codes_on_a_gpu_fill_whole_blocks_of_words(bits: int, group: int, inputs: int) -> None:
    scales = GroupScales(torch.ones(inputs // group, 8).half(), torch.ones(8))
    words = pack_codes(torch.zeros(8, inputs, dtype=torch.uint8 if bits == 4 else torch.int8), bits)
    matrix = WeightOnlyMatrix.in_groups(words, bits, inputs, group, scales)
    assert matrix.pairs is not None
    held = (matrix.words.nbytes + matrix.pairs.nbytes) / (8 * inputs)
    assert weight_sizes._held(CodeForm(bits, group), inputs, "triton") == held


def format_of_gptq(bits: int, directory: Path) -> WeightFormat:
    directory.mkdir()
    config = {"quantization_config": {"quant_method": "gptq", "bits": bits, "group_size": 32}}
    (directory / "config.json").write_text(json.dumps(config))
    return format_of(directory)


@pytest.fixture
def gpu(tiny_llama: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Checks the model on a GPU that has so many free bytes, with 16 blocks and some settings."""

    def check(
        free: float,
        *args: str,
        dtype: torch.dtype,
        cache_dtype: torch.dtype | None = None,
        directory: Path = tiny_llama,
    ) -> None:
        monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: (int(free), 80 * 2**30))
        settings = read_settings(WorkerSettings, ["--model", str(directory), "--num-blocks", "16", *args])
        description = described_in(directory)
        sizes = read_decoder_sizes(directory, description, dtype)
        check_fits(settings, sizes, "triton", description, torch.device("cuda"), dtype, cache_dtype)

    return check


def test_weights_larger_than_a_gpu_are_refused_with_what_would_fit(gpu: Callable[..., None], tiny_llama: Path) -> None:
    with pytest.raises(OutOfMemory, match=r"the GPU has 0\.00 GiB free\. .* fit: QUIRE_DTYPE=bfloat16") as refused:
        gpu(0.9 * weights_of(tiny_llama), "--num-blocks", "1", dtype=torch.float32)
    assert "QUIRE_QUANTIZATION=int8 (" in str(refused.value)
    gpu(0.9 * weights_of(tiny_llama), "--num-blocks", "1", "--quantization", "int8", dtype=torch.float32)
    with pytest.raises(OutOfMemory, match="What would fit: a model of at most 0 million parameters"):
        gpu(100, dtype=torch.bfloat16)


def test_the_share_of_a_gpus_memory_is_the_limit(
    tiny_llama: Path, gpu: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    gpu(2**30, dtype=torch.float32)
    with pytest.raises(OutOfMemory, match="the GPU"):
        gpu(2**30, "--memory-fraction", "0.000001", dtype=torch.float32)


def test_keys_and_values_in_8_bits_are_counted_as_such(gpu: Callable[..., None], tiny_llama: Path) -> None:
    description = describe(read_config(tiny_llama))
    assert description is not None
    kv = CacheShape.of(description.layout, 16, torch.int8).block_bytes
    free = weights_of(tiny_llama, kernels="triton") + 16 * kv
    with pytest.raises(OutOfMemory, match="QUIRE_KV_CACHE_DTYPE=int8"):
        gpu(free, dtype=torch.float32)
    gpu(free, "--kv-cache-dtype", "int8", dtype=torch.float32, cache_dtype=torch.int8)
    with pytest.raises(OutOfMemory) as refused:
        gpu(free - 1, "--kv-cache-dtype", "int8", dtype=torch.float32, cache_dtype=torch.int8)
    assert "QUIRE_KV_CACHE_DTYPE" not in str(refused.value)


def test_a_worker_refuses_to_start_before_it_loads(tiny_llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With the real limit of the settings."""
    from worker_svc import instance

    def load(*_: Any, **__: Any) -> None:
        raise AssertionError("the weights were loaded")

    monkeypatch.setattr(instance, "load", load)
    args = ["--model", str(tiny_llama), "--memory-limit", "0.000001", "--device", "cpu"]
    with pytest.raises(OutOfMemory, match="the model does not fit into memory"):
        load_model(read_settings(WorkerSettings, args), print)
