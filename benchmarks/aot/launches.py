"""Launches of kernels that are recorded, and not made."""

from dataclasses import dataclass
from typing import Any


@dataclass
class Launches:
    """Launches of kernels, by what a kernel is compiled for: types and alignment of arguments, constants, options."""

    num_launches: int = 0

    def __post_init__(self) -> None:
        self._known: set[tuple[str, ...]] = set()
        self._new: list[tuple[str, ...]] = []

    def record(self, function: Any, *args: Any, grid: Any, warmup: bool, **options: Any) -> None:
        """Takes the place of `JITFunction.run`."""
        self.num_launches += 1
        binder = function.device_caches[0][-1]
        bound, specialization, resolved = binder(*args, **options, debug=False, instrumentation_mode="")
        constants = {parameter.name: bound[parameter.name] for parameter in function.params if parameter.is_constexpr}
        key = (function.__name__, str(specialization), str(constants), str(resolved))
        if key not in self._known:
            self._known.add(key)
            self._new.append(key)

    def take_new(self) -> list[tuple[str, ...]]:
        """The kernels that were needed first since the last call."""
        new, self._new = self._new, []
        return new
