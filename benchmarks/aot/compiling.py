"""Compiles the kernels of cases for a target, and judges what came of it."""

import hashlib
import importlib
import json
import math
import pkgutil
import re
import sys
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
from triton import knobs
from triton._C.libtriton import get_cache_invalidating_env_vars
from triton.runtime.jit import JITFunction, KernelInterface

import quire_kernels
from benchmarks.aot.case import Case
from benchmarks.aot.cases import all_cases
from benchmarks.aot.machine_code import Figures, figures_of
from benchmarks.aot.targets import TARGETS, Target, intercepted_launches

# Of products of matrices. In float32 they run without tensor cores on NVIDIA's GPUs: those round to 10 bits.
_MATRIX_KERNELS = (
    "_paged_attention_kernel",
    "_prompt_attention_kernel",
    "_decode_kernel",
    "_latent_attention_kernel",
    "_latent_decode_kernel",
    "_head_linear_kernel",
    "_invariant_linear_kernel",
    "_grouped_linear_kernel",
    "_scaled_linear_kernel",
    "_weight_only_linear_kernel",
)
# Each program of these has an equal share of the work, so all must run at the same time.
_RESIDENT_KERNELS = ("_decode_kernel", "_latent_decode_kernel")
_DIGEST_LENGTH = 16  # hexadecimal digits
TOLERANCE = 0.05
"""By how much a kernel's instructions may differ from the table."""


@dataclass(frozen=True)
class CompiledKernel:
    """A kernel of a case; `figures` is None, and `error` says why, where it does not compile."""

    target: str
    case: str
    kernel: str
    """With a number where a case launches several that differ in constants or types."""
    multiplies: bool
    """Whether tensor cores are to compute its products."""
    figures: Figures | None
    digest: str = ""
    """Of all that its machine code depends on, besides the version of Triton."""
    error: str = ""
    is_new: bool = True
    """Whether it was compiled, as the table has none of its digest."""
    num_waiting: int = 0
    """Programs that do not run until others end, of a launch whose programs must all run at the same time."""

    @property
    def key(self) -> tuple[str, str, str]:
        return self.target, self.case, self.kernel

    def row(self) -> dict[str, Any]:
        """As a row of the table."""
        figures = {} if self.figures is None else asdict(self.figures)
        return {"target": self.target, "case": self.case, "kernel": self.kernel} | figures | {"digest": self.digest}


class Compilations:
    """Computes the digest of each kernel that Triton is about to compile, and skips those that are known."""

    def __init__(self, known: Mapping[str, Figures]) -> None:
        """`known`: the figures of kernels by their digests."""
        self._known = known
        self._digest = ""
        self._compiled: dict[str, str] = {}  # Triton's own hash to digest

    @contextmanager
    def installed(self) -> Iterator[None]:
        """Until its end, Triton compiles no kernel that is known."""
        for function in functions_of_tree():
            # Part of Triton's hash of a function, so that one more line above it would change its digest.
            function.starting_line_number = 0
        before, knobs.runtime.jit_cache_hook = knobs.runtime.jit_cache_hook, self._is_known
        try:
            yield
        finally:
            knobs.runtime.jit_cache_hook = before

    def digest_of(self, kernel: Any) -> str:
        """Of what a launch returned: the kernel, or None for a known one."""
        return self._digest if kernel is None else self._compiled.setdefault(kernel.hash, self._digest)

    def figures_of(self, kernel: Any) -> Figures:
        """Of what the last launch returned."""
        return self._known[self._digest] if kernel is None else figures_of(kernel)

    def _is_known(self, *, fn: Any, **details: Any) -> bool:
        """Triton's hook, called before it compiles."""
        compiled = details["compile"]
        data = json.loads(compiled["specialization_data"])
        # Paths of files that are part of Triton.
        del data["key"], data["options"]["extern_libs"]
        helpers = [value.cache_key for value in compiled["constants"].values() if hasattr(value, "cache_key")]
        variables = get_cache_invalidating_env_vars()
        text = json.dumps([fn.jit_function.cache_key, helpers, data, variables], sort_keys=True)
        self._digest = hashlib.sha256(text.encode()).hexdigest()[:_DIGEST_LENGTH]
        return self._digest in self._known


def compile_cases(
    target: Target, cases: Sequence[Case], known: Mapping[str, Figures] | None = None
) -> Iterator[CompiledKernel]:
    """Each kernel once: one that an earlier case has launched too is left out. Those whose figures are `known` by
    their digest are not compiled.
    """
    run = JITFunction.run
    compilations = Compilations(known or {})
    seen: set[str] = set()
    found: list[CompiledKernel] = []
    is_product = False

    def compile_kernel(function: Any, *args: Any, grid: Any, warmup: bool, **options: Any) -> Any:
        name = function.__name__
        multiplies = is_product and name in _MATRIX_KERNELS
        try:
            kernel = run(function, *args, grid=grid, warmup=True, **options)
        except Exception as error:
            # Not raised, so that the other kernels of the case are compiled too.
            found.append(CompiledKernel(target.name, "", name, multiplies, None, error=_reason(error)))
            return None
        digest = compilations.digest_of(kernel)
        if digest not in seen:
            seen.add(digest)
            figures = compilations.figures_of(kernel)
            waiting = 0
            if name in _RESIDENT_KERNELS:
                warps = options["num_warps"]
                resident = target.resident_programs(figures.num_registers, figures.shared_bytes, warps)
                waiting = max(0, math.prod(grid) - target.multiprocessors * resident)
            row = CompiledKernel(target.name, "", name, multiplies, figures, digest)
            found.append(replace(row, is_new=kernel is not None, num_waiting=waiting))
        return kernel

    with intercepted_launches(target, compile_kernel), compilations.installed():
        for case in cases:
            if case.needs_fp8 and not target.has_fp8:
                continue
            found.clear()
            is_product = case.dtype != torch.float32
            case.call()
            numbers: dict[str, int] = {}
            for kernel in found:
                numbers[kernel.kernel] = number = numbers.get(kernel.kernel, 0) + 1
                yield replace(
                    kernel, case=case.name, kernel=f"{kernel.kernel} {number}" if number > 1 else kernel.kernel
                )


def compile_target(name: str, only: str, known: Mapping[str, Figures]) -> list[CompiledKernel]:
    """The kernels of all cases whose name has `only` in it."""
    cases = [case for case in all_cases() if only in case.name]
    began = time.monotonic()
    compiled = []
    for kernel in compile_cases(TARGETS[name], cases, known):
        compiled.append(kernel)
        _log(f"{name}, {kernel.case}, {kernel.kernel}: {kernel.figures or kernel.error}")
    _log(f"{name}: {len(compiled)} kernels in {time.monotonic() - began:.0f} s")
    return compiled


def faults(
    target: Target, kernel: CompiledKernel, table: dict[tuple[str, str, str], dict[str, Any]], *, of_all: bool
) -> list[str]:
    """What is wrong with a kernel: by the target's limits, and by its row of the table.

    A kernel is listed under the first case that launches it. So only a run `of_all` cases can say that one has no row.
    """
    figures = kernel.figures
    if figures is None:
        return [f"does not compile: {kernel.error}"]
    wrong = []
    if figures.shared_bytes > target.shared_bytes:
        wrong.append(f"uses {figures.shared_bytes} bytes of shared memory of {target.shared_bytes}")
    if figures.spill_bytes > target.max_spill_bytes:
        wrong.append(f"spills {figures.spill_bytes} bytes of registers, more than {target.max_spill_bytes}")
    if kernel.num_waiting:
        wrong.append(f"has {kernel.num_waiting} programs that wait for others to end")
    if kernel.multiplies and not figures.num_matrix_instructions:
        wrong.append("has no tensor-core instructions")
    if kernel.multiplies and target.is_nvidia and not figures.num_async_copies:
        wrong.append("has no asynchronous copies")
    row = table.get(kernel.key, {})
    if figures.num_narrow_loads > row.get("num_narrow_loads", 0) and (row or kernel.multiplies):
        wrong.append(f"has {figures.num_narrow_loads} loads of 16 bits or fewer from global memory")
    if of_all and not row:
        wrong.append("has no row in the table, with which it would be compared: --update writes one")
    if (usual := row.get("spill_bytes")) is not None and figures.spill_bytes > usual:
        wrong.append(f"spills {figures.spill_bytes} bytes of registers, not {usual}")
    if (usual := row.get("num_loop_instructions")) is not None:
        now = figures.num_loop_instructions
        if abs(now - usual) > TOLERANCE * usual:
            wrong.append(f"has {now} instructions in inner loops, not {usual}")
    if (usual := row.get("num_matrix_instructions")) is not None and kernel.multiplies:
        now = figures.num_matrix_instructions
        if now < (1 - TOLERANCE) * usual:
            wrong.append(f"has {now} tensor-core instructions, not {usual}")
    return wrong


def functions_of_tree() -> Iterator[Any]:
    """All functions in `quire_kernels` that Triton compiles, some more than once."""
    for module in pkgutil.iter_modules(quire_kernels.__path__, "quire_kernels."):
        if not module.ispkg:
            members = vars(importlib.import_module(module.name)).values()
            yield from (value for value in members if isinstance(value, KernelInterface))


def kernels_of_tree() -> set[str]:
    """The names of all kernels in `quire_kernels`."""
    return {name for one in functions_of_tree() if (name := one.__name__).endswith("_kernel")}


def uncompiled(compiled: Iterable[str]) -> list[str]:
    """The kernels of the tree that are not among those compiled, named as in the table."""
    return sorted(kernels_of_tree() - {name.partition(" ")[0] for name in compiled})


def _reason(error: BaseException) -> str:
    """The last lines of an error and of its causes."""
    texts = []
    cause: BaseException | None = error
    while cause is not None:
        message = re.sub(r"\s+", " ", str(cause))
        texts.append(f"{type(cause).__name__}: {message[-300:]}")
        cause = cause.__cause__
    return "; ".join(texts)


def _log(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
