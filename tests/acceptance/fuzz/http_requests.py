"""Generated requests to all operations of a gateway's OpenAPI document: as it describes them, against it, and with
hostile values; by all of their paths, and over WebSocket."""

import json
import re
import threading
from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from enum import StrEnum
from functools import partial
from typing import Any

import requests
import schemathesis
from hypothesis import strategies as st
from hypothesis.strategies import DrawFn, SearchStrategy
from schemathesis import Case, GenerationMode, Response
from websockets.exceptions import WebSocketException

from openai_paths import is_of_openai
from tests.acceptance.fuzz.bodies import mutated, shortened
from tests.acceptance.fuzz.http_answers import AnswerChecker
from tests.acceptance.fuzz.rounds import Findings, Plan, run_rounds
from tests.acceptance.fuzz.websocket_calls import WEBSOCKET_PATHS, Frames, converse

_SECONDS = 180.0
_NUM_NAMES = 8
_MAX_KNOWN = 64  # ids of responses
_MAX_SHOWN = 4000  # characters
_HEADER_VALUE = re.compile(r"[ -~]*")  # what the client for WebSocket sends as it is
_BODIES_WEIGHT = 4  # how much more often an operation with a body is called


class Kind(StrEnum):
    """How a request was made."""

    DOCUMENTED = "documented"
    UNDOCUMENTED = "undocumented"
    SHORT = "short"
    MUTATED = "mutated"


class Operation:
    """An operation, whose representation is short, because hypothesis shows the arguments of strategies."""

    def __init__(
        self, label: str, strategies: Mapping[Kind, SearchStrategy[Case[Any]]], properties: frozenset[str]
    ) -> None:
        """`properties` are the names of those of the body; empty if there is none."""
        self._label = label
        self.strategies = strategies
        self.properties = properties

    def __repr__(self) -> str:
        return self._label

    @property
    def kinds(self) -> Sequence[Kind]:
        """The kinds of its requests; most are short ones if it has a body."""
        return [*self.strategies, *([Kind.SHORT] * 3 + [Kind.MUTATED] if self.properties else [])]


@dataclass(frozen=True)
class FuzzRequest:
    """A request, with `text` in place of its body. `number` chooses one of the responses that exist when it is sent.
    With `frames` it goes over WebSocket."""

    case: Case[Any]
    text: str | None
    number: int
    frames: Frames | None = None

    @property
    def body(self) -> bytes | None:
        """What is sent in place of the case's body; None: that."""
        text = self.text
        if text is None and self.frames is not None:
            body = self.case.body
            text = json.dumps(body, default=str) if isinstance(body, dict | list | str | int | float | None) else ""
        return None if text is None else text.encode(errors="surrogatepass")

    def __str__(self) -> str:
        """A command that sends it, and the body in its place."""
        text = "" if self.text is None else f" with the body {self.text}"
        over = "" if self.frames is None else f" over WebSocket ({self.frames})"
        return f"{self.case.as_curl_command()}{text}{over}"[:_MAX_SHOWN]


def operations_of(document: Mapping[str, Any]) -> list[Operation]:
    """The operations of an OpenAPI document."""
    schema = schemathesis.openapi.from_dict(dict(document), config=schemathesis.Config())
    operations = []
    for operation in (one for path in schema for one in schema[path].values()):
        described = document["paths"][operation.path][operation.method.lower()]
        modes = {Kind.DOCUMENTED: GenerationMode.POSITIVE}
        if described["parameters"] or "requestBody" in described:
            modes[Kind.UNDOCUMENTED] = GenerationMode.NEGATIVE
        strategies = {kind: operation.as_strategy(generation_mode=mode) for kind, mode in modes.items()}
        operations.append(Operation(operation.label, strategies, _properties(described, document)))
    return operations


def _properties(described: Mapping[str, Any], document: Mapping[str, Any]) -> frozenset[str]:
    if "requestBody" not in described:
        return frozenset()
    schema = described["requestBody"]["content"]["application/json"]["schema"]
    names = [one["$ref"].rpartition("/")[2] for one in schema.get("anyOf", [schema])]
    return frozenset(field for name in names for field in document["components"]["schemas"][name]["properties"])


@st.composite
def fuzz_requests(draw: DrawFn, operations: Sequence[Operation], model: str) -> FuzzRequest:
    """Requests to these operations, many of which a gateway accepts that serves a model of this name."""
    weighted = [one for one in operations for _ in range(_BODIES_WEIGHT if one.properties else 1)]
    operation = draw(st.sampled_from(weighted))
    kind = draw(st.sampled_from(operation.kinds))
    case = draw(operation.strategies.get(kind, operation.strategies[Kind.DOCUMENTED]))
    number = draw(st.integers(0, _MAX_KNOWN))
    if "model" in case.path_parameters and number % 2:
        case.path_parameters["model"] = model
    text = None
    if kind in (Kind.SHORT, Kind.MUTATED):
        case.body = draw(shortened(case.body if isinstance(case.body, dict) else {}, operation.properties))
        for name in [name for name in case.headers if name != "Last-Event-ID" or number % 2]:
            del case.headers[name]
        if draw(st.integers(0, 7)) == 0:
            case.headers["Idempotency-Key"] = f"fuzz-{number % _NUM_NAMES}"
        text = draw(mutated(case.body)) if kind is Kind.MUTATED else None
    frames = draw(st.sampled_from([None, *Frames])) if case.path in WEBSOCKET_PATHS else None
    if is_of_openai(case.path) and draw(st.booleans()):
        case.path = case.path.removeprefix("/v1")
    return FuzzRequest(case, text, number, frames)


class HttpFuzzer:
    """Sends requests to a gateway, and checks its answers."""

    def __init__(self, url: str, document: Mapping[str, Any], findings: Findings) -> None:
        self._url = url
        self._findings = findings
        self._checker = AnswerChecker(document)
        self._of_thread = threading.local()
        self._sessions: list[requests.Session] = []
        self._known: list[str] = []

    def send(self, request: FuzzRequest, seed: int) -> None:
        """Sends one request. Adds a finding if its answer is not as documented, or if there is none."""
        case, parameters = request.case, request.case.path_parameters
        if "response_id" in parameters and self._known and request.number % 4:
            parameters["response_id"] = self._known[request.number % len(self._known)]
        if request.frames is not None:
            self._converse(request, request.frames, seed)
            return
        body: dict[str, Any] = {} if request.body is None else {"data": request.body}
        try:
            response = case.call(base_url=self._url, session=self._session(), timeout=_SECONDS, **body)
        except (requests.ConnectionError, requests.Timeout) as error:
            self._findings.add(f"{case.operation.label}: no answer: {type(error).__name__}", seed, str(request))
            return
        except (requests.RequestException, ValueError):
            self._findings.answered("not sent")  # no client can send it: a header with a line break
            return
        self._findings.answered(str(response.status_code))
        self._note_response(case, response)
        for problem in self._checker.problems(case, response):
            self._findings.add(f"{case.operation.label}: {problem}", seed, str(request))

    def _converse(self, request: FuzzRequest, frames: Frames, seed: int) -> None:
        """Sends one request over WebSocket."""
        case, body = request.case, request.body
        assert body is not None
        headers = {str(name): str(value) for name, value in case.headers.items()}
        if not all(_HEADER_VALUE.fullmatch(value) for value in headers.values()):
            self._findings.answered("not sent")
            return
        short = {"messages": [{"role": "user", "content": "a"}], "prompt": "a"}
        field = "messages" if "chat" in case.path else "prompt"
        # With a name, a connection is for one request.
        probe = None if headers else json.dumps({field: short[field], "max_tokens": 1}).encode()
        problems = partial(self._checker.problems_of_message, case)
        try:
            url = f"ws{self._url.removeprefix('http')}{case.formatted_path}"
            ended, found = converse(url, headers, body, frames, probe, problems)
        except (WebSocketException, OSError) as error:
            ended, found = "lost", [f"no answer: {type(error).__name__}"]
        self._findings.answered(f"WebSocket: {ended}")
        for problem in found:
            self._findings.add(f"{case.operation.label} over WebSocket: {problem}", seed, str(request))

    def close(self) -> None:
        """Closes the connections of all threads."""
        for session in self._sessions:
            session.close()

    def _note_response(self, case: Case[Any], response: Response) -> None:
        """Keeps the ids of stored responses for requests that name one."""
        is_made = case.operation.label == "POST /v1/responses" and response.status_code == 200
        # A request may have an x-request-id of its own, which comes back.
        ids = response.headers.get("x-quire-request-id") or response.headers.get("x-request-id")
        if is_made and len(self._known) < _MAX_KNOWN and ids:
            self._known.append(ids[0])

    def _session(self) -> requests.Session:
        """The thread's connection, without proxies of the environment."""
        session: requests.Session | None = getattr(self._of_thread, "session", None)
        if session is None:
            session = self._of_thread.session = requests.Session()
            session.trust_env = False
            self._sessions.append(session)
        return session


def fuzz_http(url: str, model: str, plan: Plan, findings: Findings) -> None:
    """Sends generated requests to a gateway that serves a model."""
    with requests.Session() as session:
        session.trust_env = False
        document = session.get(f"{url}/openapi.json", timeout=_SECONDS).json()
    operations = operations_of(document)
    findings.print_line(f"http: {len(operations)} operations of {len(document['paths'])} paths")
    with closing(HttpFuzzer(url, document, findings)) as fuzzer:
        run_rounds("http", plan, fuzz_requests(operations, model), fuzzer.send, findings.print_line)
