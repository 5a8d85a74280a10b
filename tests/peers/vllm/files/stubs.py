"""A pytest plugin for vLLM's tests, without vLLM: selects those that ask a server, and has stubs of its modules.

Tests that call vLLM's own code are not collected: its modules are empty here, but for the tokenizer and the size of the
vocabulary of a model, which are those of the served model.
"""

import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.peers.support import empty_modules

EMPTY = (
    *("vllm", "torch", "schemathesis", "hypothesis", "fastapi", "starlette", "openai_harmony", "pybase64", "lm_eval"),
    # Tests of vLLM's own code, from which a file with others takes names.
    "tests.entrypoints.openai.chat_completion.test_serving_chat",
)


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


empty_modules.provide(EMPTY, {"get_tokenizer": get_tokenizer, "ModelConfig": ModelConfig})


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
