"""A pytest plugin for llama.cpp's tests: their servers are Quire's, started by `quire serve` with the same settings.

A test starts and stops a server of its own. Here the server stays until a test asks for one with other settings.
"""

import importlib
import json
import os
from typing import Any

from tests.peers.support import empty_modules
from tests.peers.support.quire_serve import QuireServe

MODELS = (
    *("test", "gpt-3.5-turbo", "gpt-3.5-turbo-instruct", "gpt-4.1", "davinci-002", "codellama70b"),
    "text-embedding-3-small",
)
"""Names that requests of the tests have. llama.cpp answers under any name."""

_running: dict[tuple[str, ...], QuireServe] = {}

empty_modules.provide(("wget",), {})
_utils = importlib.import_module("utils")  # theirs


def flags(server: Any) -> tuple[str, ...]:
    """The flags of `quire serve` for what a test sets in its ServerProcess. The context of llama.cpp is shared by its
    slots. Templates that a test names by llama.cpp's own names are left out: the model's template is used. In place of
    models that compute embeddings or scores there is all-MiniLM-L6-v2, with its own context and pooling."""
    names = ("--served-model-name", *dict.fromkeys((server.model_alias or MODELS[0], *MODELS)))
    if server.server_embeddings or server.server_reranking:
        return (os.environ["QUIRE_EMBEDDING_MODEL"], *names)
    defaults = {"temperature": server.temperature}
    if server.n_predict is not None and server.n_predict > 0:
        defaults["max_new_tokens"] = server.n_predict
    settings = {
        "--override-generation-config": json.dumps(defaults),
        "--max-model-len": server.n_ctx and server.n_ctx // (server.n_slots or 1),
        "--max-num-seqs": server.n_slots,
        "--max-num-batched-tokens": server.n_batch,
        "--chat-template": server.chat_template_file,
        "--api-key": server.api_key,
    }
    given = (part for flag, value in settings.items() if value is not None for part in (flag, str(value)))
    return (*names, *given)


def start(server: Any, **_: Any) -> None:
    """Takes the place of ServerProcess.start."""
    asked = flags(server)
    if asked not in _running or _running[asked].process.poll() is not None:
        _stop_running()
        _running[asked] = QuireServe(asked)
    server.server_host, server.server_port = _running[asked].host, _running[asked].port


def make_url(server: Any, path: str, host: str | None = None) -> str:
    """Takes the place of ServerProcess.make_url."""
    return f"http://{host or server.server_host}:{server.server_port}{path}"


def _stop_running() -> None:
    while _running:
        _running.popitem()[1].stop()


def pytest_unconfigure() -> None:
    _stop_running()


_utils.ServerProcess.start = start
_utils.ServerProcess.stop = lambda server: None
_utils.ServerProcess.make_url = make_url
_utils.ServerPreset.load_all = lambda: None  # it downloads models
