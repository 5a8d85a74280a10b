"""Which kernels compute an encoder, by device and settings."""

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import BertConfig, LlamaConfig

import llama_models
import worker_svc.encoder.backend
from bert_models import hidden_states, random_prompts, save_bert
from described_models import description_of
from quire_kernels.cpu.library import BuildFailed
from svc_common.settings import read_settings
from worker_svc.encoder.backend import EncoderBackend, choose_kernels, load_backend, torch_arithmetic
from worker_svc.errors import StartupFailed
from worker_svc.model import triton_encoder, triton_states
from worker_svc.model.architecture import describe_any
from worker_svc.model.description import ModelDescription
from worker_svc.model.encoder_description import EncoderDescription
from worker_svc.settings import WorkerSettings

CPU, GPU = torch.device("cpu"), torch.device("cuda")
HERE = GPU if torch.cuda.is_available() else CPU


def settings_of(*args: str) -> WorkerSettings:
    return read_settings(WorkerSettings, list(args))


@pytest.mark.parametrize(
    ("device", "setting", "num_heads", "expected"),
    [
        (GPU, "auto", 4, "triton"),
        (GPU, "triton", 4, "triton"),
        (GPU, "compiled", 4, "triton"),  # which has no effect
        (GPU, "torch", 4, "torch"),
        (CPU, "auto", 3, "compiled"),
        (CPU, "compiled", 3, "compiled"),
        (CPU, "triton", 3, "compiled"),
        (CPU, "auto", 4, "torch"),  # heads of 12 dimensions
        (CPU, "torch", 3, "torch"),
    ],
)
def test_the_devices_own_kernels_unless_the_settings_say_otherwise(
    device: torch.device, setting: str, num_heads: int, expected: str
) -> None:
    config = BertConfig(hidden_size=48, num_attention_heads=num_heads, architectures=["BertModel"])
    description = describe_any(config)
    assert isinstance(description, EncoderDescription)
    kernels, refused = choose_kernels(settings_of("--kernels", setting), description, torch.float32, device)
    assert kernels == expected
    assert (refused is None) == (expected != "torch" or setting == "torch")


@pytest.fixture
def on_gpu(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Loads the encoder of a directory as on a GPU; the kernels are interpreted."""
    load = triton_encoder.load_triton_encoder

    def load_here(description: EncoderDescription, directory: Path, dtype: torch.dtype, _: Any, **options: Any) -> Any:
        return load(description, directory, dtype, HERE, **options)

    monkeypatch.setattr(triton_encoder, "load_triton_encoder", load_here)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "a GPU")

    def load_on_gpu(directory: Path, *args: str) -> EncoderBackend:
        description = description_of(directory, EncoderDescription)
        return load_backend(settings_of(*args), description, directory, torch.float32, GPU, print)

    return load_on_gpu


def test_triton_kernels_compute_an_encoder_on_a_gpu(on_gpu: Any, tmp_path: Path) -> None:
    model = save_bert(tmp_path, num_hidden_layers=1)
    (prompt,) = random_prompts([17])
    backend = on_gpu(tmp_path)
    torch.testing.assert_close(backend.forward([prompt])[0].cpu(), hidden_states(model, prompt), rtol=1e-3, atol=1e-3)
    assert not backend.is_batch_invariant
    assert "a GPU" in backend.arithmetic
    assert on_gpu(tmp_path, "--deterministic", "true").is_batch_invariant


@pytest.mark.parametrize(
    ("device", "setting", "head_dim", "expected"),
    [
        (GPU, "auto", 16, ("triton", None)),
        (GPU, "torch", 16, ("torch", None)),
        (GPU, "auto", 528, ("torch", "attention of heads of 528 dimensions: the most is 512")),
        (CPU, "auto", 16, ("compiled", None)),
        (CPU, "compiled", 16, ("compiled", None)),
        (CPU, "torch", 16, ("torch", None)),
    ],
)
def test_kernels_of_a_decoder_that_embeds(
    device: torch.device, setting: str, head_dim: int, expected: tuple[str, str | None]
) -> None:
    description = describe_any(LlamaConfig(**llama_models.SIZES | {"head_dim": head_dim}))
    assert isinstance(description, ModelDescription)
    assert choose_kernels(settings_of("--kernels", setting), description, torch.float32, device) == expected


def test_a_decoder_that_the_kernels_of_the_settings_do_not_compute_is_refused(tmp_path: Path) -> None:
    llama_models.save_model(tmp_path, LlamaConfig(**llama_models.SIZES | {"head_dim": 528}))
    description, settings = description_of(tmp_path, ModelDescription), settings_of("--kernels", "triton")
    with pytest.raises(StartupFailed, match="the triton kernels cannot be used: attention of heads of 528 dimensions"):
        load_backend(settings, description, tmp_path, torch.float32, GPU, print)


@torch.inference_mode()
def test_compiled_kernels_compute_a_decoder_that_embeds(tmp_path: Path) -> None:
    llama_models.save_model(tmp_path, llama_models.VARIANTS["qwen3"]())
    (prompt,) = llama_models.prompts(17)
    description = description_of(tmp_path, ModelDescription)
    backend = load_backend(settings_of(), description, tmp_path, torch.float32, CPU, print)
    expected = llama_models.hidden_states(tmp_path, prompt)
    torch.testing.assert_close(backend.forward([prompt])[0], expected, rtol=1e-4, atol=1e-4)
    assert backend.is_batch_invariant
    assert backend.prompt_bytes is not None
    llama_models.save_model(tmp_path / "heads", LlamaConfig(**llama_models.SIZES | {"head_dim": 12}))
    description, settings = description_of(tmp_path / "heads", ModelDescription), settings_of("--kernels", "compiled")
    with pytest.raises(StartupFailed, match=r"the compiled kernels cannot be used: .*12"):
        load_backend(settings, description, tmp_path / "heads", torch.float32, CPU, print)


# By QUIRE_QUANTIZATION: how near the last state of a random model is to that of its own weights, as a cosine.
NEAR = {"int8": 0.999, "w8a8": 0.999, "w4a16": 0.85, "w4a8": 0.85}


def assert_near(found: torch.Tensor, expected: torch.Tensor, least: float) -> None:
    cosine = float(torch.cosine_similarity(found[-1].cpu().float(), expected[-1], dim=0))
    assert least < cosine < 1 - 1e-9
    assert not torch.allclose(found.cpu(), expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("quantization", NEAR)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@torch.inference_mode()
def test_a_decoder_that_embeds_has_its_weights_in_fewer_bits(
    quantization: str, dtype: torch.dtype, tmp_path: Path
) -> None:
    llama_models.save_model(tmp_path, llama_models.VARIANTS["qwen3"]())
    description, prompts = description_of(tmp_path, ModelDescription), llama_models.prompts(17, 3, 40)
    settings = settings_of("--quantization", quantization)
    backend = load_backend(settings, description, tmp_path, dtype, CPU, print)
    alone = [backend.forward([prompt])[0] for prompt in prompts]
    assert all(map(torch.equal, backend.forward(prompts), alone))
    last = backend.forward(prompts, None, [len(prompt) - 1 for prompt in prompts])
    assert all(torch.equal(one[0], states[-1]) for one, states in zip(last, alone, strict=True))
    for prompt, states in zip(prompts, alone, strict=True):
        assert_near(states, llama_models.hidden_states(tmp_path, prompt), NEAR[quantization])


def test_an_encoder_has_its_weights_in_fewer_bits_on_a_cpu(on_gpu: Any, tmp_path: Path) -> None:
    model = save_bert(tmp_path, num_attention_heads=3, num_hidden_layers=1)
    description, (prompt,) = description_of(tmp_path, EncoderDescription), random_prompts([17])
    settings, expected = settings_of("--quantization", "w8a8"), hidden_states(model, prompt)
    states = load_backend(settings, description, tmp_path, torch.float32, CPU, print).forward([prompt])[0]
    assert_near(states, expected, NEAR["w8a8"])
    in_its_dtype = on_gpu(tmp_path, "--quantization", "w8a8").forward([prompt])[0]
    torch.testing.assert_close(in_its_dtype.cpu(), expected, rtol=1e-3, atol=1e-3)
    for args, text in (
        (("--quantization", "w8a8", "--kernels", "torch"), "QUIRE_KERNELS is torch"),
        (("--quantization", "fp8"), "QUIRE_QUANTIZATION is fp8, which is for a GPU"),
    ):
        with pytest.raises(StartupFailed, match=text):
            load_backend(settings_of(*args), description, tmp_path, torch.float32, CPU, print)


@pytest.mark.parametrize(
    ("args", "head_dim", "device", "text"),
    [
        (("--quantization", "int8", "--kernels", "torch"), 16, CPU, "QUIRE_KERNELS is torch"),
        (("--quantization", "fp8"), 16, CPU, "QUIRE_QUANTIZATION is fp8, which is for a GPU"),
        (("--quantization", "w4a8"), 16, GPU, "QUIRE_QUANTIZATION is w4a8, which is for CPUs"),
        (("--quantization", "w8a8"), 12, CPU, "for which the compiled kernels cannot be used: .*12"),
        (("--quantization", "int8"), 528, GPU, "for which the triton kernels cannot be used: .*528"),
    ],
)
def test_a_format_that_the_kernels_do_not_compute_is_refused(
    args: tuple[str, ...], head_dim: int, device: torch.device, text: str, tmp_path: Path
) -> None:
    llama_models.save_model(tmp_path, LlamaConfig(**llama_models.SIZES | {"head_dim": head_dim}))
    description = description_of(tmp_path, ModelDescription)
    with pytest.raises(StartupFailed, match=text):
        load_backend(settings_of(*args), description, tmp_path, torch.float32, device, print)


def test_weights_in_fewer_bits_need_the_compiled_code(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def no_compiler(*_: object) -> None:
        raise BuildFailed("no C++ compiler is found")

    monkeypatch.setattr(worker_svc.encoder.backend, "start_thread_pool", no_compiler)
    llama_models.save_model(tmp_path, llama_models.VARIANTS["qwen3"]())
    description, settings = description_of(tmp_path, ModelDescription), settings_of("--quantization", "int8")
    with pytest.raises(StartupFailed, match=r"QUIRE_QUANTIZATION is int8, .* cannot be used: no C\+\+ compiler"):
        load_backend(settings, description, tmp_path, torch.float32, CPU, print)
    assert load_backend(settings_of(), description, tmp_path, torch.float32, CPU, print).prompt_bytes is not None


@pytest.fixture
def states_on_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Decoders that embed on a GPU; the kernels are interpreted."""
    load = triton_states.load_triton_states

    def load_here(description: ModelDescription, directory: Path, dtype: torch.dtype, _: Any, **options: Any) -> Any:
        return load(description, directory, dtype, HERE, **options)

    monkeypatch.setattr(triton_states, "load_triton_states", load_here)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "a GPU")


@pytest.mark.usefixtures("states_on_gpu")
@pytest.mark.parametrize("quantization", ["int8", "w8a8", "w4a16"])
@torch.inference_mode()
def test_a_decoder_that_embeds_on_a_gpu_has_its_weights_in_fewer_bits(quantization: str, tmp_path: Path) -> None:
    llama_models.save_model(tmp_path, llama_models.VARIANTS["qwen3"]())
    (prompt,) = llama_models.prompts(17)
    description, settings = description_of(tmp_path, ModelDescription), settings_of("--quantization", quantization)
    backend = load_backend(settings, description, tmp_path, torch.float32, GPU, print)
    assert_near(backend.forward([prompt])[0], llama_models.hidden_states(tmp_path, prompt), NEAR[quantization])


@pytest.mark.usefixtures("states_on_gpu")
@torch.inference_mode()
def test_triton_kernels_compute_a_decoder_that_embeds_on_a_gpu(tmp_path: Path) -> None:
    llama_models.save_model(tmp_path, llama_models.VARIANTS["qwen3"]())
    (prompt,) = llama_models.prompts(17)
    description = description_of(tmp_path, ModelDescription)
    backend = load_backend(settings_of("--deterministic", "true"), description, tmp_path, torch.float32, GPU, print)
    expected = llama_models.hidden_states(tmp_path, prompt)
    torch.testing.assert_close(backend.forward([prompt])[0].cpu(), expected, rtol=1e-3, atol=3e-4)
    assert backend.is_batch_invariant
    assert "a GPU" in backend.arithmetic


def test_bits_of_torchs_operators_depend_on_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "a GPU")
    assert torch_arithmetic(GPU) == f"{torch.__version__} a GPU"
    assert f"{torch.get_num_threads()} threads" in torch_arithmetic(CPU)


def test_what_the_kernels_of_the_settings_lack_is_said(on_gpu: Any, tmp_path: Path) -> None:
    save_bert(tmp_path, hidden_size=264, num_attention_heads=1, num_hidden_layers=1)
    with pytest.raises(StartupFailed, match="the triton kernels cannot be used: attention of heads of 264 dimensions"):
        on_gpu(tmp_path, "--kernels", "triton")
