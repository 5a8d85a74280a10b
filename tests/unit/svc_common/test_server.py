"""The start of a server: its address, health, reflection, and the signals that end it."""

import asyncio
import os
import signal
import socket
import sys
from collections.abc import AsyncIterator
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2

from quire.inference.v1 import inference_pb2
from svc_common.channels import internal_channel
from svc_common.server import (
    INTERNAL_MESSAGE_BYTES,
    LIVENESS,
    METADATA_BYTES,
    AddressInUse,
    HealthReporter,
    bind,
    create_server,
    enable_reflection,
)

SERVICE = "quire.inference.v1.InferenceService"
SERVING = health_pb2.HealthCheckResponse.SERVING
NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING


@pytest.fixture
async def server() -> AsyncIterator[grpc.aio.Server]:
    server = create_server(max_message_bytes=INTERNAL_MESSAGE_BYTES)
    yield server
    await server.stop(None)


async def test_the_error_of_a_port_in_use_names_it(server: grpc.aio.Server) -> None:
    port = bind(server, "127.0.0.1", 0)
    await server.start()
    with pytest.raises(AddressInUse, match=f"^127.0.0.1:{port} is already in use"):
        bind(create_server(max_message_bytes=1024), "127.0.0.1", port)


async def test_a_port_of_a_listener_that_shares_it_is_in_use_too(server: grpc.aio.Server) -> None:
    with socket.socket() as sharing:
        sharing.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        sharing.bind(("127.0.0.1", 0))
        sharing.listen()
        with pytest.raises(AddressInUse):
            bind(server, "127.0.0.1", sharing.getsockname()[1])


async def test_nobody_can_share_the_port_of_a_server(server: grpc.aio.Server) -> None:
    port = bind(server, "127.0.0.1", 0)
    await server.start()
    with socket.socket() as sharing:
        sharing.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        with pytest.raises(OSError, match="in use"):
            sharing.bind(("127.0.0.1", port))


async def test_inner_channels_carry_large_messages_past_any_proxy(
    server: grpc.aio.Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")
    size = 20 * 2**20

    async def length(request: bytes, context: object) -> bytes:
        return request[: size // 2] + request[size // 2 :]

    handler: Any = grpc.unary_unary_rpc_method_handler(length)
    server.add_generic_rpc_handlers([grpc.method_handlers_generic_handler("test.Service", {"Echo": handler})])
    port = bind(server, "127.0.0.1", 0)
    await server.start()
    async with internal_channel(f"127.0.0.1:{port}") as channel:
        echo: Any = channel.unary_unary("/test.Service/Echo")
        assert len(await echo(bytes(size), timeout=60)) == size


@pytest.mark.parametrize(
    ("size", "code"),
    [(15_000, grpc.StatusCode.OK), (METADATA_BYTES + 1, grpc.StatusCode.RESOURCE_EXHAUSTED)],
    ids=["below", "above"],
)
async def test_metadata_have_one_limit(size: int, code: grpc.StatusCode, server: grpc.aio.Server) -> None:
    """gRPC itself has two, and rejects at random what is between them."""
    HealthReporter(server, [])
    port = bind(server, "127.0.0.1", 0)
    await server.start()
    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
        check = health_pb2_grpc.HealthStub(channel).Check
        calls = [
            check(health_pb2.HealthCheckRequest(service=LIVENESS), metadata=(("x-api-key", "a" * size),), timeout=60)
            for _ in range(10)
        ]
        assert {await call.code() for call in calls} == {code}


async def test_health_follows_the_service_and_liveness_does_not(server: grpc.aio.Server) -> None:
    reporter = HealthReporter(server, [SERVICE])
    port = bind(server, "127.0.0.1", 0)
    await server.start()
    async with internal_channel(f"127.0.0.1:{port}") as channel:
        stub = health_pb2_grpc.HealthStub(channel)

        async def statuses() -> list[int]:
            names = ("", SERVICE, LIVENESS)
            return [(await stub.Check(health_pb2.HealthCheckRequest(service=name))).status for name in names]

        assert await statuses() == [NOT_SERVING, NOT_SERVING, SERVING]
        await reporter.set_serving(True)
        assert await statuses() == [SERVING, SERVING, SERVING]
        await reporter.set_serving(False)
        assert await statuses() == [NOT_SERVING, NOT_SERVING, SERVING]
        with pytest.raises(grpc.aio.AioRpcError) as raised:
            await stub.Check(health_pb2.HealthCheckRequest(service="no.such.Service"))
        assert raised.value.code() is grpc.StatusCode.NOT_FOUND


async def test_health_can_be_watched(server: grpc.aio.Server) -> None:
    reporter = HealthReporter(server, [SERVICE])
    port = bind(server, "127.0.0.1", 0)
    await server.start()
    async with internal_channel(f"127.0.0.1:{port}") as channel:
        stub = health_pb2_grpc.HealthStub(channel)
        watch: Any = stub.Watch(health_pb2.HealthCheckRequest(service=SERVICE))
        assert (await watch.read()).status == NOT_SERVING
        await reporter.set_serving(True)
        assert (await watch.read()).status == SERVING
        watch.cancel()


async def test_watching_health_keeps_no_long_names(server: grpc.aio.Server) -> None:
    HealthReporter(server, [SERVICE])
    port = bind(server, "127.0.0.1", 0)
    await server.start()
    async with internal_channel(f"127.0.0.1:{port}") as channel:
        watch: Any = health_pb2_grpc.HealthStub(channel).Watch(health_pb2.HealthCheckRequest(service="a" * 2**20))
        with pytest.raises(grpc.aio.AioRpcError) as raised:
            await watch.read()
    assert raised.value.code() is grpc.StatusCode.INVALID_ARGUMENT


async def test_a_connection_leaves_watches_of_health_to_others(server: grpc.aio.Server) -> None:
    HealthReporter(server, [SERVICE], max_watches=8)
    port = bind(server, "127.0.0.1", 0)
    await server.start()

    async def watch(channel: grpc.aio.Channel) -> Any:
        call: Any = health_pb2_grpc.HealthStub(channel).Watch(health_pb2.HealthCheckRequest(service=SERVICE))
        assert (await call.read()).status == NOT_SERVING
        return call

    own_connection = [("grpc.use_local_subchannel_pool", 1)]
    address = f"127.0.0.1:{port}"
    async with (
        grpc.aio.insecure_channel(address, options=own_connection) as first,
        grpc.aio.insecure_channel(address, options=own_connection) as second,
    ):
        watches = [await watch(first) for _ in range(4)]
        with pytest.raises(grpc.aio.AioRpcError) as raised:
            await watch(first)
        assert raised.value.code() is grpc.StatusCode.UNAVAILABLE
        await watch(second)
        for each in watches:
            each.cancel()
        async with asyncio.timeout(60):
            while True:  # until the server has noticed
                try:
                    await watch(first)
                    break
                except grpc.aio.AioRpcError:
                    await asyncio.sleep(0.01)


@pytest.mark.parametrize("version", ["v1", "v1alpha"])
async def test_reflection_lists_services_and_contracts(server: grpc.aio.Server, version: str) -> None:
    assert inference_pb2.DESCRIPTOR.package == "quire.inference.v1"
    enable_reflection(server, [SERVICE])
    port = bind(server, "127.0.0.1", 0)
    await server.start()
    async with internal_channel(f"127.0.0.1:{port}") as channel:
        ask: Any = channel.stream_stream(
            f"/grpc.reflection.{version}.ServerReflection/ServerReflectionInfo",
            request_serializer=reflection_pb2.ServerReflectionRequest.SerializeToString,
            response_deserializer=reflection_pb2.ServerReflectionResponse.FromString,
        )
        call = ask()
        await call.write(reflection_pb2.ServerReflectionRequest(list_services=""))
        services = [service.name for service in (await call.read()).list_services_response.service]
        assert SERVICE in services
        assert "grpc.health.v1.Health" in services
        for service in services:
            await call.write(reflection_pb2.ServerReflectionRequest(file_containing_symbol=service))
            assert (await call.read()).file_descriptor_response.file_descriptor_proto
        await call.done_writing()
        assert await call.read() is grpc.aio.EOF


SIGNALLED = """
import asyncio, signal
from svc_common.server import run_until_signal

signal.signal(signal.SIGHUP, signal.{hang_up})  # the tests themselves may run under nohup

async def stop():
    print("stopping", flush=True)
    await asyncio.sleep({seconds})
    print("stopped", flush=True)

async def main():
    asyncio.get_running_loop().call_soon(lambda: print("ready", flush=True))
    await run_until_signal(stop)

asyncio.run(main())
"""


async def start(script: str) -> asyncio.subprocess.Process:
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-c", script, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE
    )
    assert process.stdout
    assert await process.stdout.readline() == b"ready\n"
    return process


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
async def test_a_signal_stops_cleanly(number: signal.Signals) -> None:
    process = await start(SIGNALLED.format(seconds=0, hang_up="SIG_DFL"))
    os.kill(process.pid, number)
    assert await process.communicate() == (b"stopping\nstopped\n", b"")
    assert process.returncode == 0


async def test_the_end_of_a_terminal_is_ignored_under_nohup() -> None:
    process = await start(SIGNALLED.format(seconds=0, hang_up="SIG_IGN"))
    os.kill(process.pid, signal.SIGHUP)
    await asyncio.sleep(0.1)
    assert process.returncode is None
    os.kill(process.pid, signal.SIGTERM)
    assert await process.communicate() == (b"stopping\nstopped\n", b"")


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
async def test_a_second_signal_kills(number: signal.Signals) -> None:
    process = await start(SIGNALLED.format(seconds=600, hang_up="SIG_DFL"))
    os.kill(process.pid, signal.SIGTERM)
    assert process.stdout
    assert await process.stdout.readline() == b"stopping\n"
    os.kill(process.pid, number)
    assert await process.communicate() == (b"", b"")
    assert process.returncode == -number
