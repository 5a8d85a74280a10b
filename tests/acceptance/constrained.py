"""Constrained requests, undisturbed and disturbed: what ended by itself is valid, and what was cut is a valid prefix.

    python -m tests.acceptance.constrained [--requests 1000] [--at-once 32]

So many sampled requests, and a fifth as many greedy ones, over 40 schemas and 20 regular expressions run undisturbed.
Then the same ones run with n = 4, with their worker killed, resumed on another gateway, preempted by swaps, and
preempted by recomputation: each must have the tokens of the undisturbed run. Plain and constrained streams run beside
hostile grammars, of which several run at once. The real model in its deterministic mode, under the supervisor.

The last line is JSON. The exit status is 1 if an output is wrong, if the disturbances did not happen, or if plain or
constrained streams take more than one step longer beside hostile grammars.
"""

import argparse
import asyncio
import json
import os
import random
import signal
import sys
import tempfile
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from itertools import count, islice
from pathlib import Path
from typing import Any

from quire_client import AsyncClient
from quire_client.aio import AsyncStream
from svc_common.models import resolve_model
from svc_common.supervisor.prepare import prepare_model
from svc_common.supervisor.runner import RestartPolicy
from tests.acceptance.constrained_cases import ConstraintCase, Judge, load_cases
from tests.acceptance.hostile_grammars import KINDS, HostileOutcome, run_hostile
from tests.chaos.stack import Stack, stack

SEQUENCES = 4
"""n of the requests with several sequences."""

_SECONDS = 600.0  # without progress, for one request
_PROMPTS = ("An answer in JSON:", "Once upon a time", "The list is\n", "Q: What is it?\nA:", "Today")
_MAX_TOKENS = (12, 40, 100, 100)
_OPTIONS: tuple[dict[str, Any], ...] = (
    {},
    {},
    {"top_p": 0.9},
    {"top_k": 40},
    {"min_p": 0.05},
    {"repetition_penalty": 1.2},
    {"frequency_penalty": 0.5, "presence_penalty": 0.5},
    {"logprobs": 2},
    {"logit_bias": {198: 5.0, 28: -5.0}},
)
_ENVIRONMENT = {"QUIRE_DETERMINISTIC": "1", "QUIRE_CPU_KV_BYTES": str(2**28)}
_POLICY = RestartPolicy(max_backoff=1.0, stable_after=5.0)  # a worker is killed again and again
_BLOCK = 16  # tokens
_BLOCKS_LEFT = 6  # beside a request that preempts the others
_STEPS_BEFORE_PREEMPTION = 17  # the scheduler preempts no sequence in its first 16 steps
_WORKER = "worker"

PrintLine = Callable[[str], None]
Disturb = Callable[[], Awaitable[None]]


@dataclass(frozen=True)
class Plan:
    """So many sampled requests, of which so many run at once; tokens of each stream beside hostile grammars."""

    num_requests: int
    num_at_once: int
    hostile_tokens: int = 200
    hostile_rounds: int = 8
    """With each hostile grammar, at least."""
    least_disturbed: float = 0.25
    """Share of the requests that a kill or a preemption must reach: many answers are too short for the latter."""


@dataclass(frozen=True)
class ConstrainedRequest:
    """A request of all runs."""

    number: int
    case: ConstraintCase
    prompt: str
    options: dict[str, Any]

    @property
    def is_greedy(self) -> bool:
        return bool(self.options["temperature"] == 0)


@dataclass(frozen=True)
class Disturbance:
    """When a group of requests is disturbed: when a share of its sequences have run for so many steps since the last
    time. At most so often.
    """

    num_steps: int
    share: float
    most: int = 1000


@dataclass
class Answer:
    """What was received of one sequence."""

    token_ids: list[int] = field(default_factory=list)
    text: str = ""
    finish: str = ""


@dataclass
class Outcome:
    """Counts of each run, and what was wrong."""

    counts: dict[str, dict[str, int]] = field(default_factory=dict)
    errors: list[str] = field(default_factory=list)
    hostile: HostileOutcome | None = None

    @property
    def passed(self) -> bool:
        return not self.errors

    def summary(self) -> dict[str, Any]:
        """The last line of the output."""
        hostile = {} if self.hostile is None else {"hostile": self.hostile.summary()}
        return {"errors": len(self.errors), **self.counts, **hostile}


def _num_blocks(plan: Plan) -> int:
    """Blocks of a worker whose sequences are preempted."""
    return 2 * plan.num_at_once


def make_requests(cases: Sequence[ConstraintCase], num_sampled: int) -> list[ConstrainedRequest]:
    """Sampled requests and a fifth as many greedy ones. The seed of all is fixed."""
    mixed = random.Random("cases").sample(cases, len(cases))
    requests = []
    for number in range(num_sampled + num_sampled // 5):
        rng = random.Random(number)
        temperature = rng.choice((0.5, 0.8, 1.0, 1.5)) if number < num_sampled else 0.0
        options = {"temperature": temperature, "seed": number, "max_tokens": rng.choice(_MAX_TOKENS)}
        case = mixed[number % len(mixed)]
        options |= rng.choice(_OPTIONS) | case.option
        requests.append(ConstrainedRequest(number, case, rng.choice(_PROMPTS), options))
    return requests


async def read(stream: AsyncStream, answers: dict[int, Answer], until: int | None = None) -> None:
    """Reads a stream to its end, or until the first sequence has so many tokens."""
    async for chunk in stream:
        answer = answers.setdefault(chunk.index, Answer())
        answer.token_ids += chunk.token_ids
        answer.text += chunk.text
        if chunk.finish is not None:
            answer.finish = chunk.finish.reason
        if until is not None and len(answer.token_ids) >= until:
            return


class ConstrainedRun:
    """All runs of a plan. The first one is undisturbed; its answers are the expected ones of the others."""

    def __init__(self, plan: Plan, requests: Sequence[ConstrainedRequest], judge: Judge, print_line: PrintLine) -> None:
        self.outcome = Outcome()
        self._plan = plan
        self._requests = requests
        self._judge = judge
        self._print_line = print_line
        self._expected: dict[int, Answer] = {}

    async def run_plain(self, here: AsyncClient) -> None:
        """Each request alone among others."""

        async def send(request: ConstrainedRequest) -> None:
            answers = await self._stream(here, request)
            self._expected[request.number] = answers[0]
            self._check_valid("plain", request, answers[0])

        await self._at_once(send)
        ends = [answer.finish for answer in self._expected.values()]
        self._finish("plain", stopped=ends.count("stop"), cut=ends.count("length"))

    async def run_several(self, here: AsyncClient) -> None:
        """Each request with several sequences: the first is that of the request with one, as are all greedy ones."""
        ends: list[str] = []

        async def send(request: ConstrainedRequest) -> None:
            answers = await self._stream(here, request, n=SEQUENCES)
            for index, answer in answers.items():
                ends.append(answer.finish)
                if index == 0 or request.is_greedy:
                    self._check_same("several", request, answer)
                else:
                    self._check_valid("several", request, answer)

        await self._at_once(send)
        self._finish("several", sequences=len(ends), stopped=ends.count("stop"), cut=ends.count("length"))

    async def run_killed(self, here: AsyncClient, running: Stack) -> None:
        """The worker is killed once for each group, when half of its sequences have tokens."""

        async def kill() -> None:
            running.send(_WORKER, signal.SIGKILL)

        await self._in_groups("killed", here, kill, Disturbance(1, 0.5, most=1))

    async def run_preempted(self, here: AsyncClient, running: Stack, method: str) -> None:
        """A request of a higher priority takes most of the memory, again and again."""
        num_tokens, numbers = _BLOCK * (_num_blocks(self._plan) - _BLOCKS_LEFT), count(1000)

        async def preempt() -> None:
            await here.generate([next(numbers)] * num_tokens, max_tokens=1, priority=0)

        await self._in_groups(method, here, preempt, Disturbance(_STEPS_BEFORE_PREEMPTION, 1 / 16))
        page = await running.metrics("scheduler")
        num_preemptions = int(page[f'quire_preemptions_total{{method="{method}"}}'])
        self.outcome.counts[method]["preemptions"] = num_preemptions
        least = self._plan.least_disturbed * len(self._requests)
        self._require(num_preemptions >= least, f"{method}: only {num_preemptions} preemptions")

    async def _in_groups(self, run: str, here: AsyncClient, disturb: Disturb, when: Disturbance) -> None:
        """Sends the requests in groups, and disturbs each. Counts the requests that were disturbed."""
        num_disturbed = 0
        left = iter(self._requests)
        while group := list(islice(left, self._plan.num_at_once)):
            received: list[dict[int, Answer]] = [{} for _ in group]
            disturbed: dict[int, int] = {}  # place in the group to tokens when it was disturbed last
            times = 0
            async with asyncio.TaskGroup() as tasks:
                streams = [
                    tasks.create_task(read(here.stream(request.prompt, priority=-1, **request.options), answers))
                    for request, answers in zip(group, received, strict=True)
                ]
                while not all(stream.done() for stream in streams):
                    num_tokens = {
                        place: len(answers[0].token_ids)
                        for place, answers in enumerate(received)
                        if 0 in answers and not answers[0].finish
                    }
                    long = {
                        p: length for p, length in num_tokens.items() if length >= disturbed.get(p, 0) + when.num_steps
                    }
                    if len(long) >= when.share * len(group) and times < when.most:
                        times += 1
                        disturbed |= long
                        await disturb()
                    await asyncio.sleep(0.01)
            num_disturbed += len(disturbed)
            for request, answers in zip(group, received, strict=True):
                self._check_same(run, request, answers[0])
        self._finish(run, disturbed=num_disturbed)
        least = self._plan.least_disturbed * len(self._requests)
        self._require(num_disturbed >= least, f"{run}: only {num_disturbed} requests were disturbed")

    async def run_resumed(self, here: AsyncClient, there: AsyncClient) -> None:
        """Each request is left after some tokens and resumed on another gateway: from the start, or from there."""
        num_resumed = 0

        async def send(request: ConstrainedRequest) -> None:
            nonlocal num_resumed
            name = f"resumed-{request.number}"
            length = len(self._expected[request.number].token_ids)
            until = random.Random(name).randint(1, max(1, length - 1))
            received: dict[int, Answer] = {}
            async with here.stream(request.prompt, request_id=name, resume=False, **request.options) as stream:
                await read(stream, received, until)
            is_from_there = request.number % 2 == 0
            answers = received if is_from_there else {}
            positions = {0: len(received[0].token_ids)} if is_from_there else None
            await read(there.resume(name, positions), answers)
            num_resumed += 1
            self._check_same("resumed", request, answers[0])

        await self._at_once(send)
        self._finish("resumed", disturbed=num_resumed)

    async def run_hostile(self, here: AsyncClient, running: Stack) -> None:
        """Plain and constrained streams beside hostile grammars."""

        async def times() -> tuple[float, float]:
            page = await running.metrics(_WORKER)
            return page["quire_worker_steps_total"], page["quire_worker_busy_seconds_total"]

        plan, address = self._plan, running.addresses.grpc[0].dial_address
        self.outcome.hostile = await run_hostile(here, address, times, plan.hostile_tokens, plan.hostile_rounds)
        for error in self.outcome.hostile.errors:
            self._require(False, error)
        self._print_line(f"hostile: {self.outcome.hostile.summary()}")

    async def _stream(self, client: AsyncClient, request: ConstrainedRequest, **options: Any) -> dict[int, Answer]:
        answers: dict[int, Answer] = {}
        await read(client.stream(request.prompt, **request.options, **options), answers)
        return answers

    async def _at_once(self, send: Callable[[ConstrainedRequest], Awaitable[None]]) -> None:
        """Sends all requests, so many at once as the plan says."""
        left = iter(self._requests)

        async def send_some() -> None:
            for request in left:
                await send(request)

        async with asyncio.TaskGroup() as group:
            for _ in range(self._plan.num_at_once):
                group.create_task(send_some())

    def _check_valid(self, run: str, request: ConstrainedRequest, answer: Answer) -> None:
        text = self._judge.text(answer.token_ids)
        if answer.finish == "stop":
            is_right = text == answer.text and request.case.is_valid(text)
        else:
            is_cut = answer.finish == "length" and len(answer.token_ids) == request.options["max_tokens"]
            is_right = is_cut and self._judge.is_prefix(request.case, answer.token_ids)
        self._require(is_right, f"{run}: request {request.number} ({request.case.name}) has {answer}")

    def _check_same(self, run: str, request: ConstrainedRequest, answer: Answer) -> None:
        expected = self._expected[request.number]
        self._require(
            answer == expected,
            f"{run}: request {request.number} ({request.case.name}) has {answer}, and undisturbed {expected}",
        )

    def _require(self, is_right: bool, error: str) -> None:
        if not is_right:
            self.outcome.errors.append(error)
            self._print_line(f"ERROR: {error}")

    def _finish(self, run: str, **counts: int) -> None:
        self.outcome.counts[run] = {"requests": len(self._requests), **counts}
        self._print_line(f"{run}: {self.outcome.counts[run]}")


@asynccontextmanager
async def deployed(
    log: Path, num_gateways: int, **settings: str
) -> AsyncIterator[tuple[Stack, AsyncClient, AsyncClient]]:
    """So many gateways, a scheduler and a worker, with a client of the first gateway and one of the last."""
    environment = _ENVIRONMENT | {f"QUIRE_{name.upper()}": value for name, value in settings.items()}
    async with stack(log, environment, {"gateways": num_gateways, "schedulers": 1, "workers": 1}, _POLICY) as running:
        addresses = [listener.dial_address for listener in running.addresses.grpc]
        async with (
            AsyncClient(addresses[0], resume_patience=_SECONDS) as here,
            AsyncClient(addresses[-1], resume_patience=_SECONDS) as there,
        ):
            yield running, here, there


async def run_constrained(plan: Plan, model: Path, log: Path, print_line: PrintLine) -> Outcome:
    """Runs a plan. `model` is the model's directory; the output of the roles is written to `log` and files beside."""
    run = ConstrainedRun(plan, make_requests(load_cases(), plan.num_requests), Judge(model), print_line)
    async with deployed(log, 2) as (running, here, there):
        await run.run_plain(here)
        await run.run_several(here)
        await run.run_resumed(here, there)
        await run.run_hostile(here, running)
        await run.run_killed(here, running)
    for method in ("swap", "recompute"):
        beside = log.with_name(f"{log.name}-{method}")
        async with deployed(beside, 1, num_blocks=str(_num_blocks(plan)), preemption=method) as (running, here, _):
            await run.run_preempted(here, running, method)
    return run.outcome


def main() -> None:
    """Parses the flags, runs, and prints the result."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=1000, help="sampled ones; default 1000")
    parser.add_argument("--at-once", type=int, default=32, help="default 32")
    options = parser.parse_args()
    log = Path(tempfile.gettempdir(), f"quire-constrained-{os.getpid()}.log")
    print(f"the output of the roles is written to {log}", flush=True)
    asyncio.run(prepare_model({}))
    plan = Plan(options.requests, options.at_once)
    outcome = asyncio.run(run_constrained(plan, resolve_model(None).path, log, lambda line: print(line, flush=True)))
    print(json.dumps(outcome.summary()))
    hostile = outcome.hostile
    is_delayed = hostile is None or hostile.more_steps > 1 or any(hostile.longer_by_steps(kind) > 1.0 for kind in KINDS)
    sys.exit(0 if outcome.passed and not is_delayed else 1)


if __name__ == "__main__":
    main()
