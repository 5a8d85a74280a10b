"""Paths of lines of a batch are read as by a server, and failures of the API end the batch."""

import asyncio
import json
from typing import Any

import pytest

from quire_client.batch.lines import BatchError
from quire_client.batch.transport import Response
from quire_offline import LLM
from quire_offline.http_transport import EngineTransport

BODY = json.dumps({"prompt": "hello"}).encode()


def call(llm: LLM, path: str, app: Any = None) -> Response:
    """One call of a POST path, of another app where one is given."""

    async def run() -> Response:
        transport = EngineTransport(llm._thread.engine)
        if app is not None:
            transport._app = app
        try:
            response = await transport.call("POST", path, {"content-type": "application/json"}, BODY)
            assert isinstance(response, Response)
            return response
        finally:
            transport.close()

    return llm._thread.run(run())


def test_a_path_is_percent_decoded(llm: LLM) -> None:
    response = call(llm, "/toke%6Eize?a=b%20c")
    assert response.status == 200
    assert json.loads(response.body)["tokens"]


def test_a_path_that_is_no_url_is_not_found(llm: LLM) -> None:
    assert call(llm, "/v1/größe?ä=ö").status == 404


async def broken(scope: Any, receive: Any, send: Any) -> None:
    raise ZeroDivisionError


async def silent(scope: Any, receive: Any, send: Any) -> None:
    await asyncio.sleep(0)


@pytest.mark.parametrize(
    ("app", "text"), [(broken, "/tokenize: .* failed: ZeroDivisionError; start"), (silent, "/tokenize: .* without a")]
)
def test_an_api_that_fails_ends_the_batch(llm: LLM, app: Any, text: str) -> None:
    with pytest.raises(BatchError, match=text):
        call(llm, "/tokenize", app)
