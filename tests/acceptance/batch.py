"""`quire batch` whose client and whose server are killed: each line of the input is answered once.

    python -m tests.acceptance.batch [--lines 1000] [--kills 5] [--seed 1]

The real model under the supervisor, with one gateway, two schedulers and one worker. At random lines of the output the
client is killed with SIGKILL and started again, and then a process of the server: the gateway, the leading scheduler,
the worker, Redis, or all of them at once. One line of 50 is one that the server refuses.

A second, small batch has a short QUIRE_DETACH_GRACE: while no client runs the server cancels the requests in flight,
and the next client submits them again under the same names.

The last line is JSON. The exit status is 1 if a line is missing, is there twice, has changed after it was written, or
has another answer than it should.
"""

import argparse
import asyncio
import json
import os
import random
import signal
import sys
import tempfile
from asyncio.subprocess import DEVNULL, PIPE, Process
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from itertools import cycle, islice
from pathlib import Path
from time import monotonic
from typing import Any

from benchmarks.record import ROOT
from environments import bare_environment
from svc_common.supervisor.prepare import prepare_model
from svc_common.supervisor.runner import RestartPolicy
from tests.chaos.stack import Stack, stack

_SECONDS = 3600.0  # for the whole batch
_KINDS = ("gateway", "scheduler", "worker", "redis", "all")
_REFUSED_SHARE = 50  # one line of so many
_LAST_KILL = 0.9  # of the lines, so that requests are in flight at the last one
_POLICY = RestartPolicy(max_backoff=1.0, stable_after=5.0)
_ENVIRONMENT = {"QUIRE_CPU_KV_BYTES": str(2**28)}
_COUNTS = {"gateways": 1, "schedulers": 2, "workers": 1}

PrintLine = Callable[[str], None]


@dataclass(frozen=True)
class BatchPlan:
    """How many lines, and how often the client and, with `kills_server`, the server are killed."""

    num_lines: int
    num_kills: int
    seed: int = 1
    max_tokens: int = 16
    concurrency: int = 16
    kills_server: bool = True
    detach_grace: float = 30.0
    """Seconds that requests run on without a client."""
    longest_pause: float = 2.0
    """Seconds until the client is started again, at most; at least half as many with a pause beyond `detach_grace`."""


AFTER_CANCELLATION = BatchPlan(
    num_lines=24, num_kills=1, max_tokens=64, concurrency=8, kills_server=False, detach_grace=0.05, longest_pause=4.0
)
"""The client is away for longer than requests run on, and only the client is killed."""


@dataclass
class BatchOutcome:
    """What was counted, and what was wrong."""

    num_lines: int = 0
    num_refused: int = 0
    num_client_kills: int = 0
    server_kills: list[str] = field(default_factory=list)
    num_answered_before: list[int] = field(default_factory=list)
    """Lines that the output had when each client started."""
    num_prompt_tokens_repeated: int = 0
    """Tokens of prompts taken in beyond those of the answers, where the server was not killed."""
    seconds: float = 0.0
    errors: list[str] = field(default_factory=list)

    def summary(self) -> dict[str, Any]:
        """The last line of the output."""
        return {
            "lines": self.num_lines,
            "refused": self.num_refused,
            "client_kills": self.num_client_kills,
            "server_kills": self.server_kills,
            "answered_before": self.num_answered_before,
            "prompt_tokens_repeated": self.num_prompt_tokens_repeated,
            "errors": len(self.errors),
            "seconds": round(self.seconds),
        }


def make_line(number: int, max_tokens: int) -> dict[str, Any]:
    """A line of the input, of one of three APIs."""
    temperature = 9 if is_refused(number) else 1
    prompt = f"The number {number} is"
    url, body = (
        ("/v1/completions", {"prompt": prompt, "max_tokens": max_tokens}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": prompt}], "max_tokens": max_tokens}),
        ("/v1/responses", {"input": prompt, "max_output_tokens": max_tokens}),
    )[number % 3]
    body |= {"temperature": temperature, "ignore_eos": True}
    return {"custom_id": f"line-{number}", "method": "POST", "url": url, "body": body}


def is_refused(number: int) -> bool:
    """Whether the server refuses a line."""
    return number % _REFUSED_SHARE == _REFUSED_SHARE // 2


def check_answers(text: bytes, plan: BatchPlan, outcome: BatchOutcome) -> None:
    """Counts the lines of an output, and notes what is wrong with them."""
    answers = [json.loads(line) for line in text.splitlines()]
    outcome.num_lines = len(answers)
    times = Counter(answer["custom_id"] for answer in answers)
    for number in range(plan.num_lines):
        if times[f"line-{number}"] != 1:
            outcome.errors.append(f"line {number} is there {times[f'line-{number}']} times")
    if extra := times.keys() - {f"line-{number}" for number in range(plan.num_lines)}:
        outcome.errors.append(f"lines that the input does not have: {sorted(extra)}")
    for answer in answers:
        status, body = answer["response"]["status_code"], answer["response"]["body"]
        if is_refused(int(answer["custom_id"].removeprefix("line-"))):
            outcome.num_refused += 1
            is_right = status == 400 and "temperature" in body["error"]["message"]
        else:
            usage = body.get("usage") or {}
            num_tokens = usage.get("completion_tokens", usage.get("output_tokens"))
            is_right = status == 200 and num_tokens == plan.max_tokens
        if not is_right:
            outcome.errors.append(f"{answer['custom_id']}: status {status}: {json.dumps(body)[:300]}")


class BatchRun:
    """One batch on one stack, whose processes are killed."""

    def __init__(self, plan: BatchPlan, running: Stack, folder: Path, print_line: PrintLine) -> None:
        self.outcome = BatchOutcome()
        self._plan = plan
        self._stack = running
        self._print_line = print_line
        self._rng = random.Random(plan.seed)
        self._input, self._output = folder / "in.jsonl", folder / "out.jsonl"
        self._seen = b""  # whole lines of the output when the client was killed last

    async def run(self) -> None:
        """Writes the input, and runs `quire batch` until it has ended by itself."""
        lines = [json.dumps(make_line(number, self._plan.max_tokens)) for number in range(self._plan.num_lines)]
        self._input.write_text("\n".join(lines) + "\n")
        started = monotonic()
        client = await self._start_client()
        try:
            async with asyncio.timeout(_SECONDS):
                for kind, (client_at, server_at) in zip(self._kinds(), self._places(), strict=False):
                    await self._wait_for(client_at, client)
                    client = await self._kill_client(client)
                    if self._plan.kills_server:
                        await self._wait_for(server_at, client)
                        await self._kill_server(kind)
                _, err = await client.communicate()
        finally:
            if client.returncode is None:
                client.kill()
                await client.wait()
        self.outcome.seconds = monotonic() - started
        expected = int(any(map(is_refused, range(self._plan.num_lines))))
        if client.returncode != expected:
            self.outcome.errors.append(f"quire batch ended with {client.returncode}: {err.decode()[-1000:]}")
        self._check_prefix()
        check_answers(self._output.read_bytes(), self._plan, self.outcome)
        if not self._plan.kills_server:
            await self._count_repeated_tokens()

    async def _count_repeated_tokens(self) -> None:
        taken_in = await self._sum_of_schedulers("quire_prompt_tokens_total")
        bodies = [json.loads(line)["response"]["body"] for line in self._whole_lines().splitlines()]
        usages = [body["usage"] for body in bodies if "usage" in body]
        answered = sum(usage.get("prompt_tokens") or usage["input_tokens"] for usage in usages)
        self.outcome.num_prompt_tokens_repeated = int(taken_in) - answered
        if self.outcome.num_prompt_tokens_repeated <= 0:
            self.outcome.errors.append("no request was cancelled while the client was away")

    async def _sum_of_schedulers(self, *names: str) -> float:
        """The sum of samples over all schedulers and models."""
        found = await asyncio.gather(*map(self._stack.metrics, self._stack.instances("scheduler")))
        return sum(samples.get(name, 0) for samples in found for name in names)

    def _kinds(self) -> list[str]:
        """What of the server is killed, each kind before any is repeated."""
        return list(islice(cycle(self._rng.sample(_KINDS, len(_KINDS))), self._plan.num_kills))

    def _places(self) -> list[tuple[int, int]]:
        """How many lines the output has when the client is killed, and when the server is killed after it."""
        share = _LAST_KILL * self._plan.num_lines / self._plan.num_kills
        return [
            (max(1, int((i + self._rng.uniform(0, 0.5)) * share)), int((i + self._rng.uniform(0.5, 1)) * share))
            for i in range(self._plan.num_kills)
        ]

    async def _start_client(self) -> Process:
        self.outcome.num_answered_before.append(_num_lines(self._whole_lines()))
        url = f"http://{self._stack.addresses.http[0].dial_address}"
        command = [sys.executable, "-m", "quire_client", "batch", str(self._input), "-o", str(self._output)]
        options = ["--url", url, "-c", str(self._plan.concurrency)]
        paths = os.pathsep.join(str(ROOT / path) for path in ("protos", "client"))
        environment = bare_environment() | {"PYTHONPATH": paths}
        return await asyncio.create_subprocess_exec(*command, *options, env=environment, stdout=DEVNULL, stderr=PIPE)

    async def _kill_client(self, client: Process) -> Process:
        longest = self._plan.longest_pause
        is_beyond_grace = longest > self._plan.detach_grace
        # Without a worker, requests are in flight when the client is killed and do not end within the grace, however
        # fast the machine is.
        workers = self._stack.instances("worker") if is_beyond_grace else []
        stopped = [self._stack.send(name, signal.SIGSTOP) for name in workers]
        while stopped:
            await asyncio.sleep(0.5)  # in which what the worker had computed is answered
            if await self._sum_of_schedulers("quire_sequences_running", "quire_sequences_waiting"):
                break
        client.kill()
        await client.wait()
        self._check_prefix()
        self._seen = self._whole_lines()
        self.outcome.num_client_kills += 1
        self._print_line(f"{_num_lines(self._seen)} lines: killed the client")
        await asyncio.sleep(self._rng.uniform(longest / 2 if is_beyond_grace else 0.0, longest))
        for pid in stopped:
            if pid is not None:
                self._stack.resume(pid)
        return await self._start_client()

    async def _kill_server(self, kind: str) -> None:
        while not self._stack.is_ready():
            await asyncio.sleep(0.05)
        if kind == "all":
            names = [
                name for role in ("gateway", "scheduler", "worker", "redis") for name in self._stack.instances(role)
            ]
        elif kind == "scheduler":
            while (leader := await self._stack.leader()) is None:
                await asyncio.sleep(0.05)
            names = [leader]
        else:
            names = [self._rng.choice(self._stack.instances(kind))]
        for name in names:
            self._stack.send(name, signal.SIGKILL)
        self.outcome.server_kills.append(kind)
        self._print_line(f"{_num_lines(self._whole_lines())} lines: killed {', '.join(names)}")

    async def _wait_for(self, num_lines: int, client: Process) -> None:
        """Returns when the output has so many lines. Raises AssertionError where the client has ended."""
        while _num_lines(self._whole_lines()) < num_lines:
            if client.returncode is not None:
                assert client.stderr is not None
                raise AssertionError(f"ended with {client.returncode}: {(await client.stderr.read()).decode()}")
            await asyncio.sleep(0.05)

    def _whole_lines(self) -> bytes:
        data = self._output.read_bytes() if self._output.exists() else b""
        return data[: data.rfind(b"\n") + 1]

    def _check_prefix(self) -> None:
        if not self._whole_lines().startswith(self._seen):
            self.outcome.errors.append("lines of the output have changed")


def _num_lines(data: bytes) -> int:
    return data.count(b"\n")


async def run_batch_with_kills(plan: BatchPlan, folder: Path, print_line: PrintLine) -> BatchOutcome:
    """Runs a plan on a new stack. Input, output and the log of the roles are written to `folder`."""
    environment = _ENVIRONMENT | {"QUIRE_DETACH_GRACE": str(plan.detach_grace)}
    async with stack(folder / "log", environment, _COUNTS, _POLICY) as running:
        run = BatchRun(plan, running, folder, print_line)
        await run.run()
    for error in run.outcome.errors[:20]:
        print_line(error)
    return run.outcome


async def _main(plans: Mapping[str, BatchPlan], folder: Path) -> dict[str, BatchOutcome]:
    await prepare_model({})
    outcomes = {}
    for name, plan in plans.items():
        (folder / name).mkdir()
        outcomes[name] = await run_batch_with_kills(plan, folder / name, lambda line: print(line, flush=True))
    return outcomes


def main() -> None:
    """Parses the flags, runs, and prints the result."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--lines", type=int, default=1000, help="default %(default)s")
    parser.add_argument("--kills", type=int, default=5, help="of client and server each, default %(default)s")
    parser.add_argument("--seed", type=int, default=1, help="default %(default)s")
    options = parser.parse_args()
    folder = Path(tempfile.mkdtemp(prefix="quire-batch-"))
    print(f"input, output and the log of the roles are in {folder}", flush=True)
    plans = {
        "kills": BatchPlan(options.lines, options.kills, options.seed),
        "after_cancellation": replace(AFTER_CANCELLATION, seed=options.seed),
    }
    outcomes = asyncio.run(_main(plans, folder))
    print(json.dumps({name: outcome.summary() for name, outcome in outcomes.items()}))
    sys.exit(1 if any(outcome.errors for outcome in outcomes.values()) else 0)


if __name__ == "__main__":
    main()
