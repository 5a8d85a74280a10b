"""The worker's checks of `quire doctor`: processor, device, kernels, drafter and directories."""

from pathlib import Path
from typing import Any

import pytest
import torch

import llama_models
from bert_models import save_bert
from svc_common.doctor.findings import CheckContext, Finding, Status
from worker_svc import doctor
from worker_svc.memory_checks import estimate_memory
from worker_svc.model_checks import read_model
from worker_svc.settings import WorkerSettings

no_gpu = pytest.mark.skipif(torch.cuda.is_available(), reason="is about a machine without a GPU")


def found(name: str, **settings: Any) -> Finding:
    """The one finding of a check."""
    (check,) = (each for each in doctor.GROUP.checks if each.name == name)
    (finding,) = check.find(CheckContext(WorkerSettings(**settings)))
    return finding


def test_a_processor_without_vector_instructions(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cpuinfo = tmp_path / "cpuinfo"
    cpuinfo.write_text("processor\t: 0\nflags\t\t: sse4_2 avx2 fma avx512f\n")
    assert doctor.processor_flags(cpuinfo) == {"sse4_2", "avx2", "fma", "avx512f"}
    monkeypatch.setattr(doctor, "processor_flags", lambda: {"sse4_2"})
    assert found("processor").status is Status.WARNING
    monkeypatch.setattr(doctor, "processor_flags", lambda: {"avx512f"})
    assert found("processor").status is Status.OK


@no_gpu
def test_a_gpu_that_is_not_there() -> None:
    finding = found("device", device="cuda")
    assert (finding.status, finding.problem) == (Status.WRONG, "QUIRE_DEVICE is cuda, but torch finds no GPU")
    assert found("device", device="cpu").status is Status.OK


@no_gpu
def test_a_driver_that_torch_does_not_use(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "version").touch()
    monkeypatch.setattr(doctor, "_NVIDIA_DRIVER", tmp_path / "version")
    finding = found("device")
    assert (finding.status, "torch-cuda.txt" in finding.next_step) == (Status.WARNING, True)


@no_gpu
@pytest.mark.parametrize(
    ("settings", "status"),
    [({}, Status.WARNING), ({"kernels": "compiled"}, Status.WRONG), ({"deterministic": True}, Status.WRONG)],
    ids=["auto", "compiled", "deterministic"],
)
def test_no_compiler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, settings: dict[str, Any], status: Status) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CXX", raising=False)
    finding = found("kernels", **settings)
    assert (finding.status, "apt-get install g++" in finding.next_step) == (status, True)
    assert found("kernels", kernels="torch").status is Status.OK


@no_gpu
def test_kernels_of_another_device(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    finding = found("kernels", kernels="triton")
    assert (finding.status, "the device is a CPU" in finding.problem) == (Status.WRONG, True)
    monkeypatch.setattr("worker_svc.kernel_choice.choose_device", lambda _: torch.device("cuda"))
    for kernels in ("torch", "compiled"):
        finding = found("kernels", kernels=kernels)
        assert (finding.status, "the device is a GPU" in finding.problem) == (Status.WRONG, True)
    # torch computes the values of encoders on any device.
    save_bert(tmp_path)
    assert found("kernels", kernels="torch", model=str(tmp_path)).status is Status.OK


def test_an_encoder_needs_no_compiler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save_bert(tmp_path)
    monkeypatch.setenv("PATH", "")
    monkeypatch.delenv("CXX", raising=False)
    assert found("kernels", model=str(tmp_path), deterministic=True).status is Status.OK


@no_gpu
def test_torch_stands_in_for_the_compiled_code_of_an_encoder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save_bert(tmp_path, num_attention_heads=3)
    monkeypatch.setenv("PATH", "")
    monkeypatch.delenv("CXX", raising=False)
    assert found("kernels", model=str(tmp_path), deterministic=True).status is Status.WARNING
    assert found("kernels", model=str(tmp_path), kernels="compiled").status is Status.WRONG


@no_gpu
def test_weights_in_fewer_bits_of_a_model_that_embeds_need_the_compiled_code(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save_bert(tmp_path / "encoder", num_attention_heads=3)
    llama_models.save_model(tmp_path / "decoder", llama_models.VARIANTS["qwen3"]())
    monkeypatch.setenv("PATH", "")
    monkeypatch.delenv("CXX", raising=False)
    settings = {"task": "embed", "quantization": "int8"}
    assert found("kernels", model=str(tmp_path / "encoder")).status is Status.WARNING
    for model in ("encoder", "decoder"):
        assert found("kernels", model=str(tmp_path / model), **settings).status is Status.WRONG
    finding = found("model", model=str(tmp_path / "decoder"), task="embed", quantization="int8", kernels="torch")
    assert (finding.status, "QUIRE_KERNELS is torch" in finding.problem) == (Status.WRONG, True)
    finding = found("kernels", model=str(tmp_path / "decoder"), task="embed", quantization="int8", kernels="torch")
    assert (finding.status, "unset QUIRE_QUANTIZATION" in finding.next_step) == (Status.WRONG, True)


@no_gpu
def test_memory_is_that_of_the_weights_as_they_are_computed(tmp_path: Path) -> None:
    def weights(model: str, **settings: Any) -> int:
        given = WorkerSettings(model=str(tmp_path / model), **settings)
        return estimate_memory(given, read_model(given), torch.device("cpu"), 1).weights

    save_bert(tmp_path / "encoder", num_attention_heads=3)
    llama_models.save_model(tmp_path / "decoder", llama_models.VARIANTS["qwen3"]())
    for model in ("encoder", "decoder"):
        assert weights(model, task="embed", quantization="int8") < weights(model, task="embed")


@no_gpu
def test_kernels_of_gpus_have_no_effect_on_an_encoder_on_a_processor(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save_bert(tmp_path, num_attention_heads=3)
    monkeypatch.setenv("PATH", "")
    monkeypatch.delenv("CXX", raising=False)
    finding = found("kernels", model=str(tmp_path), kernels="triton")
    assert (finding.status, "apt-get install g++" in finding.next_step) == (Status.WARNING, True)


@no_gpu
def test_a_compiler_that_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", "false")
    assert "the C++ compiler false failed" in found("kernels", kernel_cache_dir=tmp_path).found


@no_gpu
def test_a_cache_of_kernels_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    finding = found("kernels", kernel_cache_dir=tmp_path / "file" / "kernels")
    assert (finding.status, "QUIRE_KERNEL_CACHE_DIR" in finding.next_step) == (Status.WARNING, True)


@no_gpu
def test_the_sources_are_parsed_and_nothing_is_written(tmp_path: Path) -> None:
    assert found("kernels", kernel_cache_dir=tmp_path / "kernels").found.endswith("compiled at the first start")
    assert list(tmp_path.iterdir()) == []


@no_gpu
def test_keys_and_values_in_8_bits_that_the_compiled_kernels_refuse(tiny_llama: Path) -> None:
    assert found("memory", model=str(tiny_llama), kv_cache_dtype="int8").status is Status.OK
    finding = found("memory", model=str(tiny_llama), kv_cache_dtype="int8", block_size=24)
    assert (finding.status, "QUIRE_KV_CACHE_DTYPE is int8" in finding.problem) == (Status.WRONG, True)


def test_a_drafter_that_is_not_installed() -> None:
    assert found("drafter").status is Status.OK
    assert found("drafter", drafter="ngram").status is Status.OK
    assert "known drafters are" in found("drafter", drafter="dice").problem


def test_a_directory_of_profiles(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    assert found("profiles", profile_dir=tmp_path).status is Status.OK
    assert found("profiles", profile_dir=tmp_path / "file" / "below").status is Status.WARNING
