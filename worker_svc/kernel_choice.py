"""What computes a model: the device, the dtype, the kernels, the formats of weights and of the KV cache.

Settings name them, or what the machine and the model allow.
"""

import os
from collections.abc import Callable, Iterable

import torch

from quire_kernels.cpu.amx import arithmetic_of
from quire_kernels.cpu.attention import check_compiled_support
from quire_kernels.cpu.library import BuildFailed, load_library
from quire_kernels.cpu.linear import MatrixFormat
from quire_kernels.cpu.thread_pool import ThreadPool
from svc_common.models import cache_root
from worker_svc.attention import AttentionKind, CompiledKernels, Kernels
from worker_svc.errors import StartupFailed
from worker_svc.fingerprint import triton_arithmetic
from worker_svc.gpu.device_attention import arithmetic_of_backend
from worker_svc.host import expands_bfloat16, has_bfloat16
from worker_svc.model.compiled_body import COMPUTED as COMPILED
from worker_svc.model.description import ModelDescription
from worker_svc.model.device_formats import COMPUTED as COMPUTED_ON_DEVICE
from worker_svc.model.device_formats import Quantization
from worker_svc.model.loading import unsupported_natively
from worker_svc.model.support import unsupported_reason
from worker_svc.settings import WorkerSettings

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
MATRIX_FORMATS = {
    "none": MatrixFormat.PLAIN,
    "int8": MatrixFormat.INT8,
    "w8a8": MatrixFormat.W8A8,
    "w4a16": MatrixFormat.W4A16,
    "w4a8": MatrixFormat.W4A8,
}
_CACHE_DTYPES = {"fp8": torch.float8_e4m3fn, "int8": torch.int8}
# Compute capability of the first GPUs with float8_e4m3fn: Ada Lovelace.
_FP8_CAPABILITY = (8, 9)


class DeviceNotFound(StartupFailed):
    """The device that the settings name does not exist. The text is for the operator."""


def choose_device(choice: str) -> torch.device:
    has_gpu = torch.cuda.is_available()
    if choice == "cuda" and not has_gpu:
        raise DeviceNotFound("QUIRE_DEVICE is cuda, but torch finds no GPU")
    return torch.device("cuda", 0) if has_gpu and choice != "cpu" else torch.device("cpu")


def choose_dtype(choice: str, device: torch.device) -> torch.dtype:
    """The dtype that the settings name, or the fastest one of the device by any kernels."""
    if choice != "auto":
        return _DTYPES[choice]
    if device.type == "cuda":
        return torch.bfloat16 if torch.cuda.is_bf16_supported() else torch.float16
    return torch.bfloat16 if has_bfloat16() else torch.float32


def choose_decoder_dtype(
    settings: WorkerSettings, model_description: ModelDescription | None, device: torch.device
) -> torch.dtype:
    """As `choose_dtype`; on a CPU by the kernels that compute a decoder, of this description if it has one."""
    dtype = choose_dtype(settings.dtype, device)
    if settings.dtype != "auto" or device.type != "cpu" or not expands_bfloat16():
        return dtype
    # Weights and KV of half the size are read in half the time. torch's operators are slower in bfloat16 there.
    is_compiled = (
        settings.kernels in ("auto", "compiled")
        and model_description is not None
        and unsupported_reason(model_description, COMPILED) is None
        and check_compiled_support(model_description.layout.head_dims, settings.block_size, torch.bfloat16) is None
    )
    return torch.bfloat16 if is_compiled else dtype


def start_thread_pool(settings: WorkerSettings, report: Callable[[str], None]) -> ThreadPool:
    """The threads of the compiled kernels, as many as torch has. Raises BuildFailed."""
    directory = (settings.kernel_cache_dir or cache_root() / "kernels").expanduser()
    return ThreadPool(load_library(directory, report), torch.get_num_threads())


def check_kernels_of_device(choice: str, device: torch.device) -> None:
    """Raises DeviceNotFound where QUIRE_KERNELS names kernels that do not generate tokens on the device."""
    on_gpu = device.type == "cuda"
    if on_gpu and choice in ("torch", "compiled"):
        raise DeviceNotFound(f"QUIRE_KERNELS is {choice}, which is for CPUs, but the device is a GPU")
    if choice == "triton" and not on_gpu and os.environ.get("TRITON_INTERPRET") != "1":
        raise DeviceNotFound("QUIRE_KERNELS is triton, which is for GPUs, but the device is a CPU")


def choose_kernels(
    settings: WorkerSettings,
    model_description: ModelDescription | None,
    dtype: torch.dtype,
    device: torch.device,
    report: Callable[[str], None],
) -> Kernels:
    """The kernels of the settings, or the fastest ones of the device."""
    check_kernels_of_device(settings.kernels, device)
    check_quantization(settings, model_description, device)
    kind, refused = _choose_before_compiling(settings, model_description, dtype, device)
    if kind is None:
        try:
            return CompiledKernels(start_thread_pool(settings, report), MATRIX_FORMATS[settings.quantization])
        except BuildFailed as error:
            refused = str(error)
            _require_torch_allowed(settings, refused)
    elif refused is None:
        return kind
    report(f"torch computes the model, slower than the compiled kernels: {refused}")
    return AttentionKind.TORCH


def expected_kernels(
    settings: WorkerSettings, model_description: ModelDescription | None, dtype: torch.dtype, device: torch.device
) -> str:
    """The `kernel_name` of what `choose_kernels` chooses where kernels can be compiled. Raises StartupFailed."""
    kind, _ = _choose_before_compiling(settings, model_description, dtype, device)
    return "compiled" if kind is None else kind.value


def _choose_before_compiling(
    settings: WorkerSettings, model_description: ModelDescription | None, dtype: torch.dtype, device: torch.device
) -> tuple[AttentionKind | None, str | None]:
    """What computes a model, None: kernels that are compiled first; and why torch does, where these were wanted.

    Raises StartupFailed if settings need what is refused.
    """
    if device.type == "cuda" or settings.kernels == "triton":
        return AttentionKind.TRITON, None
    if settings.kernels == "torch":
        return AttentionKind.TORCH, None
    refused = _refused_by_compiled(settings, model_description, dtype)
    if refused is None:
        return None, None
    _require_torch_allowed(settings, refused)
    return AttentionKind.TORCH, refused


def _refused_by_compiled(
    settings: WorkerSettings, model_description: ModelDescription | None, dtype: torch.dtype
) -> str | None:
    """Why the compiled kernels do not compute a model, as far as this is known before it is loaded; None: they do."""
    reason = None if model_description is None else unsupported_reason(model_description, COMPILED)
    if model_description is not None and reason is None:
        return check_compiled_support(model_description.layout.head_dims, settings.block_size, dtype)
    # Of other models they compute the attention if they support its shape: see `check_attention_shape`.
    return _not_quantized(reason) if settings.quantization != "none" else None


def _require_torch_allowed(settings: WorkerSettings, refused: str) -> None:
    """Raises StartupFailed if settings need the compiled kernels, which cannot be used."""
    if settings.kernels == "compiled" or settings.quantization != "none":
        raise StartupFailed(f"the compiled kernels cannot be used: {refused}")


def check_attention_shape(settings: WorkerSettings, head_dims: Iterable[int], dtype: torch.dtype) -> str | None:
    """Why the compiled kernels do not compute the attention of a model that transformers' modules compute, so that
    torch does; None: they do. Raises StartupFailed if settings need them.
    """
    refused = check_compiled_support(head_dims, settings.block_size, dtype)
    if refused is not None and settings.kv_cache_dtype != "auto":
        raise StartupFailed(
            f"QUIRE_KV_CACHE_DTYPE is {settings.kv_cache_dtype}, for which the compiled kernels cannot be used: "
            f"{refused}. It must be auto"
        )
    if refused is not None:
        _require_torch_allowed(settings, refused)
    return refused


def quantization_of_device(name: str) -> Quantization | None:
    """What the Triton kernels compute of a value of QUIRE_QUANTIZATION; None: weights are in the model's dtype."""
    return None if name == "none" else Quantization(name)


def check_quantization(
    settings: WorkerSettings, model_description: ModelDescription | None, device: torch.device
) -> None:
    """Raises StartupFailed, which says why, if the kernels of the settings compute no weights in these formats, or the
    Triton kernels not those of a model.
    """
    quantization = settings.quantization
    if quantization == "none":
        return
    setting = f"QUIRE_QUANTIZATION is {quantization}"
    if settings.kernels == "torch":
        raise StartupFailed(f"{setting}, which torch's operators do not compute, but QUIRE_KERNELS is torch")
    if device.type == "cpu" and settings.kernels != "triton":
        if quantization not in MATRIX_FORMATS:
            raise StartupFailed(f"{setting}, which is for a GPU: on a CPU it may be {_either(MATRIX_FORMATS)}")
        return
    if quantization not in list(Quantization):
        raise StartupFailed(f"{setting}, which is for CPUs: on a GPU it may be {_either(['none', *Quantization])}")
    if Quantization(quantization) is Quantization.FP8 and device.type == "cuda":
        _check_fp8(device, setting, "int8 or w8a8")
    reason = None
    if model_description is not None:
        reason = unsupported_reason(model_description, COMPUTED_ON_DEVICE)
    if model_description is None or reason is not None:
        raise StartupFailed(f"{setting}, but on a GPU {_not_quantized(reason)}")


def _not_quantized(reason: str | None) -> str:
    models = "only models that are computed natively" if reason is None else f"no models with {reason}"
    return f"{models} support QUIRE_QUANTIZATION"


def _check_fp8(device: torch.device, setting: str, others: str) -> None:
    if torch.cuda.get_device_capability(device) < _FP8_CAPABILITY:
        raise StartupFailed(f"{setting}, which this GPU does not support: use {others}")


def _either(names: Iterable[str]) -> str:
    *others, last = names
    return f"{', '.join(others)} or {last}"


def choose_native(
    model_description: ModelDescription | None, kernels: Kernels, report: Callable[[str], None]
) -> ModelDescription | None:
    """The model's description, if the backend of these kernels supports it."""
    if model_description is None:
        return None
    refused = unsupported_natively(model_description, kernels)
    if refused is not None:
        report(f"transformers' modules compute the model, slower than Quire's kernels: these do not support {refused}")
        return None
    return model_description


def arithmetic_name(
    settings: WorkerSettings, kernels: Kernels, native: ModelDescription | None, device: torch.device
) -> str:
    """What determines a token's bits in deterministic mode: equal names mean equal bits. Raises StartupFailed."""
    refusal = "QUIRE_DETERMINISTIC cannot be guaranteed"
    if native is None:
        raise StartupFailed(f"{refusal}: only models that are computed natively have kernels that guarantee it")
    if isinstance(kernels, CompiledKernels):
        return f"{arithmetic_of(kernels.thread_pool)} {torch.__version__}"
    if device.type == "cuda":
        return f"{triton_arithmetic(device)}{arithmetic_of_backend(settings.attention_backend)}"
    raise StartupFailed(f"{refusal} with {kernels} kernels on a CPU: only the compiled kernels do")


def kernel_name(kernels: Kernels) -> str:
    """As QUIRE_KERNELS has it."""
    return "compiled" if isinstance(kernels, CompiledKernels) else kernels.value


def choose_cache_dtype(choice: str, kernels: str, dtype: torch.dtype, device: torch.device) -> torch.dtype:
    """The dtype of keys and values, with the kernels of a `kernel_name`."""
    if choice == "auto":
        return dtype
    if kernels == "torch":
        raise StartupFailed(f"QUIRE_KV_CACHE_DTYPE is {choice}, which torch's kernels do not support: it must be auto")
    if kernels == "compiled" and choice == "fp8":
        raise StartupFailed("QUIRE_KV_CACHE_DTYPE is fp8, which is for a GPU: on a CPU it must be int8 or auto")
    if choice == "fp8" and device.type == "cuda":
        _check_fp8(device, "QUIRE_KV_CACHE_DTYPE is fp8", "int8 or auto")
    return _CACHE_DTYPES[choice]
