"""Values that are registered by name: in modules of a package of Quire, or as entry points of other distributions."""

import pkgutil
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from importlib import import_module
from importlib.metadata import EntryPoint, entry_points
from pathlib import Path
from types import ModuleType
from typing import Any

from worker_svc.errors import StartupFailed


class Registry:
    """Values by name: the attribute of each module of a package, and the entry points of a group.

    A module's name is its value's, with _ for - and for other characters that a module's name cannot have. Modules
    whose names begin with _ are not registered.
    """

    def __init__(
        self, package: ModuleType, attribute: str, group: str, accepts: Callable[[Any], bool], must_be: str
    ) -> None:
        """A value of another package must satisfy `accepts`; `must_be` describes it."""
        self._package, self._attribute, self._group = package, attribute, group
        self._accepts, self._must_be = accepts, must_be

    def names(self) -> list[str]:
        """All names, sorted; Quire's own as their modules are called."""
        return sorted({*self._modules(), *(point.name for point in self._entry_points())})

    def find(self, name: str) -> Any:
        """The value of this name, or None.

        Raises StartupFailed if several packages have the name, or an entry point cannot be loaded or has another type.
        """
        module = "".join(letter if letter.isalnum() else "_" for letter in name)
        points = self._points(name)
        is_own = module in self._modules()
        if is_own + len(points) > 1:
            owners = ["quire"] * is_own + sorted(_distribution(point) for point in points)
            raise StartupFailed(f"{self._group}: {name} is registered by several packages: {', '.join(owners)}")
        if is_own:
            return getattr(import_module(f"{self._package.__name__}.{module}"), self._attribute)
        return self._load(points[0]) if points else None

    def origin(self, name: str) -> str:
        """The distributions that register this name, with their versions; empty if it is Quire's own."""
        distributions = [point.dist for point in self._points(name)]
        return ", ".join("unknown" if dist is None else f"{dist.name} {dist.version}" for dist in distributions)

    def identity(self, name: str) -> bytes:
        """Changes with the version and the module of the package that registers this name; empty if it is Quire's own.

        Raises StartupFailed if the module cannot be read.
        """
        with self.running(name):
            modules = [Path(str(import_module(point.module).__file__)) for point in self._points(name)]
            return b"".join([self.origin(name).encode(), *(module.read_bytes() for module in modules)])

    @contextmanager
    def running(self, name: str) -> Iterator[None]:
        """Runs code of the value of this name. Any exception but StartupFailed becomes StartupFailed."""
        try:
            yield
        except StartupFailed:
            raise
        except Exception as error:  # any exception of another package's code
            points = self._points(name)
            owner = _distribution(points[0]) if points else "quire"
            raise StartupFailed(
                f"{self._group}: {name} of the package {owner} failed: {type(error).__name__}: {error}"
            ) from error

    def _load(self, point: EntryPoint) -> Any:
        where = f"{self._group}: {point.name} of the package {_distribution(point)}"
        try:
            value = point.load()
        except Exception as error:  # any exception of another package's module
            raise StartupFailed(f"{where} cannot be loaded: {type(error).__name__}: {error}") from error
        if not self._accepts(value):
            raise StartupFailed(f"{where} must be {self._must_be}, not of the type {type(value).__name__}")
        return value

    def _points(self, name: str) -> list[EntryPoint]:
        return [point for point in self._entry_points() if point.name == name]

    def _modules(self) -> list[str]:
        names = (module.name for module in pkgutil.iter_modules(self._package.__path__))
        return [name for name in names if not name.startswith("_")]

    def _entry_points(self) -> Iterable[EntryPoint]:
        return entry_points(group=self._group)


def _distribution(point: EntryPoint) -> str:
    return "unknown" if point.dist is None else point.dist.name
