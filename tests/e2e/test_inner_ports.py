"""Attacks on the inner ports of a deployment that `make run` starts: a role may make its own calls, and no others."""

import asyncio
import os
import stat
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
import httpx
import pytest
from transformers import LlamaConfig

from deployment import Deployment, deployment
from inner_calls import METHODS, TIMEOUT, is_live, status, token
from llama_models import SIZES, save_model
from quire.scheduler.v1.scheduler_pb2_grpc import SchedulerServiceStub
from quire.worker.v1 import worker_pb2
from quire.worker.v1.worker_pb2_grpc import WorkerServiceStub
from quire_client import Client, QuireError
from quire_client.admin import AdminClient
from svc_common.service_roles import ServiceRole
from tiny_model import make_model_directory, tiny_tokenizer

API_KEY = "the-own-key-of-a-tenant"
UNAUTHENTICATED, DENIED = grpc.StatusCode.UNAUTHENTICATED, grpc.StatusCode.PERMISSION_DENIED
CALLEES = {
    "schedulers": ServiceRole.SCHEDULER,
    "scheduler_admin": ServiceRole.SCHEDULER,
    "workers": ServiceRole.WORKER,
}
CALLERS = {"schedulers": ServiceRole.GATEWAY, "scheduler_admin": ServiceRole.ADMIN, "workers": ServiceRole.SCHEDULER}


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Deployment]:
    """One deployment for all attacks, with a tiny model."""
    directory = tmp_path_factory.mktemp("model")
    save_model(directory, LlamaConfig(**SIZES | {"vocab_size": tiny_tokenizer().get_vocab_size()}))
    (directory / "tokenizer.json").unlink()
    tokenizer = make_model_directory(tmp_path_factory.mktemp("tokenizer") / "tiny")
    keys = directory / "keys.toml"
    keys.write_text(f'[[keys]]\nkey = "{API_KEY}"\ntenant = "tests"\n')
    settings: dict[str, str | int] = {
        "model": str(directory),
        "tokenizer": str(tokenizer),
        "num_blocks": 50,
        "num_threads": 1,
        "gateways": 2,
        "api_keys": str(keys),
    }
    with deployment(**settings, log_level="debug") as started:
        yield started


@pytest.fixture
def secret(running: Deployment) -> bytes:
    return running.secret_file.read_bytes().strip()


@asynccontextmanager
async def port(running: Deployment, name: str) -> AsyncIterator[grpc.aio.Channel]:
    async with grpc.aio.insecure_channel(running.state[name][0]) as channel:
        yield channel


@pytest.mark.parametrize("name", METHODS)
async def test_without_a_credential_nothing_answers_but_health(running: Deployment, name: str) -> None:
    async with port(running, name) as channel:
        assert await is_live(channel)
        for method in METHODS[name]:
            assert (await status(channel, method))[0] is UNAUTHENTICATED, method


@pytest.mark.parametrize("name", METHODS)
async def test_a_credential_of_another_deployment_is_none(running: Deployment, name: str) -> None:
    async with port(running, name) as channel:
        for caller in ServiceRole:
            metadata = token(os.urandom(32), caller, CALLEES[name])
            assert (await status(channel, METHODS[name][0], metadata))[0] is UNAUTHENTICATED


@pytest.mark.parametrize("name", METHODS)
async def test_a_credential_is_good_for_one_callee(running: Deployment, secret: bytes, name: str) -> None:
    async with port(running, name) as channel:
        for callee in set(ServiceRole) - {CALLEES[name]}:
            metadata = token(secret, CALLERS[name], callee)
            assert (await status(channel, METHODS[name][0], metadata))[0] is UNAUTHENTICATED


@pytest.mark.parametrize(
    ("caller", "name", "may"),
    [
        (ServiceRole.GATEWAY, "workers", "open a step stream, or ask a worker anything"),
        (ServiceRole.GATEWAY, "scheduler_admin", "see other tenants' requests"),
        (ServiceRole.WORKER, "schedulers", "submit, attach or cancel"),
        (ServiceRole.WORKER, "scheduler_admin", "see requests"),
        (ServiceRole.WORKER, "workers", "give steps to another worker"),
        (ServiceRole.SCHEDULER, "schedulers", "submit to another scheduler"),
        (ServiceRole.SCHEDULER, "scheduler_admin", "see requests"),
        (ServiceRole.ADMIN, "schedulers", "submit"),
        (ServiceRole.ADMIN, "workers", "give steps to a worker"),
    ],
)
async def test_a_role_may_not(running: Deployment, secret: bytes, caller: ServiceRole, name: str, may: str) -> None:
    metadata = token(secret, caller, CALLEES[name])
    async with port(running, name) as channel:
        for method in METHODS[name]:
            if caller is ServiceRole.ADMIN and "reflection" in method:
                continue  # operators may look at contracts
            code, details = await status(channel, method, metadata)
            assert (code, f"the role {caller} may not call" in details) == (DENIED, True), (method, may)


async def test_each_role_may_make_its_own_calls(running: Deployment, secret: bytes) -> None:
    async with port(running, "schedulers") as channel:
        open_session: Any = SchedulerServiceStub(channel).Session
        session = open_session(metadata=token(secret, ServiceRole.GATEWAY, ServiceRole.SCHEDULER), timeout=TIMEOUT)
        assert (await session.read()).epoch > 0
        session.cancel()
    async with port(running, "workers") as channel:
        metadata = token(secret, ServiceRole.SCHEDULER, ServiceRole.WORKER)
        described = await WorkerServiceStub(channel).Describe(
            worker_pb2.DescribeRequest(), metadata=metadata, timeout=TIMEOUT
        )
        assert described.num_blocks == 50
    with running.admin() as admin:
        assert admin.requests().num_live == 0
    with Client(running.grpc, api_key=API_KEY) as client:
        assert len(client.generate([5, 6, 7], max_tokens=4).token_ids) <= 4


def test_the_admin_client_needs_the_deployments_secret(
    running: Deployment, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)  # there is no run/deployment.secret here
    monkeypatch.delenv("QUIRE_DEPLOYMENT_SECRET_FILE", raising=False)
    address = running.state["scheduler_admin"][0]
    with AdminClient(address) as admin, pytest.raises(QuireError) as raised:
        admin.requests()
    assert raised.value.reason == "UNAUTHENTICATED"
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "deployment.secret").write_bytes(running.secret_file.read_bytes())
    with AdminClient(address) as admin:
        assert admin.requests().num_live == 0


@pytest.mark.parametrize("name", METHODS)
async def test_an_api_key_is_no_credential_of_an_inner_port(running: Deployment, name: str) -> None:
    metadata = (("authorization", f"Bearer {API_KEY}"), ("x-api-key", API_KEY))
    async with port(running, name) as channel:
        for method in METHODS[name]:
            assert (await status(channel, method, metadata))[0] is UNAUTHENTICATED, method


@pytest.mark.parametrize("gateway", [0, 1])
async def test_a_gateway_has_no_method_of_an_inner_port(running: Deployment, gateway: int) -> None:
    metadata = (("authorization", f"Bearer {API_KEY}"),)
    inner = {method for methods in METHODS.values() for method in methods if "reflection" not in method}
    async with grpc.aio.insecure_channel(running.state["grpc"][gateway]) as channel:
        for method in inner:
            assert (await status(channel, method, metadata))[0] is grpc.StatusCode.UNIMPLEMENTED, method
    paths = ("metrics", "requests", "explain", "reset_prefix_cache", "start_profile", "stop_profile", "v1/requests")
    async with httpx.AsyncClient(base_url=f"http://{running.state['http'][gateway]}") as client:
        client.headers["authorization"] = f"Bearer {API_KEY}"
        for path in paths:
            for method in ("GET", "POST"):
                assert (await client.request(method, f"/{path}")).status_code == 404, path
        assert (await client.get("/v1/models")).status_code == 200


def test_an_api_key_is_no_secret_of_the_admin_client(running: Deployment, tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    secret.write_text(API_KEY.ljust(64, "0"))
    calls: Sequence[Callable[[AdminClient], Any]] = (
        lambda admin: admin.requests(),
        lambda admin: admin.explain("any", tenant="tests"),
        lambda admin: admin.reset_prefix_cache(),
        lambda admin: admin.start_profile(),
        lambda admin: admin.stop_profile(),
    )
    with AdminClient(running.state["scheduler_admin"][0], secret_file=secret) as admin:
        for call in calls:
            with pytest.raises(QuireError) as raised:
                call(admin)
            assert raised.value.reason == "UNAUTHENTICATED"


async def test_rejections_are_logged_and_secrets_are_not(running: Deployment, secret: bytes) -> None:
    assert stat.S_IMODE(running.secret_file.stat().st_mode) == 0o600
    async with port(running, "workers") as channel:
        metadata = token(secret, ServiceRole.GATEWAY, ServiceRole.WORKER)
        assert (await status(channel, METHODS["workers"][0], metadata))[0] is DENIED
    async with asyncio.timeout(TIMEOUT):
        while "rejected a call to an inner port" not in (log := running.log.read_text()):
            await asyncio.sleep(0.05)
    for caller in ServiceRole:
        for callee in ServiceRole:
            assert token(secret, caller, callee)[0][1].split()[-1] not in log
    assert secret.decode() not in log
