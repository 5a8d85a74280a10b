"""Runs what SGLang's source distribution has of tests that ask a server. The files that use it are not part of it.

These are the kits, classes whose tests are meant for a class that starts a server; the tests of calls of tools; and the
check of streams of /v1/responses.
"""

import importlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import openai
import pytest

MODEL = "model"
TEST = Path("sglang/test")

_launcher = importlib.import_module("sglang.test.test_utils")
_fixture = importlib.import_module("sglang.test.server_fixtures.default_fixture")
_calls = importlib.import_module("sglang.test.tool_call_test_runner")
_gpt_oss = importlib.import_module("sglang.test.gpt_oss_common")


def _kits() -> Iterator[type]:
    """A test class for each kit, with a server of its own."""
    for file in (*sorted((TEST / "kits").glob("*.py")), TEST / "vlm_utils.py"):
        module = importlib.import_module(".".join(file.with_suffix("").parts))
        for name, kit in vars(module).items():
            if name.endswith("Mixin") and kit.__module__ == module.__name__:
                yield type(f"Test{name}", (_fixture.DefaultServerBase, kit), {"model": MODEL, "__module__": __name__})


globals().update({kit.__name__: kit for kit in _kits()})


@pytest.fixture(scope="module")
def client() -> Iterator[openai.OpenAI]:
    url = _launcher.DEFAULT_URL_FOR_TEST
    process = _launcher.popen_launch_server(MODEL, url, timeout=_launcher.DEFAULT_TIMEOUT_FOR_SERVER_LAUNCH)
    yield openai.OpenAI(api_key="sk-test", base_url=f"{url}/v1")
    _launcher.kill_process_tree(process.pid)


@pytest.mark.parametrize("check", [pytest.param(check, id=name) for name, check, _ in _calls._TESTS])
def test_tool_call(client: openai.OpenAI, check: Callable[[Any, str], None]) -> None:
    check(client, MODEL)


def test_streaming_responses(client: openai.OpenAI) -> None:
    _gpt_oss.BaseTestGptOss()._check_streaming_responses_api_request(MODEL)
