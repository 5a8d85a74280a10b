"""Clients of the gRPC service that disconnect or cancel: the scheduler receives the command to end them."""

import grpc
import pytest

from gateway_calls import asking, refused
from gateway_harness import Harness, encoded, reason_of
from quire.inference.v1 import inference_pb2 as api
from quire.scheduler.v1 import scheduler_pb2 as scheduler_v1
from scripted_scheduler import answer_with


@pytest.mark.parametrize(("request_id", "kind"), [(None, "cancel"), ("mine", "detach")])
async def test_a_client_that_leaves_is_noticed(request_id: str | None, kind: str, quire: Harness) -> None:
    call = quire.stub.StreamGenerate(asking(request_id=request_id))
    submit = await quire.scheduler.next("submit")
    quire.scheduler.session.accept(submit.key)
    await call.read()
    call.cancel()
    assert (await quire.scheduler.next(kind)).key == submit.key
    await quire.http.get("/health")
    assert await quire.metric('quire_gateway_requests_in_flight{model="tiny"}') == 0


async def test_a_client_that_leaves_before_acceptance_is_noticed(quire: Harness) -> None:
    call = quire.stub.Generate(api.GenerateRequest(generation=asking().generation))
    submit = await quire.scheduler.next("submit")
    call.cancel()
    assert (await quire.scheduler.next("cancel")).key == submit.key


async def test_a_client_whose_deadline_passes_is_noticed(quire: Harness) -> None:
    call = quire.stub.StreamGenerate(asking(), timeout=2)
    submit = await quire.scheduler.next("submit")
    assert 0 < submit.time_left.ToTimedelta().total_seconds() < 3  # grpc rounds up
    error = await refused(call)
    assert error.code() is grpc.StatusCode.DEADLINE_EXCEEDED
    assert (await quire.scheduler.next("cancel")).key == submit.key


async def test_a_request_that_ends_is_neither_cancelled_nor_detached(quire: Harness) -> None:
    quire.scheduler.script = answer_with(encoded("hello world"))
    for request_id in (None, "mine"):
        await quire.stub.Generate(api.GenerateRequest(generation=asking(request_id=request_id).generation))
    assert quire.scheduler.all("cancel") == quire.scheduler.all("detach") == []


async def test_cancel_names_the_key_of_the_running_request(quire: Harness) -> None:
    call = quire.stub.StreamGenerate(asking(request_id="mine"))
    submit = await quire.scheduler.next("submit")
    quire.scheduler.session.accept(submit.key)
    await quire.stub.Cancel(api.CancelRequest(request_id="mine"))
    assert (await quire.scheduler.next("cancel")).key == submit.key
    quire.scheduler.session.fail(submit.key, scheduler_v1.FAILURE_REASON_CANCELLED)
    error = await refused(call)
    assert error.code() is grpc.StatusCode.CANCELLED
    assert reason_of(error)[0] == "CANCELLED"


async def test_cancel_works_for_the_id_that_an_acceptance_gave(quire: Harness) -> None:
    call = quire.stub.StreamGenerate(asking())
    submit = await quire.scheduler.next("submit")
    quire.scheduler.session.accept(submit.key)
    accepted = await call.read()
    assert isinstance(accepted, api.StreamGenerateResponse)
    await quire.stub.Cancel(api.CancelRequest(request_id=accepted.acceptance.request_id))
    assert (await quire.scheduler.next("cancel")).key == submit.key
    call.cancel()
