"""What is registered by name: a module of a package of ours, or an entry point of another distribution."""

import pkgutil
from collections.abc import Iterable
from importlib import import_module
from importlib.metadata import EntryPoint, entry_points
from types import ModuleType
from typing import Any

from worker_svc.errors import StartupFailed


class Registry:
    """Values by name: the attribute of each module of a package, and the entry points of a group.

    A module's name is its value's, with _ for - and for any other character that a module's name cannot have. Modules
    whose names begin with _ are not registered.
    """

    def __init__(self, package: ModuleType, attribute: str, group: str) -> None:
        self._package, self._attribute, self._group = package, attribute, group

    def names(self) -> list[str]:
        """All names, sorted; those of our own modules as these are called."""
        return sorted({*self._modules(), *(point.name for point in self._entry_points())})

    def find(self, name: str) -> Any:
        """The value of this name, or None.

        Raises StartupFailed where several have the name, or an entry point cannot be loaded.
        """
        module = "".join(letter if letter.isalnum() else "_" for letter in name)
        points = [point for point in self._entry_points() if point.name == name]
        is_own = module in self._modules()
        if is_own + len(points) > 1:
            owners = ["quire"] * is_own + sorted(_distribution(point) for point in points)
            raise StartupFailed(f"{self._group}: {name} is registered by several packages: {', '.join(owners)}")
        if is_own:
            return getattr(import_module(f"{self._package.__name__}.{module}"), self._attribute)
        return _load(self._group, points[0]) if points else None

    def _modules(self) -> list[str]:
        names = (module.name for module in pkgutil.iter_modules(self._package.__path__))
        return [name for name in names if not name.startswith("_")]

    def _entry_points(self) -> Iterable[EntryPoint]:
        return entry_points(group=self._group)


def _distribution(point: EntryPoint) -> str:
    return "unknown" if point.dist is None else point.dist.name


def _load(group: str, point: EntryPoint) -> Any:
    try:
        return point.load()
    except Exception as error:  # whatever the module of another package raises
        raise StartupFailed(
            f"{group}: {point.name} of the package {_distribution(point)} cannot be loaded: "
            f"{type(error).__name__}: {error}"
        ) from error
