"""A pytest plugin for vLLM's tests, without vLLM: selects those that ask a server, and has stubs of its modules.

Tests that call vLLM's own code are not collected: its modules are empty here, but for the tokenizer and the size of the
vocabulary of a model, which are those of the served model.
"""

import importlib.abc
import importlib.machinery
import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest.mock import MagicMock

import pytest

EMPTY = ("vllm", "torch", "schemathesis", "hypothesis", "fastapi", "starlette", "openai_harmony", "pybase64", "lm_eval")


class _Empty(ModuleType):
    """A module in which any name is a mock."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        if name in _REPLACED_NAMES:
            return _REPLACED_NAMES[name]
        value = MagicMock(name=f"{self.__name__}.{name}")
        setattr(self, name, value)
        return value


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def find_spec(self, name: str, *_: Any) -> importlib.machinery.ModuleSpec | None:
        if name.partition(".")[0] not in EMPTY:
            return None
        return importlib.machinery.ModuleSpec(name, self, is_package=True)

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType:
        return _Empty(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        """An empty module has nothing to run."""


def get_tokenizer(*_: Any, **__: Any) -> Any:
    """The tokenizer of the served model, whatever model a test names."""
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(os.environ["QUIRE_TOKENIZER"])


class ModelConfig:
    """The configuration of the served model, whatever model a test names."""

    def __init__(self, **_: Any) -> None:
        pass

    def get_vocab_size(self) -> int:
        size: int = json.loads(Path(os.environ["QUIRE_TOKENIZER"], "config.json").read_text())["vocab_size"]
        return size


_REPLACED_NAMES = {"get_tokenizer": get_tokenizer, "ModelConfig": ModelConfig}

sys.meta_path.insert(0, _Finder())


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    asking = [item for item in items if _asks_a_server(item)]
    config.hook.pytest_deselected(items=[item for item in items if item not in asking])
    items[:] = asking


def _asks_a_server(item: pytest.Item) -> bool:
    if not isinstance(item, pytest.Function):
        return False
    definitions: dict[str, Sequence[Any]] = dict(item._fixtureinfo.name2fixturedefs)
    parameters = item.callspec.params.values() if hasattr(item, "callspec") else ()
    for name in [one for one in parameters if isinstance(one, str)]:  # it may be a fixture's
        definitions[name] = item.session._fixturemanager.getfixturedefs(name, item) or ()
    modules = (item.function, *(each.func for found in definitions.values() for each in found))
    return any("RemoteOpenAIServer" in getattr(each, "__code__", _NO_CODE).co_names for each in modules)


_NO_CODE = (lambda: None).__code__
