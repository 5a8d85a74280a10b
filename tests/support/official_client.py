"""OpenAI's own Python client, for tests of gateways."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import openai

from gateway_harness import Harness


@asynccontextmanager
async def official_client(quire: Harness, path: str = "/v1") -> AsyncIterator[openai.AsyncOpenAI]:
    """The client of a gateway, without retries and settings of the environment. `path` is that of its base URL."""
    async with openai.DefaultAsyncHttpxClient(trust_env=False) as http:
        yield openai.AsyncOpenAI(
            base_url=f"http://127.0.0.1:{quire.gateway.http_port}{path}",
            api_key="unused",
            max_retries=0,
            http_client=http,
        )
