"""What one tenant's key can do about another's requests."""

from pathlib import Path

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
