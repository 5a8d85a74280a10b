"""What one tenant's key can do about another's requests."""

import json
from pathlib import Path
from typing import Any

from gateway_calls import asking, refused
from gateway_harness import encoded, running_gateway
from quire.inference.v1 import inference_pb2 as api
from scripted_scheduler import answer_with
from tiny_model import EOS

KEYS = "".join(f'[[keys]]\nkey = "the-key-of-{name}-0000"\ntenant = "{name}"\n' for name in ("alice", "bob"))


def key_of(name: str) -> tuple[tuple[str, str], ...]:
    return (("authorization", f"Bearer the-key-of-{name}-0000"),)


async def test_a_tenant_cannot_reach_anothers_request_by_its_name(model_directory: Path, tmp_path: Path) -> None:
    keys = tmp_path / "keys.toml"
    keys.write_text(KEYS)
    async with running_gateway(model_directory, api_keys=keys) as quire:
        quire.scheduler.script = answer_with(encoded("hello world"), stop_token_id=EOS)
        named = api.GenerateRequest(generation=asking(request_id="job").generation)
        await quire.stub.Generate(named, metadata=key_of("alice"))
        (submit,) = quire.scheduler.all("submit")
        await quire.stub.Cancel(api.CancelRequest(request_id="job"), metadata=key_of("bob"))
        await refused(quire.stub.Resume(api.ResumeRequest(request_id="job"), metadata=key_of("bob"), timeout=1))
        await quire.stub.Generate(named, metadata=key_of("bob"))
        # The scheduler finds a request by the key that the gateway makes of tenant and name.
        others = [one.key for kind in ("cancel", "attach", "submit") for one in quire.scheduler.all(kind)]
        others.remove(submit.key)
        assert others
        assert submit.key not in others


HEADERS = {**dict(key_of("alice")), "content-type": "application/json"}
CHAT: dict[str, Any] = {"messages": [{"role": "user", "content": "a"}], "max_tokens": 5}


async def test_a_client_divides_the_prefix_cache_of_its_tenant(model_directory: Path, tmp_path: Path) -> None:
    keys = tmp_path / "keys.toml"
    keys.write_text(KEYS)
    bodies: dict[str, dict[str, Any]] = {
        "/v1/completions": {"prompt": "a"},
        "/v1/chat/completions": CHAT,
        "/v1/chat/completions/batch": {**CHAT, "messages": [CHAT["messages"]]},
        "/v1/responses": {"input": "a"},
        "/v1/messages": CHAT,
    }
    async with running_gateway(model_directory, api_keys=keys) as quire:
        quire.scheduler.script = answer_with(encoded("hello"), stop_token_id=EOS)

        async def salt(name: str, path: str, cache_salt: str | None) -> bytes:
            fields = {**bodies[path], "cache_salt": cache_salt}
            response = await quire.http.post(path, json=fields, headers=dict(key_of(name)))
            assert response.status_code == 200
            return bytes((await quire.scheduler.next("submit")).cache_salt)

        for path in bodies:
            salts = [await salt(name, path, one) for name in ("alice", "bob") for one in (None, "x", "y", "x")]
            assert (salts[1], salts[5]) == (salts[3], salts[7])
            # One without a salt of its own, and one for each text, of each tenant.
            assert len(set(salts)) == 6
            assert salts[0] == await salt("alice", "/v1/completions", None)
            for wrong in ("", "x" * 1025, "\ud800"):
                response = await quire.http.post(
                    path, content=json.dumps({**bodies[path], "cache_salt": wrong}), headers=HEADERS
                )
                assert response.status_code == 400
                assert "cache_salt: " in response.json()["error"]["message"]


async def test_a_request_with_another_salt_is_another_one(model_directory: Path) -> None:
    async with running_gateway(model_directory) as quire:
        quire.scheduler.script = answer_with(encoded("hello"), stop_token_id=EOS)
        for cache_salt in (None, "x", "x"):
            await quire.http.post("/v1/completions", json={"prompt": "a", "seed": 1, "cache_salt": cache_salt})
        first, *others = [one.body_digest for one in quire.scheduler.all("submit")]
        assert (others[0] == others[1], first in others) == (True, False)
