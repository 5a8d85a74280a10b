"""Services beyond loopback, each with the certificate of its role: they serve clients, and attacks on ports fail."""

from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from urllib.request import urlopen

import grpc
import pytest
from transformers import LlamaConfig

from certificates import Authority, Certificate
from environments import bare_environment
from inner_calls import METHODS, NO_ANSWER, TIMEOUT, is_live, status
from llama_models import SIZES, save_model
from quire_client import Client, QuireError
from quire_client.admin import AdminClient
from redis_server import redis_server
from service_process import service_process
from svc_common.channels import internal_channel
from svc_common.mutual_tls import server_name
from svc_common.service_roles import ServiceRole
from tiny_model import make_model_directory, tiny_tokenizer

CALLEES = {
    "schedulers": ServiceRole.SCHEDULER,
    "scheduler_admin": ServiceRole.SCHEDULER,
    "workers": ServiceRole.WORKER,
}
CALLERS = {"schedulers": ServiceRole.GATEWAY, "scheduler_admin": ServiceRole.ADMIN, "workers": ServiceRole.SCHEDULER}


@dataclass(frozen=True)
class Secured:
    """Addresses of a deployment with mutual TLS, and the certificates of its roles."""

    gateway: str
    inner: Mapping[str, str]
    metrics: Mapping[str, str]
    certificates: Mapping[ServiceRole, Certificate]

    def channel(self, port: str, certificate: Certificate) -> grpc.aio.Channel:
        """A channel to an inner port with a certificate."""
        credentials = grpc.ssl_channel_credentials(
            certificate.ca.read_bytes(), certificate.key.read_bytes(), certificate.certificate.read_bytes()
        )
        return internal_channel(self.inner[port], credentials, server_name(CALLEES[port]))


@pytest.fixture(scope="module")
def secured(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Secured]:
    """A worker, a scheduler and a gateway that listen on all addresses."""
    directory = tmp_path_factory.mktemp("secured")
    model = directory / "model"
    model.mkdir()
    save_model(model, LlamaConfig(**SIZES | {"vocab_size": tiny_tokenizer().get_vocab_size()}))
    (model / "tokenizer.json").unlink()
    tokenizer = make_model_directory(directory / "tokenizer")
    authority = Authority(directory / "ca")
    certificates = {role: authority.issue_for(role) for role in ServiceRole}
    common = bare_environment() | {
        "QUIRE_HOST": "0.0.0.0",
        "QUIRE_MODEL": str(model),
        "QUIRE_TOKENIZER": str(tokenizer),
        "QUIRE_NUM_BLOCKS": "50",
        "QUIRE_NUM_THREADS": "1",
    }
    common |= {f"QUIRE_{name}_PORT": "0" for name in ("HTTP", "GRPC", "SCHEDULER", "SCHEDULER_METRICS", "WORKER")}
    common |= {"QUIRE_WORKER_METRICS_PORT": "0", "QUIRE_SCHEDULER_ADMIN_PORT": "0"}

    def environment(role: ServiceRole, **variables: str) -> dict[str, str]:
        return common | certificates[role].variables | variables

    with ExitStack() as stack:
        redis_url = stack.enter_context(redis_server(directory))
        worker = stack.enter_context(service_process("worker_svc", environment(ServiceRole.WORKER), directory))
        of_worker = worker.logged("ready")
        of_scheduler = stack.enter_context(
            service_process(
                "scheduler_svc",
                environment(
                    ServiceRole.SCHEDULER,
                    QUIRE_SCHEDULER_ADMIN_HOST="0.0.0.0",
                    QUIRE_REDIS_URL=redis_url,
                    QUIRE_WORKERS_AT=f"127.0.0.1:{of_worker['port']}",
                ),
                directory,
            )
        ).logged("ready")
        schedulers_at = f"127.0.0.1:{of_scheduler['port']}"
        gateway = stack.enter_context(
            service_process(
                "gateway_svc", environment(ServiceRole.GATEWAY, QUIRE_SCHEDULERS_AT=schedulers_at), directory
            )
        ).logged("listening")
        yield Secured(
            gateway=f"127.0.0.1:{gateway['grpc_port']}",
            inner={
                "schedulers": schedulers_at,
                "scheduler_admin": f"127.0.0.1:{of_scheduler['admin_port']}",
                "workers": f"127.0.0.1:{of_worker['port']}",
            },
            metrics={
                "scheduler": f"127.0.0.1:{of_scheduler['metrics_port']}",
                "worker": f"127.0.0.1:{of_worker['metrics_port']}",
            },
            certificates=certificates,
        )


def test_clients_are_served_and_operators_too(secured: Secured, monkeypatch: pytest.MonkeyPatch) -> None:
    with Client(secured.gateway) as client:
        assert client.generate([5, 6, 7], max_tokens=4).token_ids
    for name, value in secured.certificates[ServiceRole.ADMIN].variables.items():
        monkeypatch.setenv(name, value)
    with AdminClient(secured.inner["scheduler_admin"]) as admin:
        assert admin.requests().num_live == 0
    monkeypatch.setenv("QUIRE_MTLS_KEY_FILE", "")
    with pytest.raises(QuireError, match="QUIRE_MTLS_KEY_FILE is not set"):
        AdminClient(secured.inner["scheduler_admin"])


def test_health_needs_no_certificate_on_the_metrics_port(secured: Secured) -> None:
    for path in ("/live", "/health"):
        for service in ("scheduler", "worker"):
            with urlopen(f"http://{secured.metrics[service]}{path}", timeout=TIMEOUT) as response:
                assert b"SERVING" in response.read()
                assert response.status == 200


@pytest.mark.parametrize("name", METHODS)
async def test_without_a_certificate_nothing_answers(secured: Secured, name: str) -> None:
    ca = secured.certificates[ServiceRole.ADMIN].ca.read_bytes()
    for credentials in (None, grpc.ssl_channel_credentials(ca)):
        async with internal_channel(secured.inner[name], credentials, server_name(CALLEES[name])) as channel:
            with pytest.raises(grpc.aio.AioRpcError) as raised:
                await is_live(channel)
            assert raised.value.code() in NO_ANSWER
            for method in METHODS[name]:
                assert (await status(channel, method))[0] in NO_ANSWER, method


@pytest.mark.parametrize("name", METHODS)
async def test_a_role_makes_its_own_calls_and_no_others(secured: Secured, name: str) -> None:
    for role, certificate in secured.certificates.items():
        async with secured.channel(name, certificate) as channel:
            assert await is_live(channel)
            for method in METHODS[name]:
                code, details = await status(channel, method)
                if role is (ServiceRole.ADMIN if "reflection" in method else CALLERS[name]):
                    assert code not in (grpc.StatusCode.PERMISSION_DENIED, grpc.StatusCode.UNAUTHENTICATED), details
                else:
                    assert (code, role in details) == (grpc.StatusCode.PERMISSION_DENIED, True), (role, method)


async def test_a_worker_cannot_take_the_place_of_a_scheduler(secured: Secured) -> None:
    """Otherwise gateways would send it all prompts."""
    gateway = secured.certificates[ServiceRole.GATEWAY]
    credentials = grpc.ssl_channel_credentials(
        gateway.ca.read_bytes(), gateway.key.read_bytes(), gateway.certificate.read_bytes()
    )
    async with internal_channel(secured.inner["workers"], credentials, server_name(ServiceRole.SCHEDULER)) as channel:
        with pytest.raises(grpc.aio.AioRpcError) as raised:
            await is_live(channel)
    assert raised.value.code() in NO_ANSWER
