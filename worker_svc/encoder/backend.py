"""Which kernels compute the values of prompts: Triton's on a GPU, compiled ones on a CPU, torch's operators where those
cannot."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Literal, TypeAlias

import torch

from quire_kernels.cpu.amx import arithmetic_of
from quire_kernels.cpu.library import BuildFailed
from quire_kernels.cpu.thread_pool import ThreadPool
from worker_svc.encoder.runner import EncoderForward
from worker_svc.errors import StartupFailed
from worker_svc.fingerprint import triton_arithmetic
from worker_svc.kernel_choice import MATRIX_FORMATS, check_quantization, quantization_of_device, start_thread_pool
from worker_svc.model import compiled_encoder, compiled_states, decoder_states
from worker_svc.model.architecture import AnyDescription, is_decoder
from worker_svc.model.compiled_encoder import load_compiled_encoder
from worker_svc.model.compiled_states import load_compiled_states
from worker_svc.model.decoder_states import load_decoder_states
from worker_svc.model.description import ModelDescription
from worker_svc.model.encoder_description import EncoderDescription
from worker_svc.model.torch_encoder import load_torch_encoder
from worker_svc.settings import WorkerSettings

# QUIRE_KERNELS of models that compute values, by the device.
KERNELS = {"cpu": ("auto", "compiled", "torch"), "cuda": ("auto", "triton", "torch")}

EncoderKernels: TypeAlias = Literal["triton", "compiled", "torch"]
Report: TypeAlias = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class EncoderBackend:
    """A loaded encoder, or decoder that serves as one."""

    forward: EncoderForward
    arithmetic: str
    """What bits depend on beside weights and dtype."""
    is_batch_invariant: bool = False
    """Whether a prompt's bits do not depend on the other prompts of its call."""
    prompt_bytes: Callable[[int], int] | None = None
    """Of a decoder: about how much memory a prompt of so many tokens takes, beside the weights."""


def own_kernels(device: torch.device) -> EncoderKernels:
    """The kernels that are made for a device, faster than torch's operators."""
    return "triton" if device.type == "cuda" else "compiled"


def choose_kernels(
    settings: WorkerSettings, description: AnyDescription, dtype: torch.dtype, device: torch.device
) -> tuple[EncoderKernels, str | None]:
    """The fastest kernels that the settings allow and that support a model. Where these are torch's operators though
    the device has kernels of its own for such models and the settings allow them, the second value says why.
    """
    if settings.kernels == "torch":
        return "torch", None
    if device.type == "cuda":
        refused = _refused_by_triton(description)
        return ("triton", None) if refused is None else ("torch", refused)
    if isinstance(description, ModelDescription):
        refused = compiled_states.unsupported_reason(description, dtype)
    else:
        refused = compiled_encoder.unsupported_reason(description, dtype)
    return ("compiled", None) if refused is None else ("torch", refused)


def _refused_by_triton(description: AnyDescription) -> str | None:
    # Triton is imported only when it is used.
    if isinstance(description, ModelDescription):
        from worker_svc.model.triton_body import refused_part

        return refused_part(description)
    from worker_svc.model.triton_encoder import unsupported_reason

    return unsupported_reason(description)


def quantization_of_values(settings: WorkerSettings, description: AnyDescription, device: torch.device) -> str:
    """The QUIRE_QUANTIZATION of a model: decoders take it, whatever they compute, and encoders on a CPU. On a GPU
    encoders stay in their dtype.
    """
    return settings.quantization if is_decoder(description) or device.type == "cpu" else "none"


def check_quantized(
    settings: WorkerSettings, description: AnyDescription, dtype: torch.dtype, device: torch.device
) -> None:
    """Raises StartupFailed where a model's weights cannot be computed in the format of the settings."""
    if quantization_of_values(settings, description, device) == "none":
        return
    chosen = settings.kernels if settings.kernels in KERNELS[device.type] else "auto"
    decoder = description if isinstance(description, ModelDescription) else None
    check_quantization(settings.model_copy(update={"kernels": chosen}), decoder, device)
    _, refused = choose_kernels(settings, description, dtype, device)
    if refused is not None:
        raise _refused_format(settings.quantization, device, refused)


def _refused_format(quantization: str, device: torch.device, refused: str) -> StartupFailed:
    setting = f"QUIRE_QUANTIZATION is {quantization}"
    return StartupFailed(f"{setting}, for which the {own_kernels(device)} kernels cannot be used: {refused}")


def load_backend(
    settings: WorkerSettings,
    description: AnyDescription,
    directory: Path,
    dtype: torch.dtype,
    device: torch.device,
    report: Report,
) -> EncoderBackend:
    """Loads the model of a directory by the kernels that `choose_kernels` names.

    Raises UnsupportedModel if its tensors do not match, and StartupFailed if the kernels of the settings cannot be
    used, or do not compute the format of its weights.
    """
    check_quantized(settings, description, dtype, device)
    kernels, refused = choose_kernels(settings, description, dtype, device)
    if kernels == "triton":
        return _load_triton(settings, description, directory, dtype, device)
    if kernels == "compiled":
        try:
            pool = start_thread_pool(settings, report)
        except BuildFailed as error:
            refused = str(error)
            if (quantization := quantization_of_values(settings, description, device)) != "none":
                raise _refused_format(quantization, device, refused) from error
        else:
            return _load_compiled(settings, description, directory, dtype, pool)
    if refused is not None:
        own = own_kernels(device)
        if settings.kernels == own:
            raise StartupFailed(f"the {own} kernels cannot be used: {refused}")
        report(f"torch computes the model, slower than the {own} kernels: {refused}")
    if isinstance(description, EncoderDescription):
        return EncoderBackend(load_torch_encoder(description, directory, dtype, device), torch_arithmetic(device))
    states = load_decoder_states(description, directory, dtype, device)
    estimate = partial(decoder_states.prompt_bytes, description, dtype=dtype)
    return EncoderBackend(states, torch_arithmetic(device), prompt_bytes=estimate)


def _load_compiled(
    settings: WorkerSettings, description: AnyDescription, directory: Path, dtype: torch.dtype, pool: ThreadPool
) -> EncoderBackend:
    arithmetic, weights = _arithmetic_on_cpu(arithmetic_of(pool)), MATRIX_FORMATS[settings.quantization]
    if isinstance(description, EncoderDescription):
        encoder = load_compiled_encoder(description, directory, dtype, pool, weights)
        return EncoderBackend(encoder, arithmetic, is_batch_invariant=True)
    states = load_compiled_states(description, directory, dtype, pool, weights)
    estimate = partial(compiled_states.prompt_bytes, description, dtype=dtype)
    return EncoderBackend(states, arithmetic, is_batch_invariant=True, prompt_bytes=estimate)


def _load_triton(
    settings: WorkerSettings,
    description: AnyDescription,
    directory: Path,
    dtype: torch.dtype,
    device: torch.device,
) -> EncoderBackend:
    is_deterministic = settings.deterministic
    if isinstance(description, EncoderDescription):
        from worker_svc.model.triton_encoder import load_triton_encoder

        encoder = load_triton_encoder(description, directory, dtype, device, deterministic=is_deterministic)
        return EncoderBackend(encoder, triton_arithmetic(device), is_batch_invariant=is_deterministic)
    from worker_svc.model import triton_states

    quantization = quantization_of_device(settings.quantization)
    states = triton_states.load_triton_states(
        description, directory, dtype, device, deterministic=is_deterministic, quantization=quantization
    )
    estimate = partial(triton_states.prompt_bytes, description, dtype=dtype)
    return EncoderBackend(states, triton_arithmetic(device), is_deterministic, estimate)


def torch_arithmetic(device: torch.device) -> str:
    """What bits of torch's operators depend on."""
    if device.type == "cuda":
        return f"{torch.__version__} {torch.cuda.get_device_name(device)}"
    return _arithmetic_on_cpu(f"{torch.get_num_threads()} threads")


def _arithmetic_on_cpu(how: str) -> str:
    return f"{torch.__version__} {how} {torch.backends.cpu.get_cpu_capability()}"
