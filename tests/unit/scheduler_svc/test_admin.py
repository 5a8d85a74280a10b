"""The admin service over a real channel, over a scripted engine."""

from collections.abc import AsyncIterator, Awaitable, Iterable, Iterator
from dataclasses import replace
from datetime import timedelta
from functools import partial
from typing import NoReturn

import grpc
import pytest
from google.rpc import error_details_pb2, status_pb2
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from quire.admin.v1 import admin_pb2 as admin_v1
from quire.admin.v1.admin_pb2_grpc import AdminServiceStub
from quire.scheduler.v1 import scheduler_pb2 as scheduler_v1
from scheduler_svc.admin import AdminServicer, admin_server
from scheduler_svc.core.explain import Explanation, SequenceExplanation, SequenceStatus, Summary
from scheduler_svc.core.kv.cache_reset import CacheReset
from scheduler_svc.core.limits import SchedulerLimits
from scheduler_svc.core.request import PreemptionMethod, PreemptionRecord
from scheduler_svc.core.scheduler import Scheduler
from scheduler_svc.core.step import MemoryPressure
from scheduler_svc.engine import EngineSettings, SchedulerEngine
from scheduler_svc.model_versions import WorkerName
from scheduler_svc.request_log import RequestLog
from scheduler_svc.store.redis import RedisStore
from svc_common.identity import InsecureIdentity
from svc_common.keys import request_key

SERVICE = "quire.admin.v1.AdminService"
KEY = request_key("default", "mine")


def explanation(*sequences: SequenceExplanation, time_left: float | None = None) -> Explanation:
    return Explanation(
        key=KEY,
        tenant="default",
        policy="fair",
        priority=-1,
        effective_priority=2,
        tenant_debt=40.5,
        age=61.25,
        time_left=time_left,
        num_prompt=10,
        max_tokens=20,
        num_waiting=7,
        sequences=sequences,
    )


def sequence(index: int = 0, status: SequenceStatus = SequenceStatus.QUEUED) -> SequenceExplanation:
    return SequenceExplanation(index, status, 10, 4, 0, 3, 2)


def summary(place: int, tenant: str = "a") -> Summary:
    return Summary(f"{place:04}", tenant, place, SequenceStatus.RUNNING, 60.0 - place / 100, 5, place)


class Engine:
    """An engine that counts the summaries it has created."""

    def __init__(self) -> None:
        self.known: dict[str, Explanation] = {}
        self.live: list[Summary] = []
        self.num_made = 0
        self.set_apart: dict[str, str] = {}
        self.short_of_memory: list[tuple[WorkerName, MemoryPressure]] = []

    def explain(self, key: str) -> Explanation | None:
        return self.known.get(key)

    def summaries(self, tenant: str | None) -> Iterable[Summary]:
        def made() -> Iterator[Summary]:
            for one in self.live:
                if tenant in (None, one.tenant):
                    self.num_made += 1
                    yield one

        return made()

    def num_live(self, tenant: str | None) -> int:
        return sum(tenant in (None, one.tenant) for one in self.live)

    def worker_names(self, model: str | None) -> list[WorkerName]:
        return []

    def workers_short_of_memory(self, model: str | None) -> Iterable[tuple[WorkerName, MemoryPressure]]:
        return [short for short in self.short_of_memory if model in (None, short[0].model)]

    def reset_prefix_caches(self, model: str | None) -> Iterable[tuple[WorkerName, CacheReset]]:
        return []


@pytest.fixture
def engine() -> Engine:
    return Engine()


@pytest.fixture
async def channel(engine: Engine) -> AsyncIterator[grpc.aio.Channel]:
    servicer = AdminServicer()
    servicer.lead(engine)
    server, health, port = admin_server(InsecureIdentity(), servicer, "127.0.0.1", 0)
    await server.start()
    await health.set_serving(True)
    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
        yield channel
    await server.stop(None)


def named(request_id: str = "mine", **more: object) -> admin_v1.ExplainRequest:
    name = admin_v1.RequestName(request_id=request_id, **more)  # type: ignore[arg-type]
    return admin_v1.ExplainRequest(name=name)


async def refused(call: Awaitable[object]) -> tuple[grpc.StatusCode, str, str]:
    """Status, reason and field of the error that a call ends with."""
    with pytest.raises(grpc.aio.AioRpcError) as error:
        await call
    details = dict(error.value.trailing_metadata() or ())["grpc-status-details-bin"]
    info, violation = error_details_pb2.ErrorInfo(), error_details_pb2.BadRequest()
    for detail in status_pb2.Status.FromString(details).details:
        detail.Unpack(info)
        detail.Unpack(violation)
    fields = [one.field for one in violation.field_violations]
    return error.value.code(), info.reason, fields[0] if fields else ""


@pytest.mark.parametrize(
    "request_",
    [named(), named(tenant="default", prompt=0), admin_v1.ExplainRequest(key=KEY)],
    ids=["name", "all", "key"],
)
async def test_a_request_is_found_by_name_or_key(
    request_: admin_v1.ExplainRequest, engine: Engine, channel: grpc.aio.Channel
) -> None:
    engine.known[KEY] = explanation(time_left=1.5)
    explained = await AdminServiceStub(channel).Explain(request_)
    assert (explained.key, explained.tenant, explained.policy) == (KEY, "default", "fair")
    assert (explained.priority, explained.effective_priority, explained.tenant_debt) == (-1, 2, 40.5)
    assert (explained.age.ToTimedelta(), explained.time_left.ToTimedelta()) == (
        timedelta(seconds=61.25),
        timedelta(seconds=1.5),
    )
    assert (explained.num_prompt_tokens, explained.max_tokens, explained.num_waiting) == (10, 20, 7)


async def test_workers_that_are_set_apart_are_named(engine: Engine, channel: grpc.aio.Channel) -> None:
    engine.set_apart = {"10.0.0.1:50053": "its epoch"}
    (apart,) = (await AdminServiceStub(channel).ListRequests(admin_v1.ListRequestsRequest())).workers_set_apart
    assert apart == admin_v1.WorkerSetApart(worker="10.0.0.1:50053", why="its epoch")


async def test_workers_that_are_short_of_memory_are_named(engine: Engine, channel: grpc.aio.Channel) -> None:
    workers = [WorkerName("10.0.0.1:50053", "tiny"), WorkerName("10.0.0.2:50053", "other")]
    engine.short_of_memory = [(workers[0], MemoryPressure.HIGH), (workers[1], MemoryPressure.CRITICAL)]
    engine.known[KEY] = replace(explanation(), model="other")
    high, critical = (
        await AdminServiceStub(channel).ListRequests(admin_v1.ListRequestsRequest())
    ).workers_short_of_memory
    assert (high.worker, high.model, high.pressure) == (*workers[0], admin_v1.MEMORY_PRESSURE_HIGH)
    assert (critical.worker, critical.model, critical.pressure) == (*workers[1], admin_v1.MEMORY_PRESSURE_CRITICAL)
    assert list((await AdminServiceStub(channel).Explain(named())).workers_short_of_memory) == [critical]


@pytest.mark.parametrize("other", [named("yours"), named(tenant="a"), named(prompt=1)], ids=["id", "tenant", "prompt"])
async def test_another_name_is_not_found(
    other: admin_v1.ExplainRequest, engine: Engine, channel: grpc.aio.Channel
) -> None:
    engine.known[KEY] = explanation()
    answer = await refused(AdminServiceStub(channel).Explain(other))
    assert answer == (grpc.StatusCode.NOT_FOUND, "NOT_FOUND", "name")


async def test_a_request_must_be_named(channel: grpc.aio.Channel) -> None:
    answer = await refused(AdminServiceStub(channel).Explain(admin_v1.ExplainRequest()))
    assert answer == (grpc.StatusCode.INVALID_ARGUMENT, "INVALID_FIELD", "request")


@pytest.mark.parametrize("status", SequenceStatus)
async def test_every_state_is_explained(status: SequenceStatus, engine: Engine, channel: grpc.aio.Channel) -> None:
    engine.known[KEY] = explanation(sequence(status=status))
    explained = await AdminServiceStub(channel).Explain(named())
    assert admin_v1.SequenceState.Name(explained.sequences[0].state) == f"SEQUENCE_STATE_{status.name}"


async def test_what_a_sequence_holds_and_waits_for(engine: Engine, channel: grpc.aio.Channel) -> None:
    preemption = PreemptionRecord(PreemptionMethod.RECOMPUTE, swap_seconds=0.25, recompute_seconds=0.125)
    waiting = SequenceExplanation(
        index=1,
        status=SequenceStatus.WAITING_FOR_PREFIX,
        num_known=30,
        num_computed=16,
        num_generated=5,
        num_device_blocks=1,
        num_host_blocks=2,
        num_missing_blocks=3,
        num_ahead=0,
        awaits_key="another",
        num_preemptions=4,
        last_preemption=preemption,
        predicted_start=0.0,
    )
    engine.known[KEY] = explanation(sequence(0, SequenceStatus.RUNNING), waiting)
    running, explained = (await AdminServiceStub(channel).Explain(named())).sequences
    assert (
        explained.index,
        explained.num_known_tokens,
        explained.num_computed_tokens,
        explained.num_generated_tokens,
    ) == (1, 30, 16, 5)
    assert (explained.num_device_blocks, explained.num_host_blocks, explained.num_missing_blocks) == (1, 2, 3)
    assert (explained.HasField("num_ahead"), explained.num_ahead, explained.awaits_key, explained.num_preemptions) == (
        True,
        0,
        "another",
        4,
    )
    assert explained.last_preemption.choice == admin_v1.RETURN_RECOMPUTE
    assert explained.last_preemption.swap_estimate.ToTimedelta() == timedelta(seconds=0.25)
    assert explained.last_preemption.recompute_estimate.ToTimedelta() == timedelta(seconds=0.125)
    assert explained.HasField("predicted_start")
    for absent in ("num_ahead", "awaits_key", "last_preemption", "predicted_start"):
        assert not running.HasField(absent)


async def test_the_oldest_requests_are_listed(engine: Engine, channel: grpc.aio.Channel) -> None:
    engine.live = [summary(place) for place in range(300)]
    listed = await AdminServiceStub(channel).ListRequests(admin_v1.ListRequestsRequest())
    assert [one.key for one in listed.requests] == [f"{place:04}" for place in range(100)]
    assert (listed.num_live, engine.num_made) == (300, 100)
    last = listed.requests[-1]
    assert (last.tenant, last.priority, last.state) == ("a", 99, admin_v1.SEQUENCE_STATE_RUNNING)
    assert (last.num_prompt_tokens, last.num_generated_tokens) == (5, 99)
    assert last.age.ToTimedelta() == timedelta(seconds=59.01)


async def test_one_tenants_requests_are_listed(engine: Engine, channel: grpc.aio.Channel) -> None:
    engine.live = [summary(place, tenant="ab"[place % 2]) for place in range(10)]
    request = admin_v1.ListRequestsRequest(tenant="b", limit=2)
    listed = await AdminServiceStub(channel).ListRequests(request)
    assert [one.key for one in listed.requests] == ["0001", "0003"]
    assert listed.num_live == 5


async def test_the_engine_counts_what_is_live_in_all_and_by_tenant() -> None:
    store = RedisStore("redis://127.0.0.1:1/0")
    make_core = partial(Scheduler, SchedulerLimits())
    real = SchedulerEngine(make_core, store, 1, EngineSettings(), no_later_term, no_later_term, no_failure)
    real.take_over(
        RequestLog(scheduler_v1.Submit(key=str(place), tenant=tenant, prompt_token_ids=[5], n=1, max_tokens=1), 1.0)
        for place, tenant in enumerate("aab")
    )
    assert [real.num_live(tenant) for tenant in (None, "a", "b", "c")] == [3, 2, 1, 0]
    live = real.requests.get("0")
    assert live is not None
    real.requests.cancel(live)
    assert [real.num_live(tenant) for tenant in (None, "a")] == [2, 1]


def no_later_term(above: int = 0) -> NoReturn:
    raise AssertionError("nobody raises the epoch")


def no_failure(error: Exception) -> NoReturn:
    raise AssertionError("no step fails") from error


async def test_a_scheduler_that_does_not_lead_answers_not_leader() -> None:
    server, _, port = admin_server(InsecureIdentity(), AdminServicer(), "127.0.0.1", 0)
    await server.start()
    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
        answer = await refused(AdminServiceStub(channel).ListRequests(admin_v1.ListRequestsRequest()))
    assert answer == (grpc.StatusCode.UNAVAILABLE, "NOT_LEADER", "")
    await server.stop(None)


@pytest.mark.parametrize("limit", [0, 1_001])
async def test_a_limit_out_of_its_range_is_refused(limit: int, channel: grpc.aio.Channel) -> None:
    answer = await refused(AdminServiceStub(channel).ListRequests(admin_v1.ListRequestsRequest(limit=limit)))
    assert answer == (grpc.StatusCode.INVALID_ARGUMENT, "INVALID_FIELD", "limit")


async def test_health_and_reflection_stand_beside_it(channel: grpc.aio.Channel) -> None:
    health = await health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(service=SERVICE))
    assert health.status == health_pb2.HealthCheckResponse.SERVING
    stub = reflection_pb2_grpc.ServerReflectionStub(channel)
    answers = stub.ServerReflectionInfo(iter([reflection_pb2.ServerReflectionRequest(list_services="")]))
    async for answer in answers:
        names = [service.name for service in answer.list_services_response.service]
        assert SERVICE in names
        assert "quire.scheduler.v1.SchedulerService" not in names
        break
