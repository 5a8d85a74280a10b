"""Finds what makes the host wait for a device: an operation whose result the host needs before it can go on.

A CUDA graph cannot record such operations. What Quire computes itself has none; modules of transformers may.
"""

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

_COPIES = {"aten::_to_copy", "aten::copy_"}
# Their tags say that the shape of a result depends on values, which is only so for masks. Indices on the host are
# copied.
_INDEXING = {"aten::index", "aten::index_put_", "aten::index_put", "aten::_index_put_impl_"}
# Whether an operation of a library beside torch waits inside cannot be seen.
_NAMESPACES = {"aten", "prim", "prims"}
_TAGS = {torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape}


def first_host_wait(work: Callable[[], object]) -> str | None:
    """The name of the first operation of some work that waits for a device, such as "aten::nonzero"; None if none does.

    An operation of a library beside torch counts as one: what it does inside cannot be seen. The work runs once. On a
    CPU, copies to the host look like any others, and are not found.
    """
    finder = _WaitFinder()
    with finder:
        work()
    return finder.found


class _WaitFinder(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Notes the first operation that waits. Every operation is computed."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.found: str | None = None

    def __torch_dispatch__(
        self, func: Any, types: Iterable[Any], args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        options = dict(kwargs or {})
        # What consists of others, such as `Tensor.item`, is found in these.
        with self:
            result = func.decompose(*args, **options)
        if result is not NotImplemented:
            return result
        result = func(*args, **options)
        if self.found is None and _waits(func, args, result):
            self.found = func._schema.name
        return result


def _waits(func: Any, args: tuple[Any, ...], result: Any) -> bool:
    name = func._schema.name
    if func.namespace not in _NAMESPACES:
        return True
    if name in _INDEXING:
        indices = [index for index in args[1] if index is not None]
        return any(index.dtype in (torch.bool, torch.uint8) or index.device != args[0].device for index in indices)
    if name == "aten::lift_fresh":  # a tensor that the host has made of its own values
        return bool(args[0].device.type not in ("cpu", "meta"))
    if name in _COPIES:
        source = args[1] if name == "aten::copy_" else args[0]
        return isinstance(result, Tensor) and source.device != result.device
    return not _TAGS.isdisjoint(func.tags)
