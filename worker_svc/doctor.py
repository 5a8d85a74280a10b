"""The worker's checks of `quire doctor`: processor, device and kernels. Those of model and memory are in `model_checks`
and `memory_checks`.

svc_common/doctor loads this module by its name. Packages are imported in the checks that need them.
"""

import os
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

from svc_common.doctor.credentials import check_credentials
from svc_common.doctor.directories import is_writable
from svc_common.doctor.findings import Check, CheckContext, CheckGroup, Finding, ok, warning, wrong
from svc_common.doctor.ports import check_ports
from svc_common.models import cache_root
from svc_common.service_roles import ServiceRole
from worker_svc.errors import StartupFailed
from worker_svc.host import available_cpus
from worker_svc.settings import WorkerSettings

_NVIDIA_DRIVER = Path("/proc/driver/nvidia/version")
_CPUINFO = Path("/proc/cpuinfo")
_VECTORS = ("avx2", "fma", "avx512f", "avx512_bf16", "amx_bf16", "asimd", "bf16")
"""Flags of a processor that make the compiled kernels fast."""
_FAST = ({"avx2", "fma"}, {"avx512f"}, {"asimd"})
_COMPILE_SECONDS = 120.0
_IMPORT_SECONDS = 120.0
"""Time for torch and transformers, which take seconds to import on an idle machine."""


def check_processor(_: CheckContext) -> Iterator[Finding]:
    flags = processor_flags()
    known = [flag for flag in _VECTORS if flag in flags]
    found = f"{available_cpus()} CPUs for this process, {', '.join(known) or 'no vector instructions that are known'}"
    if any(needed <= flags for needed in _FAST):
        yield ok(found)
    else:
        problem = "without AVX2 and FMA, or AVX-512, the compiled kernels are slow"
        yield warning(found, problem, "use another machine, or let the virtual machine have the host's CPU features")


def processor_flags(cpuinfo: Path = _CPUINFO) -> set[str]:
    """Features of the processor, as Linux names them."""
    for line in cpuinfo.read_text().splitlines():
        if line.startswith(("flags", "Features")):
            return set(line.partition(":")[2].split())
    return set()


def check_device(context: CheckContext) -> Iterator[Finding]:
    import torch

    from worker_svc.kernel_choice import DeviceNotFound, choose_device

    settings: WorkerSettings = context.settings
    built = f"torch {torch.__version__}, {f'CUDA {torch.version.cuda}' if torch.version.cuda else 'without CUDA'}"
    has_driver = _NVIDIA_DRIVER.exists()
    install = "install a torch with CUDA (requirements/torch-cuda.txt), and a driver that supports it"
    try:
        device = choose_device(settings.device)
    except DeviceNotFound as error:
        step = (
            install if has_driver else "install the NVIDIA driver, or give the container the GPU; or QUIRE_DEVICE=cpu"
        )
        yield wrong(built, str(error), step)
        return
    if device.type == "cuda":
        gpu = torch.cuda.get_device_properties(device)
        capability = f"{gpu.major}.{gpu.minor}"
        memory = f"{gpu.total_memory / 2**30:.0f} GiB"
        yield ok(f"{gpu.name}, {memory}, compute capability {capability}; {built}")
    elif has_driver and settings.device == "auto":
        yield warning(built, "there is an NVIDIA driver, but torch finds no GPU: the CPU computes", install)
    else:
        yield ok(f"CPU; {built}")


def check_kernels(context: CheckContext) -> Iterator[Finding]:
    """Whether the settings' kernels are the device's; the compiler and the directory of compiled kernels on a CPU; a
    Triton kernel on a GPU; nothing where torch computes values.
    """
    from worker_svc.kernel_choice import DeviceNotFound, check_kernels_of_device, choose_device
    from worker_svc.model_checks import backend_of_values

    settings: WorkerSettings = context.settings
    try:
        device = choose_device(settings.device)
    except DeviceNotFound:  # the check before this one reports it
        return
    of_values = backend_of_values(settings)
    backend, quantization = of_values or (None, settings.quantization)
    if backend is None:
        try:
            check_kernels_of_device(settings.kernels, device)
        except DeviceNotFound as error:
            yield wrong("none that generates tokens", str(error), "set QUIRE_KERNELS=auto, or QUIRE_DEVICE")
            return
    if backend == "torch" and quantization != "none":
        problem = f"they do not compute the model with QUIRE_QUANTIZATION={quantization}"
        yield wrong("torch's operators", problem, "unset QUIRE_QUANTIZATION")
    elif backend == "torch":
        yield ok("torch's operators compute the model's values: no C++ compiler and no Triton are used")
    elif device.type == "cuda":
        yield _run_triton_kernel()
    elif backend == "compiled" or settings.kernels in ("auto", "compiled"):
        # Determinism of generation is the compiled code's, and so are decoders' weights in fewer bits; other values are
        # made by torch as well.
        needs_code = quantization != "none" or (backend is None and settings.deterministic)
        yield _check_compiled(settings, is_required=settings.kernels == "compiled" or needs_code)
    else:
        yield ok(f"QUIRE_KERNELS is {settings.kernels}: no C++ compiler is used")


def _check_compiled(settings: WorkerSettings, *, is_required: bool) -> Finding:
    from quire_kernels.cpu.library import BuildFailed, check_sources, find_compiler, library_path

    otherwise = "a worker with these settings does not start" if is_required else "torch computes the model, slower"
    report = wrong if is_required else warning
    directory = (settings.kernel_cache_dir or cache_root() / "kernels").expanduser()
    try:
        compiler = find_compiler()
        path = library_path(directory, compiler)
        found = f"{_version_of(compiler)}, {directory}"
        if path.exists():
            return ok(f"{found}: compiled already")
        if not is_writable(directory):
            step = "make it a directory that this user can write to, or set QUIRE_KERNEL_CACHE_DIR to such a one"
            return report(found, f"compiled kernels cannot be kept there: {otherwise}", step)
        check_sources(compiler)
    except BuildFailed as error:
        step = "install g++ 12 or later (`apt-get install g++`), or name a compiler in CXX"
        return report(" ".join(str(error).split())[:300], otherwise, step)
    return ok(f"{found}: compiled at the first start")


def _version_of(compiler: tuple[str, ...]) -> str:
    called = subprocess.run([*compiler, "--version"], capture_output=True, text=True, check=False)
    return called.stdout.partition("\n")[0] or " ".join(compiler)


def _run_triton_kernel() -> Finding:
    """Compiles and runs one kernel. Triton's cache is a directory that is removed."""
    with tempfile.TemporaryDirectory(prefix="quire-doctor-") as cache:
        os.environ["TRITON_CACHE_DIR"] = cache
        import torch
        import triton

        from quire_kernels.row_norm import RowNorm, row_norm

        found = f"triton {triton.__version__}"
        try:
            ones = torch.ones(4, 64, device="cuda")
            is_right = torch.allclose(row_norm(ones, RowNorm(ones[0], 0.0)), ones)
        except Exception as error:  # of Triton, of its C compiler, or of the driver
            step = "install a C compiler (`apt-get install gcc`), and a triton that fits torch and the GPU's driver"
            return wrong(found, f"a kernel cannot be compiled and run: {type(error).__name__}: {error}", step)
    if not is_right:
        return wrong(
            found, "a kernel returns wrong values", "install the triton that requirements/torch-cuda.txt names"
        )
    return ok(f"{found} compiles and runs a kernel")


def check_model(context: CheckContext) -> Iterator[Finding]:
    from worker_svc.model_checks import find_model_problems

    yield from find_model_problems(context)


def check_memory(context: CheckContext) -> Iterator[Finding]:
    from worker_svc.memory_checks import find_memory_problems

    yield from find_memory_problems(context)


def check_drafter(context: CheckContext) -> Iterator[Finding]:
    settings: WorkerSettings = context.settings
    if settings.drafter == "none":
        yield ok("none (QUIRE_DRAFTER)")
        return
    from worker_svc.drafting import find_drafter

    try:
        find_drafter(settings.drafter)
    except StartupFailed as error:
        yield wrong("QUIRE_DRAFTER", str(error), "set QUIRE_DRAFTER to one of these, or unset it")
    else:
        yield ok(f"{settings.drafter}, {settings.max_draft_tokens} tokens at most")


def check_profile_dir(context: CheckContext) -> Iterator[Finding]:
    settings: WorkerSettings = context.settings
    if settings.profile_dir is None:
        yield ok("profiles are refused (QUIRE_PROFILE_DIR is not set)")
    elif is_writable(settings.profile_dir):
        yield ok(f"{settings.profile_dir} (QUIRE_PROFILE_DIR)")
    else:
        step = "make it a directory that this user can write to, or set QUIRE_PROFILE_DIR to such a one"
        yield warning(f"{settings.profile_dir} (QUIRE_PROFILE_DIR)", "traces of profiles cannot be written there", step)


def check_own_credentials(context: CheckContext) -> Iterator[Finding]:
    settings: WorkerSettings = context.settings
    yield from check_credentials(ServiceRole.WORKER, settings, [settings.host])


def check_own_ports(context: CheckContext) -> Iterator[Finding]:
    settings: WorkerSettings = context.settings
    names = ("worker_port", "worker_metrics_port")
    yield from check_ports([(settings.host, getattr(settings, name), f"QUIRE_{name.upper()}") for name in names])


GROUP = CheckGroup(
    (
        Check("processor", check_processor),
        Check("device", check_device, _IMPORT_SECONDS),
        Check("kernels", check_kernels, _COMPILE_SECONDS),
        Check("model", check_model, _IMPORT_SECONDS),
        Check("memory", check_memory, _IMPORT_SECONDS),
        Check("drafter", check_drafter, _IMPORT_SECONDS),
        Check("profiles", check_profile_dir),
        Check("credentials", check_own_credentials),
        Check("ports", check_own_ports),
    ),
    settings=WorkerSettings,
)
