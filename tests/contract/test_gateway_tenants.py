"""What one tenant's calls may take from another's."""

import asyncio
import json
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from gateway_calls import asking
from gateway_harness import Harness, encoded, running_gateway
from gateway_svc.tokenizer import ModelTokenizer
from quire.inference.v1 import inference_pb2 as api
from scripted_scheduler import answer_with
from tiny_model import EOS


async def test_slow_texts_of_a_tenant_do_not_hold_the_chats_of_another(
    model_directory: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    keys = tmp_path / "keys.toml"
    keys.write_text(
        "".join(f'[[keys]]\nkey = "the-own-key-of-{name}"\ntenant = "{name}"\n' for name in ("alice", "bob"))
    )
    go_on = threading.Event()
    encode = ModelTokenizer._encode_text

    def encode_slowly(self: ModelTokenizer, text: str, max_tokens: int | None, add_special: bool) -> list[int]:
        if text == "slow":
            assert go_on.wait(120)
        return encode(self, text, max_tokens, add_special)

    monkeypatch.setattr(ModelTokenizer, "_encode_text", encode_slowly)
    alice, bob = [(("authorization", f"Bearer the-own-key-of-{name}"),) for name in ("alice", "bob")]
    async with running_gateway(model_directory, api_keys=keys) as quire:
        quire.scheduler.script = answer_with(encoded("hello world"), stop_token_id=EOS)
        slow = [
            asyncio.ensure_future(quire.stub.Tokenize(api.TokenizeRequest(text="slow"), metadata=alice))
            for _ in range(12)
        ]
        await asyncio.sleep(0.1)
        try:
            generate = api.GenerateRequest(generation=asking().generation)
            await asyncio.wait_for(quire.stub.Generate(generate, metadata=bob), 60)
        finally:
            go_on.set()
        await asyncio.gather(*slow)


async def test_parsing_a_large_body_does_not_stop_other_calls(quire: Harness, monkeypatch: pytest.MonkeyPatch) -> None:
    parsing, go_on = threading.Event(), threading.Event()

    def parse_slowly(data: bytes, **options: Any) -> Any:
        parsing.set()
        assert go_on.wait(60)
        return json.loads(data, **options)

    monkeypatch.setattr("gateway_svc.http_api.json_body.json", SimpleNamespace(loads=parse_slowly))
    large = asyncio.create_task(quire.http.post("/v1/completions", json={"prompt": "a" * 2**20}))
    async with asyncio.timeout(60):
        while not parsing.is_set():
            await asyncio.sleep(0.001)
    try:
        assert (await quire.http.get("/live")).status_code == 200
    finally:
        go_on.set()
    assert (await large).json()["error"]["code"] == "context_length_exceeded"
