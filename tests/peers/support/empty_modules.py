"""Modules that a suite's tests import and that are not installed. Copied beside the tests of each suite."""

import importlib.abc
import importlib.machinery
import sys
from collections.abc import Mapping, Sequence
from types import ModuleType
from typing import Any
from unittest.mock import MagicMock


class _EmptyModule(ModuleType):
    """A module in which any name is a mock, apart from those of `given`."""

    def __init__(self, name: str, given: Mapping[str, Any]) -> None:
        super().__init__(name)
        self._given = given

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        if name in self._given:
            return self._given[name]
        value = MagicMock(name=f"{self.__name__}.{name}")
        setattr(self, name, value)
        return value


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def __init__(self, names: Sequence[str], given: Mapping[str, Any]) -> None:
        self._names, self._given = names, given

    def find_spec(self, name: str, *_: Any) -> importlib.machinery.ModuleSpec | None:
        if not any(name == known or name.startswith(f"{known}.") for known in self._names):
            return None
        return importlib.machinery.ModuleSpec(name, self, is_package=True)

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType:
        return _EmptyModule(spec.name, self._given)

    def exec_module(self, module: ModuleType) -> None:
        """An empty module has nothing to run."""


def provide(names: Sequence[str], given: Mapping[str, Any]) -> None:
    """Makes these modules, and all below them, importable. In each, names of `given` have its values; any other name is
    a mock."""
    sys.meta_path.insert(0, _Finder(names, given))
