"""A run of both protocols against a deployment, and the check of the deployment after it."""

import asyncio
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import httpx

from deployment import Deployment, deployment
from quire_client import Client
from tests.acceptance.fuzz.grpc_calls import fuzz_grpc
from tests.acceptance.fuzz.http_requests import fuzz_http
from tests.acceptance.fuzz.rounds import Findings, Plan, PrintLine

SETTINGS: Mapping[str, str | int] = {"max_model_len": 512, "override_generation_config": '{"max_new_tokens": 8}'}
"""A short context, and short answers to requests that do not say how long theirs may be."""

_ERROR_RECORD = re.compile(r"^\d\d:\d\d:\d\d \S+ +(error|critical) |Traceback \(most recent call last\)", re.MULTILINE)
_MAX_SHOWN = 2000  # characters of the log after a record
_MAX_RECORDS = 5
_PROMPT, _MAX_TOKENS = "A quire is", 4


@dataclass
class Outcome:
    """What was found over each protocol, and what is wrong with the deployment at the end."""

    http: Findings
    grpc: Findings
    final_errors: list[str] = field(default_factory=list)

    @property
    def passed(self) -> bool:
        """Whether nothing was found."""
        return not (self.http.problems or self.grpc.problems or self.final_errors)

    def summary(self) -> dict[str, Any]:
        """For the last line of the output."""
        return {
            "http": dict(sorted(self.http.statuses.items())),
            "grpc": dict(sorted(self.grpc.statuses.items())),
            "findings": {**self.http.problems, **self.grpc.problems},
            "final_errors": [error.partition("\n")[0] for error in self.final_errors],
        }


def run_fuzz(plan: Plan, print_line: PrintLine, **settings: str | int) -> Outcome:
    """Fuzzes HTTP, then gRPC, of one deployment. It has the default model, unless `settings` name another."""
    outcome = Outcome(Findings(print_line), Findings(print_line))
    with deployment(**{**SETTINGS, **settings}) as running:
        roles, answers = running.state["roles"], _normal_answers(running)
        with Client(running.grpc) as client:
            model = client.models()[0].name
        fuzz_http(running.http, model, plan, outcome.http)
        fuzz_grpc(running.grpc, model, plan, outcome.grpc)
        outcome.final_errors += _blocks_in_use(running)
        outcome.final_errors += _changed_roles(roles, running.state["roles"])
        outcome.final_errors += [] if _normal_answers(running) == answers else ["a normal request has another answer"]
        outcome.final_errors += list(error_records(running.log.read_text()))[:_MAX_RECORDS]
    for error in outcome.final_errors:
        print_line(f"ERROR AT THE END: {error}")
    return outcome


def error_records(log: str) -> Iterator[str]:
    """Records of errors in the output of the roles, and tracebacks."""
    for match in _ERROR_RECORD.finditer(log):
        yield log[log.rfind("\n", 0, match.start()) + 1 : match.start() + _MAX_SHOWN]


def _normal_answers(running: Deployment) -> tuple[str, str]:
    """The text of a greedy completion over each protocol. Raises an error if there is none."""
    body = {"prompt": _PROMPT, "max_tokens": _MAX_TOKENS, "temperature": 0}
    response = httpx.post(f"{running.http}/v1/completions", json=body, trust_env=False, timeout=60).raise_for_status()
    with Client(running.grpc) as client:
        answer = client.generate(_PROMPT, max_tokens=_MAX_TOKENS, temperature=0)
    return response.json()["choices"][0]["text"], answer.text


def _blocks_in_use(running: Deployment) -> list[str]:
    """Sequences or blocks that are in use although no request is."""
    try:
        asyncio.run(running.rest())
    except AssertionError as error:
        return [str(error)]
    return []


def _changed_roles(before: Mapping[str, Any], after: Mapping[str, Any]) -> list[str]:
    """Roles that ended, restarted, or are not ready."""
    return [f"{name} was {role} and is {after[name]}" for name, role in before.items() if after[name] != role]
