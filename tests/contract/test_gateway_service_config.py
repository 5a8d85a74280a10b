"""The service config that clients in other languages load: a channel with it retries what may be retried."""

import json
from pathlib import Path
from typing import Any

import grpc
import pytest
from google.protobuf.duration_pb2 import Duration

import quire_client
from gateway_calls import asking, refused
from gateway_harness import Harness, encoded
from quire.inference.v1 import inference_pb2 as api
from quire.inference.v1.inference_pb2_grpc import InferenceServiceStub
from quire.scheduler.v1 import scheduler_pb2 as scheduler_v1
from scripted_scheduler import Script, answer_with

CONFIG = Path(quire_client.__file__).with_name("service_config.json").read_text()


def failing(times: int, answer: Script, reason: scheduler_v1.FailureReason, seconds: int = 0) -> Script:
    """Rejects so many requests, then answers."""
    left = times

    def script(session: Any, submit: Any) -> None:
        nonlocal left
        left -= 1
        if left < 0:
            answer(session, submit)
        else:
            session.fail(submit.key, reason, "", Duration(seconds=seconds))

    return script


def stub_of(quire: Harness) -> Any:
    options = (("grpc.service_config", CONFIG), ("grpc.enable_http_proxy", 0))
    return InferenceServiceStub(grpc.aio.insecure_channel(f"127.0.0.1:{quire.gateway.grpc_port}", options=options))


async def test_a_call_is_sent_again_while_there_is_no_capacity(quire: Harness) -> None:
    unavailable = scheduler_v1.FAILURE_REASON_UNAVAILABLE
    quire.scheduler.script = failing(3, answer_with(encoded("hello world")), unavailable)
    stream = stub_of(quire).StreamGenerate(asking(request_id="mine"))
    texts = [message.chunk.text async for message in stream]
    assert "".join(texts) == "hello world"
    assert len(quire.scheduler.all("submit")) == 4


@pytest.mark.parametrize(
    ("reason", "seconds"),
    [(scheduler_v1.FAILURE_REASON_UNAVAILABLE, 60), (scheduler_v1.FAILURE_REASON_INVALID, 0)],
    ids=["in a minute", "never"],
)
async def test_a_call_is_not_sent_again_that_would_fail_again(
    reason: scheduler_v1.FailureReason, seconds: int, quire: Harness
) -> None:
    quire.scheduler.script = failing(9, answer_with([]), reason, seconds)
    await refused(stub_of(quire).Generate(api.GenerateRequest(generation=asking().generation)))
    assert len(quire.scheduler.all("submit")) == 1


def test_its_services_are_in_the_contract() -> None:
    services = {name["service"] for method in json.loads(CONFIG)["methodConfig"] for name in method["name"]}
    assert services == {service.full_name for service in api.DESCRIPTOR.services_by_name.values()}
