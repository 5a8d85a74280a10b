"""A pytest plugin for vLLM's tests, without vLLM: selects those that ask a server, and has stubs of its modules.

Tests that call vLLM's own code are not collected: its modules are empty here, but for the tokenizer and the size of the
vocabulary of a model, which are those of the served model, and for answers. Of torch there is what tests compute from
answers, by numpy.
"""

import base64
import json
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, TypeVar
from unittest.mock import MagicMock

import numpy as np
import pytest

from tests.peers.support import embedding_checks, empty_modules

EMPTY = (
    *("vllm", "torch", "schemathesis", "hypothesis", "fastapi", "starlette", "openai_harmony", "pybase64", "lm_eval"),
    *("PIL", "mteb", "safetensors.torch", "model_hosting_container_standards"),
    # Helpers of tests that are not taken.
    *("tests.conftest", "tests.models"),
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


class Answer:
    """Takes the place of vLLM's models of answers. An answer must have what a test reads of it, but for the number of
    completion tokens, which is 0 by default."""

    @staticmethod
    def model_validate(answer: Any) -> Any:
        def made(values: dict[str, Any]) -> SimpleNamespace:
            return SimpleNamespace(**({"completion_tokens": 0} if "prompt_tokens" in values else {}), **values)

        return json.loads(json.dumps(answer), object_hook=made)


_VARIABLES = (
    *("SAGEMAKER_MODEL_PATH", "CUSTOM_SCRIPT_FILENAME"),
    *("CUSTOM_FASTAPI_PING_HANDLER", "CUSTOM_FASTAPI_INVOCATION_HANDLER"),
)
"""Names of variables of SageMaker's toolkit, which a test of a server without them empties."""

F = TypeVar("F", bound=Callable[..., Any])


def inference_mode() -> Callable[[F], F]:
    return lambda function: function


def normalize(vectors: Any, *, p: int, dim: int) -> Any:
    return vectors / np.linalg.norm(vectors, ord=p, axis=dim, keepdims=True)


def cosine_similarity(first: Any, second: Any, *, dim: int) -> Any:
    return np.sum(first * second, axis=dim) / (np.linalg.norm(first, axis=dim) * np.linalg.norm(second, axis=dim))


_CHECKS = ("EmbedModelInfo", "HfRunner", "check_embeddings_close", "float_embeddings", "run_embedding_correctness_test")

GIVEN: dict[str, Any] = {
    "get_tokenizer": get_tokenizer,
    "ModelConfig": ModelConfig,
    "current_platform": MagicMock(is_rocm=lambda: False),
    "b64decode": base64.b64decode,
    **dict.fromkeys(("EmbeddingResponse", "RerankResponse", "ScoreResponse"), Answer),
    **dict.fromkeys(("FastAPIEnvVars", "SageMakerEnvVars"), SimpleNamespace(**{name: name for name in _VARIABLES})),
    # Of vLLM's helpers for tests.
    **{name: getattr(embedding_checks, name) for name in _CHECKS},
    # Of torch and of torch.nn.functional.
    **dict.fromkeys(("as_tensor", "tensor"), np.asarray),
    **{one.__name__: one for one in (inference_mode, normalize, cosine_similarity, np.allclose)},
}

empty_modules.provide(EMPTY, GIVEN)


@pytest.fixture(scope="session")
def hf_runner() -> type[embedding_checks.HfRunner]:
    """Takes the place of vLLM's fixture."""
    return embedding_checks.HfRunner


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
