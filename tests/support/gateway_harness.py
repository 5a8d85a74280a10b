"""A gateway for tests: the real one with both listeners, in the test's process, connected to a scripted scheduler."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import grpc
import httpx
from google.rpc import error_details_pb2, status_pb2
from grpc_health.v1 import health_pb2, health_pb2_grpc
from tokenizers import Tokenizer

from gateway_svc.gateway import Gateway
from gateway_svc.model_catalog import ModelCatalog
from gateway_svc.settings import GatewaySettings
from quire.inference.v1.inference_pb2_grpc import InferenceServiceStub
from quire.scheduler.v1 import scheduler_pb2 as scheduler_v1
from scripted_scheduler import ScriptedScheduler, serving
from svc_common.models import tokenizer_fingerprint
from tiny_model import CONTEXT_LENGTH, tiny_tokenizer

if TYPE_CHECKING:
    from quire.inference.v1.inference_pb2_grpc import InferenceServiceAsyncStub

MODEL = "tiny"


@dataclass(frozen=True)
class Harness:
    """A gateway that is ready, its scheduler, and a client of either protocol."""

    gateway: Gateway
    scheduler: ScriptedScheduler
    channel: grpc.aio.Channel
    stub: "InferenceServiceAsyncStub"
    http: httpx.AsyncClient

    async def wait_for_health(self, status: "health_pb2.HealthCheckResponse.ServingStatus") -> None:
        """Waits until the gateway's health is as given."""
        watch = health_pb2_grpc.HealthStub(self.channel).Watch(health_pb2.HealthCheckRequest())
        async with asyncio.timeout(60):
            async for response in watch:
                if response.status == status:
                    break
        watch.cancel()

    async def metric(self, line: str) -> float:
        """The value of one line of /metrics, 0 where it is not there."""
        text = (await self.http.get("/metrics")).text
        values = [float(row.rsplit(" ", 1)[1]) for row in text.splitlines() if row.rsplit(" ", 1)[0] == line]
        return values[0] if values else 0.0


def scheduler_model(directory: Path, **changes: Any) -> scheduler_v1.Model:
    """The model in a directory, in a status."""
    facts: dict[str, Any] = {
        "name": MODEL,
        "tokenizer_fingerprint": tokenizer_fingerprint(directory),
        "context_length": CONTEXT_LENGTH,
        "vocab_size": Tokenizer.from_file(str(directory / "tokenizer.json")).get_vocab_size(),
    }
    return scheduler_v1.Model(**(facts | changes))


@asynccontextmanager
async def running_gateway(
    directory: Path, context_length: int = CONTEXT_LENGTH, vocab_size: int | None = None, **settings: Any
) -> AsyncIterator[Harness]:
    """A ready gateway for the model in a directory."""
    facts: dict[str, Any] = {"context_length": context_length}
    if vocab_size is not None:
        facts["vocab_size"] = vocab_size
    async with (
        serving(ScriptedScheduler(scheduler_model(directory, **facts))) as scheduler,
        gateway_at(scheduler, directory, [scheduler.address], **settings) as harness,
    ):
        await harness.wait_for_health(health_pb2.HealthCheckResponse.SERVING)
        yield harness


@asynccontextmanager
async def gateway_at(
    scheduler: ScriptedScheduler, directory: Path, addresses: list[str], **settings: Any
) -> AsyncIterator[Harness]:
    """A gateway that dials `addresses`, ready or not, for the model in a directory unless `models` is set."""
    of_one_model = {} if "models" in settings else {"model": str(directory), "served_model_name": MODEL}
    chosen = GatewaySettings(
        http_port=0,
        grpc_port=0,
        schedulers_at=",".join(addresses),
        **({"drain_grace": 0, "insecure": True} | of_one_model | settings),
    )
    gateway = Gateway(chosen, ModelCatalog.load(chosen.model_settings(), chosen.max_logprobs, chosen.seed))
    await gateway.start()
    try:
        async with (
            grpc.aio.insecure_channel(f"127.0.0.1:{gateway.grpc_port}") as channel,
            plain_client(gateway.http_port) as http,
        ):
            yield Harness(gateway, scheduler, channel, InferenceServiceStub(channel), http)
    finally:
        await gateway.stop()


def plain_client(port: int) -> httpx.AsyncClient:
    """A client of HTTP. It does not read the certificates of authorities, which would take longer than most tests."""
    return httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}", trust_env=False, timeout=60, verify=False)


async def rest_of(call: Any) -> list[Any]:
    """The remaining messages of a stream."""
    messages = []
    while (message := await call.read()) is not grpc.aio.EOF:
        messages.append(message)
    return messages


def reason_of(error: grpc.aio.AioRpcError) -> tuple[str, str]:
    """ErrorInfo.reason and the field of a gRPC error."""
    details = dict(error.trailing_metadata() or ())["grpc-status-details-bin"]
    status = status_pb2.Status.FromString(details)
    info, violation = error_details_pb2.ErrorInfo(), error_details_pb2.BadRequest()
    for detail in status.details:
        detail.Unpack(info)
        detail.Unpack(violation)
    fields = [one.field for one in violation.field_violations]
    return info.reason, fields[0] if fields else ""


def encoded(text: str) -> list[int]:
    """Tokens of a text in the tiny vocabulary."""
    return tiny_tokenizer().encode(text, add_special_tokens=False).ids
