"""Takes the place of `tests/utils.py` in vLLM's tests: its servers are Quire's, started by `quire serve`.

The tests name models that are not here. The default model answers under those names, and in place of models that
compute embeddings all-MiniLM-L6-v2.
"""

import importlib
import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Self

import anthropic
import openai

from tests.peers.support.quire_serve import QuireServe

_LEFT_OUT = (
    *("--enable-lora", "--lora-modules", "--max-lora-rank", "--max-cpu-loras"),
    *("--enable-per-request-metrics", "--reasoning-config", "--hf_overrides"),
)
"""Flags for what only some tests of a module ask for. These tests do not apply."""
_MAX_LOGPROBS = 128
"""The most that Quire's `--max-logprobs` allows."""
_ROLES = ("--chat-roles", "my-custom-role")
"""A role of a test. vLLM takes any; here an operator adds those that a template knows."""


ROCM_EXTRA_ARGS: list[str] = []
_EMBEDDING_MODELS = (
    "BAAI/bge-base-en-v1.5",
    "Snowflake/snowflake-arctic-embed-m-v1.5",
    "intfloat/multilingual-e5-small",
    "sentence-transformers/all-MiniLM-L12-v2",
)


class RemoteOpenAIServer:
    """A server for a test module. Tests of one that refuses a flag are skipped, with its words."""

    DUMMY_API_KEY = "token-abc123"

    def __init__(self, model: str, arguments: Sequence[str], *, env_dict: Mapping[str, str] | None = None, **_: Any):
        served = os.environ["QUIRE_EMBEDDING_MODEL" if model in _EMBEDDING_MODELS else "QUIRE_TOKENIZER"]
        flags = _without_flags([str(argument) for argument in arguments])
        given = [served, *_within_limits(flags, Path(served)), *_ROLES]
        if env_dict is not None and "VLLM_API_KEY" in env_dict:
            given += ["--api-key", env_dict["VLLM_API_KEY"]]
        if not any(argument.startswith("--served-model-name") for argument in given):
            given += ["--served-model-name", model]
        self._server = QuireServe(given)
        self.proc, self.host, self.port = self._server.process, self._server.host, self._server.port

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._server.stop()

    @property
    def url_root(self) -> str:
        return f"http://{self.host}:{self.port}"

    def url_for(self, *parts: str) -> str:
        return f"{self.url_root}/{'/'.join(part.strip('/') for part in parts if part)}"

    def get_client(self, **options: Any) -> openai.OpenAI:
        return openai.OpenAI(**self._options("v1", options))

    def get_async_client(self, **options: Any) -> openai.AsyncOpenAI:
        return openai.AsyncOpenAI(**self._options("v1", options))

    def get_client_anthropic(self, **options: Any) -> anthropic.Anthropic:
        return anthropic.Anthropic(**self._options("", options))

    def get_async_client_anthropic(self, **options: Any) -> anthropic.AsyncAnthropic:
        return anthropic.AsyncAnthropic(**self._options("", options))

    def _options(self, path: str, options: Mapping[str, Any]) -> dict[str, Any]:
        return {
            "base_url": self.url_for(path),
            "api_key": self.DUMMY_API_KEY,
            "max_retries": 0,
            "timeout": 600,
            **options,
        }


def _without_flags(arguments: Sequence[str]) -> list[str]:
    kept, is_left_out = [], False
    for argument in arguments:
        if argument.startswith("--"):
            is_left_out = argument in _LEFT_OUT
        if not is_left_out:
            kept.append(argument)
    return kept


def _within_limits(arguments: Sequence[str], served: Path) -> list[str]:
    """The same flags, for a model with a shorter context than that of the model which a test names, and for fewer
    log-probabilities than the whole vocabulary."""
    config = json.loads((served / "config.json").read_text())
    limits: dict[str, int] = {"--max-model-len": config["max_position_embeddings"], "--max-logprobs": _MAX_LOGPROBS}
    return [
        str(min(int(argument), limits[before])) if before in limits and argument.isdecimal() else argument
        for before, argument in zip(("", *arguments), arguments, strict=False)
    ]


def __getattr__(name: str) -> Any:
    """Names of vLLM's own helpers, which tests over HTTP do not call."""
    if name.startswith("__"):
        raise AttributeError(name)
    return getattr(importlib.import_module("vllm"), name)
