"""A server with OpenAI's paths over HTTP, whose responses are scripted. It computes each named request once."""

import asyncio
import json
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

from aiohttp import web

from ports import lasting_port


@dataclass(frozen=True)
class Reply:
    """A response; None as body: the connection is closed instead."""

    status: int = 200
    body: bytes | None = b"{}"
    headers: dict[str, str] = field(default_factory=dict)

    @classmethod
    def error(cls, status: int, message: str, code: str = "invalid_field", **headers: str) -> "Reply":
        """OpenAI's error body."""
        body = json.dumps({"error": {"message": message, "code": code}}).encode()
        return cls(status, body, {name.replace("_", "-"): value for name, value in headers.items()})


@dataclass(frozen=True)
class Received:
    """A request that came."""

    path: str
    name: str | None
    authorization: str | None
    body: Any


BREAK = Reply(body=None)


class ScriptedApi:
    """Answers GET by `pages`, and POST by the next of `script`, or else with the prompt of the body."""

    def __init__(self) -> None:
        self.port = lasting_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self.pages: dict[str, Reply] = {"/v1/models": Reply(body=b'{"data": []}')}
        self.script: list[Reply] = []
        self.posts: list[Received] = []
        self.num_computed: Counter[str | None] = Counter()
        self.going = asyncio.Event()
        """Requests wait for it before they are answered."""
        self.going.set()
        self.num_at_once = self.most_at_once = 0
        self._answers: dict[str, bytes] = {}
        self._runner: web.AppRunner | None = None

    async def start(self) -> None:
        """Listens."""
        app = web.Application()
        app.router.add_get("/{path:.*}", self._get)
        app.router.add_post("/{path:.*}", self._post)
        self._runner = web.AppRunner(app, shutdown_timeout=0, access_log=None)
        await self._runner.setup()
        await web.TCPSite(self._runner, "127.0.0.1", self.port).start()

    async def stop(self) -> None:
        """Closes the listener and all connections."""
        if self._runner is not None:
            await self._runner.cleanup()
            self._runner = None

    async def _get(self, request: web.Request) -> web.StreamResponse:
        return self._send(request, self.pages.get(request.path, Reply(404)))

    async def _post(self, request: web.Request) -> web.StreamResponse:
        headers, body = request.headers, await request.json()
        name = headers.get("idempotency-key")
        self.posts.append(Received(request.path, name, headers.get("authorization"), body))
        self.num_at_once += 1
        self.most_at_once = max(self.most_at_once, self.num_at_once)
        try:
            await self.going.wait()
        finally:
            self.num_at_once -= 1
        if self.script:
            return self._send(request, self.script.pop(0))
        if name is None or name not in self._answers:
            self.num_computed[name] += 1
        answer = json.dumps({"text": body.get("prompt")}).encode()
        return self._send(request, Reply(200, self._answers.setdefault(name or "", answer), {"x-request-id": "r-1"}))

    def _send(self, request: web.Request, reply: Reply) -> web.StreamResponse:
        if reply.body is None:
            assert request.transport is not None
            request.transport.abort()
            return web.Response()
        return web.Response(status=reply.status, body=reply.body, headers=reply.headers)


@asynccontextmanager
async def scripted_api() -> AsyncIterator[ScriptedApi]:
    """Runs a server until the end of `async with`."""
    api = ScriptedApi()
    await api.start()
    try:
        yield api
    finally:
        api.going.set()
        await api.stop()
