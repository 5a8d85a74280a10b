"""Triton's interpreter with less work around each launch and each call, and the same results.

At each launch of a kernel, and at each call of a function within it, the interpreter searches triton.language for what
it replaces; for each operation it makes a table of NumPy's types. That takes a third of the time of small kernels. Here
the replacements are found once, applied for each launch and taken back after it, as by Triton.
"""

from collections.abc import Callable
from typing import Any

from triton import language as tl
from triton.language import core
from triton.runtime import interpreter


class _Replacements:
    """Attributes of triton.language while a kernel runs, with those that it has otherwise."""

    def __init__(self) -> None:
        scope = interpreter._patch_lang(_sees_all)
        originals: dict[tuple[Any, str], Any] = {}
        for target, name, original in scope._changes:
            originals.setdefault((target, name), original)  # what is replaced twice had its own before the first time
        self._changes = [
            (target, name, original, getattr(target, name)) for (target, name), original in originals.items()
        ]
        scope.restore()

    def apply(self) -> None:
        for target, name, _, replacement in self._changes:
            setattr(target, name, replacement)

    def restore(self) -> None:
        """Called by Triton after a launch."""
        for target, name, original, _ in self._changes:
            if original is interpreter._MISSING:
                delattr(target, name)
            else:
                setattr(target, name, original)


def _sees_all() -> None:
    """Sees all modules of the language that a kernel, or a function of Triton that it calls, may see."""
    _ = tl, core


def _call(function: Any, *args: Any, **options: Any) -> Any:
    """A call of a function within a kernel, for which all is replaced already."""
    try:
        return function.rewrite()(*args, **options)
    except Exception as error:
        raise interpreter.InterpreterError(repr(error)) from error


_REPLACEMENTS = _Replacements()


def _replace(kernel: Callable[..., Any]) -> _Replacements:
    """At the start of a launch."""
    _REPLACEMENTS.apply()
    return _REPLACEMENTS


_POINTER = interpreter._get_np_dtype(tl.pointer_type(tl.int8))
_OF_SCALARS = {
    dtype: interpreter._get_np_dtype(dtype)
    for dtype in vars(core).values()
    if type(dtype) is tl.dtype and dtype is not tl.void
}


def _numpy_dtype(dtype: Any) -> Any:
    """NumPy's type of a scalar, a pointer, or the elements of a block."""
    element = dtype.element_ty if isinstance(dtype, tl.block_type) else dtype
    return _POINTER if isinstance(element, tl.pointer_type) else _OF_SCALARS[element]


def quicken() -> None:
    """From now on, in this process."""
    interpreter._patch_lang = _replace
    interpreter.InterpretedFunction.__call__ = _call
    interpreter._get_np_dtype = _numpy_dtype
