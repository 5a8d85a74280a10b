"""The threads that run the compiled ops."""

import ctypes
from ctypes import c_int64, c_void_p
from typing import Any

import torch

from quire_kernels._checks import require

_TYPES = {torch.float32: 0, torch.bfloat16: 1}


def type_of(dtype: torch.dtype) -> int:
    """The library's name of a dtype. Raises ValueError for one that it does not compute in."""
    require(dtype in _TYPES, "dtype", "be float32 or bfloat16")
    return _TYPES[dtype]


class Team:
    """Threads that run the ops, the calling one among them. One op at a time, and no fork while it lives."""

    def __init__(self, library: ctypes.CDLL, size: int) -> None:
        self.library = library
        _declare(library)
        self.handle: int | None = library.quire_team_new(size)

    def __del__(self) -> None:
        if getattr(self, "handle", None) is not None:
            self.library.quire_team_delete(self.handle)
            self.handle = None


def _declare(library: Any) -> None:
    pointer, number = c_void_p, c_int64
    for name, result, *arguments in (
        ("team_new", pointer, number),
        ("team_delete", None, pointer),
        ("pack", None, pointer, number, number, number, number, pointer),
        ("linear", None, pointer, number, pointer, pointer, number, number, pointer),
        ("store", None, pointer, number, pointer, pointer, number, pointer, number, pointer, number),
        ("attend", None, pointer, number, pointer, pointer, pointer, number, pointer, pointer),
        ("likeliest", None, pointer, pointer, number, number, number, number, pointer),
        ("draw", None, pointer, pointer, number, number, pointer, pointer, number, pointer),
        ("llama_new", pointer, pointer, number, pointer),
        ("llama_delete", None, pointer),
        ("llama_run", None, pointer, pointer),
    ):
        function = getattr(library, f"quire_{name}")
        function.restype, function.argtypes = result, arguments
