"""A short run against real processes finds nothing; and what would be a finding is found."""

import json
import os
import subprocess
import sys
from pathlib import Path
from subprocess import PIPE, STDOUT
from typing import Any

import grpc
import pytest
import requests
import schemathesis
from google.protobuf.descriptor import MethodDescriptor
from grpc_status import rpc_status
from schemathesis import Response
from transformers import LlamaConfig

from llama_models import SIZES, save_servable
from quire.inference.v1 import inference_pb2
from svc_common.errors import QuireError, Reason
from svc_common.logs import console_line
from tests.acceptance.fuzz.grpc_calls import FuzzCall, calls, likely_values, problem_of_error
from tests.acceptance.fuzz.http_answers import AnswerChecker, problems_of_error
from tests.acceptance.fuzz.rounds import Findings, Plan, run_round, run_rounds
from tests.acceptance.fuzz.run import error_records
from tiny_model import CHAT_TEMPLATE, tiny_tokenizer

METHODS: list[MethodDescriptor] = list(inference_pb2.DESCRIPTOR.services_by_name["InferenceService"].methods)
ENTRY = {"ts": "2026-01-01T00:00:00+00:00", "role": "gateway", "event": "internal error"}


@pytest.fixture
def tiny_model(tmp_path: Path) -> Path:
    """A random model, whose worker starts in seconds, with a chat template."""
    tokenizer = tiny_tokenizer()
    sizes = SIZES | {"vocab_size": tokenizer.get_vocab_size(), "max_position_embeddings": 512}
    directory = save_servable(tmp_path / "tiny", LlamaConfig(**sizes), tokenizer)
    (directory / "tokenizer_config.json").write_text(json.dumps({"chat_template": CHAT_TEMPLATE}))
    return directory


def test_a_short_run_finds_nothing(tiny_model: Path) -> None:
    # In a process of its own: pytest rewrites each module of schemathesis that a thread imports, by ast, which fails in
    # CPython 3.11 while hypothesis uses it in another.
    flags = ["--seed=1", "--at-once=2", "--one-round", f"--model={tiny_model}"]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    command = [sys.executable, "-m", "tests.acceptance.fuzz", *flags]
    run = subprocess.run(command, env=environment, text=True, stdout=PIPE, stderr=STDOUT)
    assert run.returncode == 0, run.stdout
    outcome = json.loads(run.stdout.splitlines()[-1])
    assert outcome["http"]["200"]
    assert outcome["grpc"]["OK"]


def test_a_seed_has_the_same_requests_each_time() -> None:
    def sent(seed: int) -> list[str]:
        found: list[str] = []
        run_round(seed, calls(METHODS, likely_values("tiny")), lambda call: found.append(str(call)), float("inf"))
        return found

    assert sent(1) == sent(1) != sent(2)


def test_rounds_have_one_seed_after_the_other_and_end_in_time() -> None:
    seeds, lines = set[int](), list[str]()
    plan = Plan(seconds=0, seed=7, at_once=3)
    run_rounds("grpc", plan, calls(METHODS, likely_values("tiny")), lambda call, seed: seeds.add(seed), lines.append)
    assert (seeds, len(lines)) == (set(), 1)
    run_rounds("grpc", Plan(0, 7, 3, is_single=True), calls(METHODS, likely_values("tiny")), collect(seeds), print)
    assert seeds == {7}


def collect(seeds: set[int]) -> Any:
    return lambda _, seed: seeds.add(seed)


def test_the_first_requests_of_a_finding_are_printed_with_their_seed() -> None:
    lines: list[str] = []
    findings = Findings(lines.append)
    for seed in range(5):
        findings.add(f"/a: INTERNAL\n  {seed}", seed, "the request")
    assert findings.problems == {"/a: INTERNAL": 5}
    assert lines[0] == "FOUND with seed 0: /a: INTERNAL\n  0\n  the request"
    assert len(lines) == 3


@pytest.mark.parametrize(
    ("status", "body", "headers", "problem"),
    [
        (400, {"error": {"code": "invalid_field"}}, {}, None),
        (400, {"type": "error", "error": {"type": "invalid_request_error"}}, {}, None),
        (503, {"error": {"code": "capacity_exhausted"}}, {"retry-after": ["1"]}, None),
        (503, {"error": {"code": "deadline_too_short"}}, {"x-should-retry": ["false"]}, None),
        (503, {"error": {"code": "capacity_exhausted"}}, {}, "503 capacity_exhausted without Retry-After"),
        (404, {"error": {"code": "invalid_field"}}, {}, "404 with the code invalid_field"),
        (500, {"error": {"code": "internal"}}, {}, "500 with the code internal"),
        (500, {"error": "text"}, {}, "500"),
        (500, "Internal Server Error", {}, "500 whose body is not JSON\n  Internal Server Error"),
    ],
)
def test_errors_of_http_that_are_not_documented_are_found(
    status: int, body: Any, headers: dict[str, list[str]], problem: str | None
) -> None:
    content = body.encode() if isinstance(body, str) else json.dumps(body).encode()
    response = Response(status, headers, content, requests.PreparedRequest(), 0.0, True)
    assert next(problems_of_error(response), None) == problem


def described(kind: str, schema: Any) -> Any:
    return {"description": "", "content": {kind: {"schema": schema}}}


NUMBERED = {"type": "object", "required": ["number"]}
ERROR = {"type": "object", "required": ["error"]}
ANSWERS = described("text/event-stream", {"$ref": "#/components/schemas/Event"})
ANSWERS["content"] |= described("application/json", NUMBERED)["content"]
DOCUMENT = {
    "openapi": "3.1.0",
    "info": {"title": "", "version": "1"},
    "paths": {
        "/a": {"get": {"parameters": [], "responses": {"200": ANSWERS, "4XX": described("application/json", ERROR)}}}
    },
    "components": {"schemas": {"Event": NUMBERED}},
}


@pytest.mark.parametrize(
    ("status", "kind", "text", "problems"),
    [
        (200, "application/json", '{"number": 1}', []),
        (200, "application/json", "{}", ["200 application/json: Response violates schema"]),
        (200, "text/html", "a", ["200 text/html: Undocumented Content-Type"]),
        (302, "application/json", "{}", ["302 application/json: Undocumented status code"]),
        (400, "application/json", '{"error": {"code": "invalid_field"}}', []),
        (400, "application/json", "{}", ["400 application/json: Response violates schema"]),
        (200, "text/event-stream", 'data: {"number": 1}\n\ndata: [DONE]\n\n', []),
        (200, "text/event-stream", 'data: {"error": {"code": "cancelled"}}\n\n', []),
        (200, "text/event-stream", "data: {}\n\n", ["an event of text/event-stream has another schema"]),
        (200, "text/event-stream", "data: a\n\n", ["an event of text/event-stream is not JSON"]),
        (
            200,
            "text/event-stream",
            'data: {"error": {"code": "internal"}}\n\n',
            ["an event of text/event-stream has the error internal"],
        ),
        (200, "application/json", f'{{"number": "internal error {"0" * 32}"}}', ["200 with an internal error"]),
    ],
)
def test_answers_that_are_not_in_the_document_are_found(status: int, kind: str, text: str, problems: list[str]) -> None:
    schema = schemathesis.openapi.from_dict(DOCUMENT, config=schemathesis.Config())
    request = requests.Request("GET", "http://127.0.0.1/a").prepare()
    response = Response(status, {"content-type": [kind]}, text.encode(), request, 0.0, True)
    found = AnswerChecker(DOCUMENT).problems(schema["/a"]["GET"].Case(), response)
    assert [problem.partition("\n")[0] for problem in found] == problems


@pytest.mark.parametrize(
    ("message", "is_stream", "problems"),
    [
        ('{"number": 1}', False, []),
        ('{"number": 1}', True, []),
        ('{"event_id":"1","number": 1}', True, []),
        ('{"error": {"code": "cancelled"}}', False, []),
        ("{}", False, ["an event of WebSocket has another schema"]),
        ('{"event_id":"1","other": 1}', True, ["an event of WebSocket has another schema"]),
        ('{"error": {"code": "internal"}}', True, ["an event of WebSocket has the error internal"]),
        ("[DONE]", False, ["an event of WebSocket is not JSON"]),
    ],
)
def test_messages_that_are_not_in_the_document_are_found(message: str, is_stream: bool, problems: list[str]) -> None:
    schema = schemathesis.openapi.from_dict(DOCUMENT, config=schemathesis.Config())
    found = AnswerChecker(DOCUMENT).problems_of_message(schema["/a"]["GET"].Case(), message, is_stream)
    assert [problem.partition("\n")[0] for problem in found] == problems


class Failed(grpc.RpcError):
    """An error as a stub raises it."""

    def __init__(self, error: QuireError, code: grpc.StatusCode | None = None, has_details: bool = True) -> None:
        self._error, self._code = error, code or error.code
        self._has_details = has_details

    def code(self) -> grpc.StatusCode:
        return self._code

    def details(self) -> str:
        return str(self._error)

    def trailing_metadata(self) -> Any:
        key = rpc_status.GRPC_DETAILS_METADATA_KEY
        return [(key, self._error.details())] if self._has_details else []


@pytest.mark.parametrize(
    ("error", "problem"),
    [
        (Failed(QuireError(Reason.INVALID_FIELD, "no", field="text")), None),
        (Failed(QuireError(Reason.CAPACITY_EXHAUSTED, "later", retry_after=1)), None),
        (Failed(QuireError(Reason.CAPACITY_EXHAUSTED, "no")), "CAPACITY_EXHAUSTED without the time to wait"),
        (Failed(QuireError(Reason.INTERNAL, "no")), "INTERNAL with the reason INTERNAL"),
        (
            Failed(QuireError(Reason.INTERNAL, "no"), grpc.StatusCode.UNKNOWN, has_details=False),
            "UNKNOWN without a reason\n  no",
        ),
    ],
)
def test_statuses_of_grpc_that_are_not_documented_are_found(error: Failed, problem: str | None) -> None:
    assert problem_of_error(error, FuzzCall(METHODS[0], (b"",), 60.0)) == problem


def test_errors_in_the_log_are_found() -> None:
    lines = [console_line({**ENTRY, "level": level}) for level in ("info", "warning", "error")]
    assert list(error_records("\n".join([*lines, "end"]))) == [f"{lines[-1]}\nend"]
    (raw,) = error_records("worker | Traceback (most recent call last):\n")
    assert raw.startswith("worker | Traceback")
