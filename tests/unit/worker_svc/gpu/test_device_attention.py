"""Attention on a GPU is that of the backend that is named, of Quire or of another package."""

import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaConfig

import dense_models
import latent_models
import reference_backend
from distributions import install
from llama_models import SIZES, VOCAB
from runner_driver import Driver, make_runner
from runner_steps import Generate
from transformers_models import VARIANTS
from worker_svc.errors import StartupFailed, UnsupportedModel
from worker_svc.gpu.attention_backends import triton
from worker_svc.gpu.device_attention import (
    AttentionSetup,
    arithmetic_of_backend,
    find_attention_backend,
    make_device_attention,
)
from worker_svc.gpu.inputs import empty_batch
from worker_svc.model_layout import LayerAttention

PROMPTS = [[(7 * place + length) % VOCAB for place in range(length)] for length in (9, 1, 17)]
SOURCE = Path(reference_backend.__file__).read_text()


def _install(monkeypatch: pytest.MonkeyPatch, site: Path, source: str = SOURCE) -> None:
    entry_point = "reference = installed_backend:BACKEND"
    install(monkeypatch, site, "references", "quire.attention_backends", entry_point, source)


def _setup(cache_dtype: torch.dtype) -> AttentionSetup:
    cpu = torch.device("cpu")
    return AttentionSetup(4, 2, 64, 16, torch.float32, cache_dtype, cpu, (LayerAttention(0.125),), 512, 4, 256)


def test_the_default_is_quires_own() -> None:
    assert find_attention_backend("triton") is triton.BACKEND


def test_an_unknown_name_is_refused_with_those_that_there_are() -> None:
    with pytest.raises(StartupFailed, match=r"^QUIRE_ATTENTION_BACKEND is magic; known backends are .*triton"):
        find_attention_backend("magic")


@pytest.mark.parametrize("cuda_graphs", [False] if torch.cuda.is_available() else [False, True])
def test_one_of_another_package_computes_the_attention_of_all_steps(
    cuda_graphs: bool,
    device: torch.device,
    tiny_llama: Path,
    reference: Callable[[Path, list[list[int]], int], list[list[int]]],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    """Prompts in chunks beside decodes, and decodes alone: with graphs these are padded from 3 sequences to 4."""
    _install(monkeypatch, tmp_path / "site")
    runner = make_runner(
        tiny_llama,
        "triton",
        device=device.type,
        max_sequences=4,
        cuda_graphs=cuda_graphs,
        attention_backend="reference",
    )
    assert Driver(runner, chunk=7).generate(PROMPTS, 6) == reference(tiny_llama, PROMPTS, 6)
    assert sys.modules["installed_backend"].num_calls > 0


def test_one_of_another_package_computes_layers_of_different_heads(
    device: torch.device, save_model: Callable[..., Path], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Each of its instances gets the plan that it made."""
    _install(monkeypatch, tmp_path / "site")
    directory = save_model(dense_models.VARIANTS["gemma4-small"]())
    how: dict[str, Any] = {"device": device.type, "max_sequences": 4, "attention_backend": "reference"}
    tokens = Driver(make_runner(directory, "triton", **how), chunk=7).generate(PROMPTS, 4)
    assert tokens == Driver(make_runner(directory)).generate(PROMPTS, 4)
    assert sys.modules["installed_backend"].num_calls > 0


def test_what_it_does_not_support_is_refused_by_its_name(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    _install(monkeypatch, tmp_path / "site")
    with pytest.raises(StartupFailed, match="QUIRE_ATTENTION_BACKEND is reference, which does not support caches in"):
        make_device_attention("reference", _setup(torch.int8), [])


def test_sinks_are_refused_where_a_backend_says_nothing_of_them(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    setup = replace(_setup(torch.float32), layers=(LayerAttention(0.125), LayerAttention(0.125, has_sinks=True)))
    _install(monkeypatch, tmp_path / "site", SOURCE.replace("computes_sinks = True", ""))
    with pytest.raises(StartupFailed, match="is reference, which does not support attention sinks"):
        make_device_attention("reference", setup, [])


def test_a_backend_of_another_package_may_compute_sinks(
    save_model: Callable[..., Path], reference: Generate, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    _install(monkeypatch, tmp_path / "site")
    directory = save_model(VARIANTS["gpt-oss"]())
    runner = make_runner(directory, "triton", max_sequences=4, attention_backend="reference")
    assert Driver(runner, chunk=7).generate(PROMPTS, 3) == reference(directory, PROMPTS, 3)


@pytest.mark.parametrize(
    ("source", "message"),
    [
        (
            "BACKEND = 7",
            "must be an object with the methods library_version, unsupported_reason and make, not of the type int",
        ),
        (SOURCE.replace("return ReferenceAttention(setup, caches)", "open('/gone')"), "failed: FileNotFoundError: .*"),
    ],
    ids=["value", "make"],
)
def test_one_that_fails_is_refused_by_its_package(
    source: str, message: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    _install(monkeypatch, tmp_path / "site", source)
    with pytest.raises(
        StartupFailed, match=f"^quire.attention_backends: reference of the package references {message}"
    ):
        make_device_attention("reference", _setup(torch.float32), [])


def test_steps_with_prompts_run_without_a_graph_where_it_cannot_be_captured(
    tiny_llama: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    _install(monkeypatch, tmp_path / "site")
    with caplog.at_level("INFO", logger="worker_svc.gpu.executor"):
        make_runner(tiny_llama, "triton", max_sequences=2, cuda_graphs=True, attention_backend="reference")
    (message,) = (one.message for one in caplog.records if one.name == "worker_svc.gpu.executor")
    assert message == (
        "only decodes run as CUDA graphs: QUIRE_ATTENTION_BACKEND is reference, which reads contexts on the host"
    )


def test_modules_that_wait_are_what_is_said_of_graphs_whatever_the_backend(
    save_model: Callable[..., Path], monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    _install(monkeypatch, tmp_path / "site")
    rope = {"rope_type": "dynamic", "rope_theta": 500.0, "factor": 2.0}
    directory = save_model(LlamaConfig(**SIZES, rope_parameters=rope))
    with caplog.at_level("INFO", logger="worker_svc.gpu.executor"):
        make_runner(directory, "triton", max_sequences=2, cuda_graphs=True, attention_backend="reference")
    (message,) = (one.message for one in caplog.records if one.name == "worker_svc.gpu.executor")
    assert message.startswith("only sampling runs as CUDA graphs: the modules of transformers wait for the device")


@pytest.mark.parametrize(
    ("line", "what"), [("return [batch.context_lens]", "plan"), ("(contexts,) = inputs.plan", "attend")]
)
def test_an_error_in_a_step_names_it(
    line: str, what: str, tiny_llama: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    _install(monkeypatch, tmp_path / "site", SOURCE.replace(line, "raise KeyError('gone')"))
    runner = make_runner(tiny_llama, "triton", max_sequences=2, attention_backend="reference")
    with pytest.raises(RuntimeError, match=f"^QUIRE_ATTENTION_BACKEND is reference, whose {what} failed: KeyError: "):
        Driver(runner).generate([[1, 2]], 1)


def test_running_out_of_memory_stays_what_it_is(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    source = SOURCE.replace("return [batch.context_lens]", "raise torch.OutOfMemoryError('full')")
    _install(monkeypatch, tmp_path / "site", source)
    attention = make_device_attention("reference", _setup(torch.float32), [object()])  # type: ignore[list-item]
    with pytest.raises(torch.OutOfMemoryError):
        attention.plan(empty_batch(), 0)


def test_the_version_of_its_library_is_part_of_the_arithmetic(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    _install(monkeypatch, tmp_path / "site")
    assert arithmetic_of_backend("triton") == ""
    assert arithmetic_of_backend("reference") == f" reference references 1.0 torch {torch.__version__}"


def test_it_attends_for_modules_of_transformers(
    tiny_llama: Path, reference: Generate, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    _install(monkeypatch, tmp_path / "site")
    runner = make_runner(tiny_llama, "triton", max_sequences=4, attention_backend="reference", native=False)
    assert Driver(runner, chunk=7).generate(PROMPTS, 3) == reference(tiny_llama, PROMPTS, 3)
    assert sys.modules["installed_backend"].num_calls > 0


def test_latent_attention_has_no_other_backend(save_model: Callable[..., Path]) -> None:
    directory = save_model(latent_models.VARIANTS["deepseek-v2"]())
    with pytest.raises(UnsupportedModel, match="do not compute latent attention by QUIRE_ATTENTION_BACKEND reference"):
        make_runner(directory, "triton", attention_backend="reference")
