"""Kernels and formats of weights by the settings, the device and the model; and what is refused, by name."""

from collections.abc import Callable
from ctypes import CDLL
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaConfig

import latent_models
from llama_models import SIZES
from loaded_worker import load_worker
from quire_kernels.cpu.library import BuildFailed, load_library
from runner_driver import Driver
from svc_common.models import cache_root
from svc_common.settings import read_settings
from transformers_models import VARIANTS as OTHERS
from worker_svc import kernel_choice
from worker_svc.attention import AttentionKind
from worker_svc.errors import StartupFailed
from worker_svc.kernel_choice import choose_decoder_dtype, choose_kernels, quantization_of_device
from worker_svc.model import architecture
from worker_svc.model.architecture import Architecture, describe
from worker_svc.model.config import read_config
from worker_svc.model.description import KVFormat, ModelDescription
from worker_svc.model.device_formats import Quantization
from worker_svc.settings import WorkerSettings


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
@pytest.mark.parametrize("args", [("--kernels", "torch"), ("--kernels", "triton"), ("--dtype", "float16")])
def test_deterministic_mode_is_refused_if_it_cannot_be_guaranteed(args: tuple[str, ...], tiny_llama: Path) -> None:
    with pytest.raises(StartupFailed, match="QUIRE_DETERMINISTIC"):
        load_worker(tiny_llama, "--deterministic", "true", *args)


def test_deterministic_mode_is_refused_for_other_architectures(save_model: Callable[..., Path]) -> None:
    message = "QUIRE_DETERMINISTIC cannot be guaranteed: only models that are computed natively"
    with pytest.raises(StartupFailed, match=message):
        load_worker(save_model(OTHERS["phi"]()), "--deterministic", "true")


def test_a_description_beyond_the_kernels_is_left_to_transformers_and_reported(
    save_model: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    directory = save_model(LlamaConfig(**SIZES))
    described = describe(read_config(directory))
    assert described is not None
    layers = [replace(layer, attention=replace(layer.attention, kv_format=KVFormat.INT8)) for layer in described.layers]
    beyond = replace(described, layers=tuple(layers))
    theirs = Architecture(__file__, "LlamaForCausalLM", lambda config: beyond)
    monkeypatch.setattr(architecture._registry, "find", {"llama": theirs}.get)
    monkeypatch.setattr(architecture._registry, "origin", {"llama": "theirs 1.0"}.get)
    reported: list[str] = []
    assert load_worker(directory, "--num-blocks", "5", report=reported.append).description.limits.num_blocks == 5
    assert any(
        line.startswith("transformers' modules compute") and line.endswith("for each layer") for line in reported
    )
    with pytest.raises(StartupFailed, match="QUIRE_DETERMINISTIC cannot be guaranteed"):
        load_worker(directory, "--deterministic", "true")
    with pytest.raises(StartupFailed, match=r"no models with .* for each layer support QUIRE_QUANTIZATION"):
        load_worker(directory, "--quantization", "int8")


def test_compiled_kernels_are_kept_in_the_directory_of_the_settings(
    tiny_llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept = cache_root() / "kernels"
    directories: list[Path] = []

    def load_kernels(directory: Path, report: Callable[[str], None]) -> CDLL:
        directories.append(directory)
        return load_library(kept, report)  # which compiles them at most once for all tests

    monkeypatch.setattr("worker_svc.kernel_choice.load_library", load_kernels)
    # Models are often on a read-only volume.
    monkeypatch.setenv("QUIRE_CACHE_DIR", str(tmp_path / "models"))
    load_worker(tiny_llama, "--kernels", "compiled", "--kernel-cache-dir", str(tmp_path / "kernels"))
    load_worker(tiny_llama, "--kernels", "compiled", "--kernel-cache-dir", "")
    assert directories == [tmp_path / "kernels", tmp_path / "models" / "kernels"]


def test_what_is_quantized_is_a_part_of_the_models_identity(tiny_llama: Path) -> None:
    identities = {
        name: load_worker(tiny_llama, "--quantization", name, "--num-blocks", "5").description.fingerprint
        for name in ("none", "int8", "w8a16", "w8a8", "w4a16", "w4a8")
    }
    assert identities["w8a16"] == identities["int8"]
    assert len(set(identities.values())) == 5
    with pytest.raises(StartupFailed, match="w8a8, which torch's operators do not compute"):
        load_worker(tiny_llama, "--quantization", "w8a8", "--kernels", "torch")


def test_latent_attention_is_compiled(save_model: Callable[..., Path]) -> None:
    directory, reports = save_model(latent_models.VARIANTS["deepseek-v2-lite"]()), list[str]()
    for args in ((), ("--kernels", "compiled"), ("--quantization", "int8"), ("--kernels", "torch")):
        loaded = load_worker(directory, "--dtype", "float32", *args, report=reports.append)
        # One vector of 24 + 8 numbers for each of 16 tokens in 3 layers
        assert loaded.description.block_bytes == 3 * 16 * 32 * 4
    assert not any("torch computes the model" in report for report in reports)
    load_worker(directory, "--deterministic", "1")


def test_latent_vectors_that_the_compiled_kernels_do_not_support_are_computed_by_torch(
    save_model: Callable[..., Path],
) -> None:
    directory, reports = save_model(latent_models.with_rank(20)), list[str]()
    load_worker(directory, "--dtype", "float32", report=reports.append)
    expected = "slower than the compiled kernels: a head's dimensions must be a multiple of 16"
    assert any(expected in report for report in reports)
    with pytest.raises(StartupFailed, match="compiled kernels cannot be used: a head's dimensions"):
        load_worker(directory, "--quantization", "int8")


GPU = torch.device("cuda", 0)


def _choose(directory: Path, *args: str, device: torch.device = GPU) -> object:
    settings = read_settings(WorkerSettings, ["--model", str(directory), *args])
    description = describe(read_config(directory))
    assert description is None or isinstance(description, ModelDescription)
    return choose_kernels(settings, description, torch.bfloat16, device, print)


@pytest.mark.parametrize("quantization", ["none", *Quantization])
def test_a_gpu_computes_weights_in_8_and_4_bits(
    quantization: str, tiny_llama: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (8, 9))
    assert _choose(tiny_llama, "--quantization", quantization) is AttentionKind.TRITON
    expected = None if quantization == "none" else Quantization(quantization)
    assert quantization_of_device(quantization) is expected


@pytest.mark.parametrize(
    ("model", "args", "message"),
    [
        ("llama", ("--quantization", "w4a8"), "w4a8, which is for CPUs: on a GPU it may be none, int8, w8a8, w4a16 or"),
        ("llama", ("--quantization", "fp8"), "QUIRE_QUANTIZATION is fp8, which this GPU does not support: use int8 or"),
        ("phi", ("--quantization", "int8"), "on a GPU only models that are computed natively support QUIRE_QUANTIZATI"),
        ("llama", ("--quantization", "int8", "--kernels", "compiled"), "QUIRE_KERNELS is compiled, which is for CPUs"),
    ],
)
def test_what_a_gpu_does_not_quantize_is_refused(
    model: str, args: tuple[str, ...], message: str, save_model: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (8, 0))
    directory = save_model(LlamaConfig(**SIZES) if model == "llama" else OTHERS[model]())
    with pytest.raises(StartupFailed, match=message):
        _choose(directory, *args)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_fp8_is_refused_on_a_cpu(tiny_llama: Path) -> None:
    with pytest.raises(StartupFailed, match="fp8, which is for a GPU: on a CPU it may be none, int8, w8a8"):
        load_worker(tiny_llama, "--quantization", "fp8")


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_a_worker_of_a_gpu_serves_quantized_weights(tiny_llama: Path) -> None:
    """By Triton's interpreter."""
    identities = set()
    for quantization in ("none", Quantization.W8A8, Quantization.W4A16):
        loaded = load_worker(
            tiny_llama, "--kernels", "triton", "--dtype", "float32", "--num-blocks", "8", "--max-step-tokens", "32",
            "--max-sequences", "2", "--quantization", quantization,
        )  # fmt: skip
        identities.add(loaded.description.fingerprint)
        assert len(Driver(loaded.runner).generate([[1] * 20], 1)[0]) == 1
    assert len(identities) == 3


@pytest.mark.parametrize(
    ("expands", "settings", "described", "expected"),
    [
        (True, {}, True, torch.bfloat16),
        (False, {}, True, torch.float32),
        (True, {}, False, torch.float32),
        (True, {"kernels": "torch"}, True, torch.float32),
        (True, {"block_size": 12}, True, torch.float32),
        (True, {"dtype": "float32"}, True, torch.float32),
    ],
)
def test_decoders_are_in_bfloat16_where_compiled_kernels_expand_it(
    expands: bool,
    settings: dict[str, Any],
    described: bool,
    expected: torch.dtype,
    tiny_llama: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Others, which torch's operators compute, are in float32 on a CPU that does not multiply bfloat16."""
    monkeypatch.setattr(kernel_choice, "has_bfloat16", lambda: False)
    monkeypatch.setattr(kernel_choice, "expands_bfloat16", lambda: expands)
    description = describe(read_config(tiny_llama)) if described else None
    chosen = WorkerSettings(model=str(tiny_llama), **settings)
    assert choose_decoder_dtype(chosen, description, torch.device("cpu")) is expected


def test_what_is_not_compiled_after_all_is_in_float32(tiny_llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Models that the compiled kernels do not support, and all where they cannot be compiled."""
    monkeypatch.setattr(kernel_choice, "has_bfloat16", lambda: False)
    monkeypatch.setattr(kernel_choice, "expands_bfloat16", lambda: True)
    described = describe(read_config(tiny_llama))
    assert described is not None
    layers = [replace(layer, attention=replace(layer.attention, kv_format=KVFormat.INT8)) for layer in described.layers]
    beyond = replace(described, layers=tuple(layers))
    settings = read_settings(WorkerSettings, ["--model", str(tiny_llama)])
    assert choose_decoder_dtype(settings, beyond, torch.device("cpu")) is torch.float32
    assert load_worker(tiny_llama, "--num-blocks", "5").description.dtype == "bfloat16"

    def fail(*_: object) -> None:
        raise BuildFailed("no compiler")

    monkeypatch.setattr(kernel_choice, "load_library", fail)
    assert load_worker(tiny_llama, "--num-blocks", "5").description.dtype == "float32"
