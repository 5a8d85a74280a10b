"""The threads that run the compiled ops."""

import ctypes
from ctypes import c_int64, c_void_p
from pathlib import Path
from typing import Any

import torch

from quire_kernels._checks import require

_TYPES = {torch.float32: 0, torch.bfloat16: 1}


def type_of(dtype: torch.dtype) -> int:
    """The library's number of a dtype. Raises ValueError for an unsupported one."""
    require(dtype in _TYPES, "dtype", "be float32 or bfloat16")
    return _TYPES[dtype]


class ThreadPool:
    """Threads that run the ops, the calling one among them. One op at a time, and no fork while it exists."""

    def __init__(self, library: ctypes.CDLL, size: int) -> None:
        self.library = library
        _declare(library)
        self.handle: int | None = library.quire_thread_pool_new(size)

    @property
    def library_name(self) -> str:
        """Equal for all libraries of the same sources, compiler, flags and kind of processor."""
        return Path(self.library._name).stem

    def __del__(self) -> None:
        if getattr(self, "handle", None) is not None:
            self.library.quire_thread_pool_delete(self.handle)
            self.handle = None


def _declare(library: Any) -> None:
    pointer, number, status = c_void_p, c_int64, c_int64
    for name, result, *arguments in (
        ("thread_pool_new", pointer, number),
        ("thread_pool_delete", None, pointer),
        ("pack", status, pointer, pointer, number, number, number, number, pointer),
        ("quantize_nibbles", status, pointer, number, pointer, number, number, number, pointer, pointer, pointer),
        ("pack_nibbles", status, pointer, pointer, pointer, pointer, pointer, number, pointer),
        ("pack_grouped_bytes", status, pointer, pointer, pointer, pointer, pointer, number, pointer),
        ("linear", status, pointer, number, pointer, pointer, number, number, pointer),
        ("store", status, pointer, number, pointer, pointer, number, pointer, number, pointer, number),
        ("attend", status, pointer, number, number, pointer, pointer, pointer, number, pointer, pointer),
        ("argmax", status, pointer, pointer, number, number, number, number, pointer),
        ("mask_logits", status, pointer, pointer, number, number, pointer, pointer, number, number, pointer),
        ("sample", status, pointer, pointer, number, number, pointer, pointer, number, pointer),
        ("top_logprobs", status, pointer, pointer, number, number, number, pointer, number, pointer, pointer),
        ("decoder_new", pointer, pointer, number, number, pointer),
        ("decoder_delete", None, pointer),
        ("decoder_run", status, pointer, pointer),
        ("experts", status, pointer, number, number, pointer, pointer, number, pointer),
        ("amx_linear", status, pointer, number, pointer, pointer, number, number, pointer),
        ("encoder_new", pointer, pointer, number, number, pointer),
        ("encoder_delete", None, pointer),
        ("encoder_run", status, pointer, pointer),
    ):
        function = getattr(library, f"quire_{name}")
        function.restype, function.argtypes = result, arguments
        if result is not None:
            function.errcheck = _check
    library.quire_has_amx.restype, library.quire_has_amx.argtypes = number, []


def _check(result: int | None, function: Any, arguments: tuple[Any, ...]) -> int | None:
    """Checks the result of a function: an object, or 0."""
    if result is None or (function.restype is c_int64 and result != 0):
        raise MemoryError("the compiled kernels found no memory, or could not start their threads")
    return result
