"""The gateway as a process: start, tracing and shutdown."""

import asyncio
import json
import signal
import socket
import sys
from asyncio.subprocess import PIPE, Process
from pathlib import Path
from typing import Any

import pytest
from grpc_health.v1 import health_pb2
from tokenizers import Tokenizer

from collector import collecting
from environments import service_environment
from gateway_harness import encoded
from gateway_processes import gateway_process, start
from quire.inference.v1 import inference_pb2 as api
from scripted_scheduler import answer_with
from svc_common.models import tokenizer_fingerprint
from svc_common.settings import BAD_SETTINGS
from tiny_model import EOS, make_model_directory

TRACE = "0123456789abcdef0123456789abcdef"
TRACEPARENT = f"00-{TRACE}-0123456789abcdef-01"


async def ended(process: Process) -> tuple[int, str]:
    """Exit status, and the unread rest of stderr."""
    async with asyncio.timeout(300):
        _, stderr = await process.communicate()
    assert process.returncode is not None
    return process.returncode, stderr.decode()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
async def test_a_signal_ends_it_cleanly(number: signal.Signals, model_directory: Path) -> None:
    async with gateway_process(model_directory) as (process, _):
        process.send_signal(number)
        status, _ = await ended(process)
        assert status == 0


async def test_another_tokenizer_and_template_and_defaults_are_served(model_directory: Path, tmp_path: Path) -> None:
    other = make_model_directory(tmp_path / "other")
    stored = Tokenizer.from_file(str(other / "tokenizer.json"))
    stored.add_tokens(["hello world"])
    stored.save(str(other / "tokenizer.json"))
    variables = {
        "QUIRE_TOKENIZER": str(other),
        "QUIRE_CHAT_TEMPLATE": "{{ messages[0].content }}",
        "QUIRE_OVERRIDE_GENERATION_CONFIG": '{"temperature": 0.5, "max_new_tokens": 3}',
    }
    # As workers with the same settings report.
    facts = {"tokenizer_fingerprint": tokenizer_fingerprint(other), "vocab_size": stored.get_vocab_size()}
    async with gateway_process(model_directory, facts, **variables) as (_, harness):
        harness.scheduler.script = answer_with(encoded("hello"))
        messages = [{"role": "user", "content": "hello world"}]
        response = await harness.http.post("/v1/chat/completions", json={"messages": messages})
        assert response.status_code == 200
        await harness.stub.Generate(api.GenerateRequest(generation=api.Generation(text="hello world")))
        submits = harness.scheduler.all("submit")
        assert len(submits) == 2
        for submit in submits:
            assert list(submit.prompt_token_ids) == [stored.token_to_id("hello world")]
            assert (submit.sampling.temperature, submit.max_tokens) == (0.5, 3)


async def test_what_the_operator_sets_for_requests_is_logged(model_directory: Path) -> None:
    flags = (f"--model={model_directory}", "--http-port=0", "--grpc-port=0", "--schedulers-at=127.0.0.1:1")
    for more, defaults in (((), None), (('--override-generation-config={"top_k": 4}',), {"top_k": 4})):
        process = await start(*flags, *more)
        assert process.stderr is not None
        line = await process.stderr.readline()
        process.kill()
        await ended(process)
        entry = json.loads(line)
        assert (entry["event"], entry.get("defaults")) == ("listening", defaults)


async def test_a_second_signal_ends_it_at_once(model_directory: Path) -> None:
    async with gateway_process(model_directory) as (process, quire):
        quire.scheduler.script = lambda session, submit: session.accept(submit.key)
        call = quire.stub.StreamGenerate(api.StreamGenerateRequest(generation=api.Generation(text="a")))
        await call.read()
        process.send_signal(signal.SIGTERM)
        await quire.wait_for_health(health_pb2.HealthCheckResponse.NOT_SERVING)
        process.send_signal(signal.SIGTERM)
        status, _ = await ended(process)
        assert status == -signal.SIGTERM


async def test_calls_of_both_protocols_are_traced_in_the_callers_trace(model_directory: Path) -> None:
    async with collecting() as (collector, endpoint):
        variables = {"OTEL_EXPORTER_OTLP_ENDPOINT": endpoint, "OTEL_EXPORTER_OTLP_INSECURE": "true"}
        async with gateway_process(model_directory, **variables) as (process, quire):
            quire.scheduler.script = answer_with(encoded("hello"), stop_token_id=EOS)
            request = api.StreamGenerateRequest(generation=api.Generation(text="a"))
            metadata = (("traceparent", TRACEPARENT),)
            assert [message async for message in quire.stub.StreamGenerate(request, metadata=metadata)]
            await quire.http.post("/v1/completions", json={"prompt": "a"}, headers=dict(metadata))
            # A stream that a client abandons must not break the context of the current span.
            quire.scheduler.script = lambda session, submit: session.accept(submit.key)
            left = quire.stub.StreamGenerate(request, metadata=metadata)
            await left.read()
            left.cancel()
            await quire.scheduler.next("cancel")
            process.terminate()
            status, stderr = await ended(process)
            assert (status, "detach" in stderr) == (0, False)
            traceparents = [submit.traceparent for submit in quire.scheduler.all("submit")]
    spans = {span.span_id.hex(): span for _, span in collector.spans}
    assert {span.trace_id.hex() for span in spans.values()} == {TRACE}
    servers = ["quire.inference.v1.InferenceService/StreamGenerate", "POST /v1/completions"]
    for traceparent, server in zip(traceparents, [*servers, servers[0]], strict=True):
        span = spans[traceparent.split("-")[2]]
        assert span.name == "text_completion tiny"
        assert spans[span.parent_span_id.hex()].name.strip("/") == server
        assert spans[span.parent_span_id.hex()].parent_span_id.hex() == "0123456789abcdef"
    assert len(spans) == 6, "neither health checks nor tokens make spans"


# The gateway is imported once, and each start is a fork of that process.
_STARTS = """
import json, os, sys
from gateway_svc.__main__ import main

ended = []
for flags in json.load(sys.stdin):
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        os.dup2(writing, 2)
        sys.argv[1:] = flags
        main()
        sys.exit()
    os.close(writing)
    with open(reading) as stderr:
        message = stderr.read()
    ended.append((os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), message))
print(json.dumps(ended))
"""


def flags_of(**settings: Any) -> list[str]:
    return [f"--{name.replace('_', '-')}={value}" for name, value in settings.items()]


async def refused_starts(*starts: list[str]) -> list[tuple[int, str]]:
    """Exit status and message of each gateway that cannot start."""
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-c", _STARTS, env=service_environment(), stdin=PIPE, stdout=PIPE
    )
    async with asyncio.timeout(300):
        out, _ = await process.communicate(json.dumps(starts).encode())
    assert process.returncode == 0
    return [(status, message) for status, message in json.loads(out)]


async def test_a_failed_start_prints_one_line(model_directory: Path, tmp_path: Path) -> None:
    keys = tmp_path / "keys.toml"
    keys.write_text("[[keys]]\n")
    models = tmp_path / "models.toml"
    models.write_text("[[models]]\nname = 'a'\n")
    ports = {"http_port": 0, "grpc_port": 0}
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        attempts = await refused_starts(
            flags_of(model=model_directory, http_port=port, grpc_port=0),
            flags_of(model=model_directory, http_port=0, grpc_port=port),
            flags_of(model=model_directory, api_keys=keys, **ports),
            flags_of(model=tmp_path, **ports),
            flags_of(model=model_directory, chat_template="{% if %}", **ports),
            flags_of(model=model_directory, generation_config=tmp_path, **ports),
            flags_of(model=model_directory, override_generation_config='{"top_p": 2}', **ports),
            flags_of(model=model_directory, tokenizer=tmp_path, **ports),
            flags_of(model=model_directory, revision="v1", **ports),
            flags_of(models=models, **ports),
            flags_of(model=tmp_path / "nowhere.gguf", **ports),
        )
        as_process = await ended(await start(*flags_of(model=tmp_path, **ports)))
    reasons = [
        f"127.0.0.1:{port} is already in use",
        f"127.0.0.1:{port} is already in use",
        "keys[0]",
        "no tokenizer.json",
        "QUIRE_CHAT_TEMPLATE does not parse",
        "QUIRE_GENERATION_CONFIG",
        "QUIRE_OVERRIDE_GENERATION_CONFIG: top_p must be above 0 and at most 1, not 2",
        "QUIRE_TOKENIZER",
        "QUIRE_REVISION",
        "models.toml: models[0].name is not a key",
    ]
    assert as_process == attempts[3]
    for (status, stderr), text in zip(attempts, [*reasons, "nowhere.gguf"], strict=True):
        assert status == (1 if "in use" in text else BAD_SETTINGS), "a port may be free after a restart"
        (line,) = stderr.splitlines()
        assert line.startswith("python -m gateway_svc: ")
        assert text in line
