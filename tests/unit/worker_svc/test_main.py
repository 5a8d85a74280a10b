"""The process: it logs when it is ready, stops on a signal, and reports why it cannot start."""

import asyncio
import json
import os
import shutil
import signal
import socket
import sys
import time
from asyncio.subprocess import PIPE, Process
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from quire.worker.v1 import worker_pb2 as pb
from quire.worker.v1 import worker_pb2_grpc
from svc_common.channels import internal_channel
from svc_common.settings import BAD_SETTINGS
from worker_service import Worker, new_sequence, scheduled

_LOADS_FOR_EVER = """
import sys, threading, types

def load_model(settings, report):
    report("loading for ever")
    threading.Event().wait()

sys.modules["worker_svc.load"] = types.SimpleNamespace(load_model=load_model)
from worker_svc.__main__ import main
main()
"""


@asynccontextmanager
async def _worker(*args: str, program: tuple[str, ...] = ("-m", "worker_svc")) -> AsyncIterator[Process]:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "OMP_NUM_THREADS": "1"}
    environment |= {"QUIRE_CPU_KV_BYTES": str(2**24), "QUIRE_INSECURE": "1", "TRITON_INTERPRET": "0"}
    process = await asyncio.create_subprocess_exec(sys.executable, *program, *args, stderr=PIPE, env=environment)
    try:
        yield process
    finally:
        if process.returncode is None:
            process.kill()
        await process.wait()


async def _logged(process: Process, event: str) -> dict[str, Any]:
    """The first log entry of this event."""
    assert process.stderr is not None
    lines = []
    async for line in process.stderr:
        lines.append(line.decode())
        entry: dict[str, Any] = json.loads(line)
        if entry["event"].startswith(event):
            return entry
    raise AssertionError("".join(lines))


async def test_a_worker_serves_once_it_is_ready_and_stops_on_a_signal(tiny_llama: Path) -> None:
    ports = ("--worker-port", "0", "--worker-metrics-port", "0")
    async with _worker("--model", str(tiny_llama), "--num-blocks", "8", *ports) as process:
        ready = await _logged(process, "ready")
        assert (ready["model"], ready["device"], ready["blocks"]) == (tiny_llama.name, "cpu", 8)
        async with internal_channel(f"127.0.0.1:{ready['port']}") as channel:
            health: Callable[..., Any] = health_pb2_grpc.HealthStub(channel).Check
            for service in ("", "quire.worker.v1.WorkerService", "liveness"):
                response = await health(health_pb2.HealthCheckRequest(service=service))
                assert response.status == health_pb2.HealthCheckResponse.SERVING
            stub: Any = worker_pb2_grpc.WorkerServiceStub(channel)
            assert (await stub.Describe(pb.DescribeRequest())).num_blocks == 8
        process.send_signal(signal.SIGTERM)
        assert await process.wait() == 0


async def test_after_a_signal_new_streams_are_refused_and_the_open_one_continues(tiny_llama: Path) -> None:
    ports = ("--worker-port", "0", "--worker-metrics-port", "0")
    async with _worker("--model", str(tiny_llama), "--num-blocks", "8", *ports) as process:
        ready = await _logged(process, "ready")
        async with internal_channel(f"127.0.0.1:{ready['port']}") as channel:
            stream = await Worker(None, channel).open()
            process.send_signal(signal.SIGTERM)
            await _logged(process, "draining")
            health: Callable[..., Any] = health_pb2_grpc.HealthStub(channel).Check
            response = await health(health_pb2.HealthCheckRequest())
            assert response.status == health_pb2.HealthCheckResponse.NOT_SERVING
            await stream.send(1, new_sequences=[new_sequence(1)], scheduled=scheduled((1, 0, 5, 0)))
            assert len((await stream.receive()).result.token_ids) == 1
            await stream.call.done_writing()
            assert await process.wait() == 0


async def test_a_signal_ends_it_while_the_model_loads() -> None:
    ports = ("--worker-port", "0", "--worker-metrics-port", "0")
    async with _worker(*ports, program=("-c", _LOADS_FOR_EVER)) as process, asyncio.timeout(60):
        await _logged(process, "loading for ever")
        process.send_signal(signal.SIGTERM)
        assert (await _logged(process, "stopped"))["event"] == "stopped while the model was loading"
        assert await process.wait() == 0


async def test_it_ends_when_a_leader_orders_a_restart(tiny_llama: Path) -> None:
    ports = ("--worker-port", "0", "--worker-metrics-port", "0")
    async with _worker("--model", str(tiny_llama), "--num-blocks", "8", *ports) as process:
        ready = await _logged(process, "ready")
        now = time.time_ns() // 1000
        ahead = now + 2 * 86400 * 10**6
        async with internal_channel(f"127.0.0.1:{ready['port']}") as channel:
            worker = Worker(None, channel)
            stream = await worker.open(epoch=ahead)
            await stream.call.done_writing()
            assert await stream.call.read() is grpc.aio.EOF
            await worker.stub.Restart(pb.RestartRequest(epoch=now, worker_epoch=ahead))
        assert (await _logged(process, "exiting, to be restarted"))["level"] == "critical"
        assert await process.wait() == 1  # supervisors start it again, as they do not after BAD_SETTINGS


async def test_a_stream_that_does_not_end_is_left_when_the_grace_is_over(tiny_llama: Path) -> None:
    args = ("--worker-port", "0", "--worker-metrics-port", "0", "--drain-grace", "0.2")
    async with _worker("--model", str(tiny_llama), "--num-blocks", "8", *args) as process:
        ready = await _logged(process, "ready")
        async with internal_channel(f"127.0.0.1:{ready['port']}") as channel:
            await Worker(None, channel).open()
            process.send_signal(signal.SIGTERM)
            assert await process.wait() == 0


async def test_a_model_that_is_not_prepared_is_said_with_what_to_run(tmp_path: Path) -> None:
    missing = tmp_path / "tiny.gguf"
    missing.write_bytes(b"GGUF" + bytes(20))
    ports = ("--worker-port", "0", "--worker-metrics-port", "0")
    async with _worker("--model", str(missing), *ports) as process:
        entry = await _logged(process, "cannot start")
        assert f"python -m worker_svc.prepare {missing}" in entry["event"]
        assert await process.wait() == BAD_SETTINGS


def _quantized(method: str, **fields: object) -> str:
    """A config.json of quantized weights."""
    quantization = {"quant_method": method, "bits": 4, "group_size": 128, **fields}
    return json.dumps({"model_type": "llama", "quantization_config": quantization})


@pytest.mark.parametrize(
    ("file", "content", "flags", "message"),
    [
        (None, "", ("--max-model-len", "257"), "QUIRE_MAX_MODEL_LEN is 257, but the context length of the model is "),
        (None, "", ("--kernels", "triton"), "QUIRE_KERNELS is triton, which is for GPUs"),
        (None, "", ("--attention-backend", "other"), "QUIRE_ATTENTION_BACKEND is other, which is for GPUs"),
        ("config.json", "{", (), "config.json cannot be read"),
        ("config.json", "[]", (), "config.json must be an object"),
        ("config.json", _quantized("gptq", bits=5), (), "quantization_config.bits: must be 2, 3, 4 or 8, not 5"),
        ("config.json", _quantized("awq", version="gemv"), (), "quantization_config.version: must be gemm, not 'gemv'"),
        ("model.safetensors", "no header", (), "model.safetensors is damaged or not complete"),
    ],
)
async def test_what_the_model_or_the_device_cannot_do_ends_it_as_bad_settings_do(
    tiny_llama: Path, tmp_path: Path, file: str | None, content: str, flags: tuple[str, ...], message: str
) -> None:
    model = shutil.copytree(tiny_llama, tmp_path / "tiny")
    if file is not None:
        (model / file).write_text(content)
    ports = ("--worker-port", "0", "--worker-metrics-port", "0")
    async with _worker("--model", str(model), "--device", "cpu", *ports, *flags) as process:
        assert message in (await _logged(process, "cannot start"))["event"]
        assert await process.wait() == BAD_SETTINGS


async def test_a_port_in_use_is_said_before_the_model_loads() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        async with _worker("--worker-port", port, "--worker-metrics-port", "0") as process:
            assert port in (await _logged(process, "cannot start"))["event"]
            assert await process.wait() == 1


async def test_bad_settings_are_all_named() -> None:
    args = {"--dtype": "int3", "--block-size": "0", "--worker-port": "99999"}
    async with _worker(*(part for item in args.items() for part in item)) as process:
        _, reported = await process.communicate()
        assert all(name in reported.decode() for name in args), reported
        assert process.returncode == 2
