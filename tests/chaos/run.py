"""A run: clients send requests in a loop while faults are injected, and every response is checked."""

import asyncio
import random
import tempfile
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from time import monotonic
from typing import Any

from tokenizers import Tokenizer

from reference import Reference
from svc_common.supervisor.runner import RestartPolicy
from tests.chaos.cases import Case, Detokenize, Protocol, make_cases, verify
from tests.chaos.checker import ViolationKind, check, counts, excerpt
from tests.chaos.clients import Client, GrpcClient, HttpClient
from tests.chaos.fault_runner import RECOVERY_SECONDS, FaultRunner, Recovery
from tests.chaos.faults import Fault, schedule
from tests.chaos.histories import Expected, FaultCount, History, expected_from
from tests.chaos.injector import StackInjector
from tests.chaos.pauses import too_long
from tests.chaos.stack import Stack, stack

ENVIRONMENT = {
    "QUIRE_DTYPE": "float32",
    # Few enough that requests wait for slots, and running ones are preempted for blocks.
    "QUIRE_NUM_BLOCKS": "160",
    "QUIRE_MAX_SEQUENCES": "8",
    # Shorter than a request, so that requests outlive a gateway that drains.
    "QUIRE_DRAIN_GRACE": "3",
}
# Roles die every few seconds here, so the backoff between restarts is short.
_POLICY = RestartPolicy(max_backoff=1.0, stable_after=5.0)
_HTTP_SHARE = 3  # every third client speaks HTTP
_IDLE_SECONDS = 60.0
_SAMPLE_SECONDS = 0.5
_SMALL_FACTOR = 10.0  # of the limits of pauses: no test depends on how fast the machine is
_KEYS = ("chaos-key-of-tenant-one", "chaos-key-of-tenant-two")
_KEY_FILE = """
[[keys]]
key = "chaos-key-of-tenant-one"
tenant = "one"
max_priority = 1

[[keys]]
key = "chaos-key-of-tenant-two"
tenant = "two"
weight = 2
max_priority = 1
"""

PrintLine = Callable[[str], None]


@dataclass(frozen=True)
class Plan:
    """The settings of a run."""

    num_faults: int
    num_clients: int
    seed: int
    gateways: int = 2
    schedulers: int = 2
    workers: int = 2
    is_small: bool = False
    """Only one request of each kind."""


@dataclass
class Outcome:
    """The result of a run."""

    num_faults: int = 0
    num_requests: int = 0
    num_resumes: int = 0
    violations: Counter[ViolationKind] = field(default_factory=Counter)
    final_errors: list[str] = field(default_factory=list)
    """What is wrong after the last request has ended."""
    recoveries: list[tuple[Fault, Recovery]] = field(default_factory=list)
    """Of each fault that no other one overlapped."""
    num_ended_early: Counter[str] = field(default_factory=Counter)
    """Requests that ended as their case allows, by deadline or without a name, by the kind of their case."""
    most_waiting: int = 0
    """The longest queue that was seen, in sequences."""
    num_preemptions: int = 0
    """Preemptions that were seen."""

    @property
    def passed(self) -> bool:
        """Whether there is no violation and no error at the end."""
        return not self.violations.total() and not self.final_errors

    def recoveries_by_kind(self) -> dict[str, list[Recovery]]:
        """What recovery took, by what was done to which role."""
        by_kind = defaultdict[str, list[Recovery]](list)
        for fault, recovery in self.recoveries:
            by_kind[f"{fault.action} {fault.target}"].append(recovery)
        return dict(sorted(by_kind.items()))

    def summary(self) -> dict[str, Any]:
        """What the last line of the output says."""
        return {
            "faults": self.num_faults,
            **{str(kind): self.violations[kind] for kind in ViolationKind},
            "requests": self.num_requests,
            "resumes": self.num_resumes,
            "preemptions": self.num_preemptions,
            "most_waiting": self.most_waiting,
            "ended_early": dict(self.num_ended_early),
            "final_errors": self.final_errors,
            "longest_pauses": {
                kind: round(max(one.pause for one in found), 2) for kind, found in self.recoveries_by_kind().items()
            },
        }


class Run:
    """Clients, faults and checks on one stack."""

    def __init__(
        self, plan: Plan, running: Stack, cases: Sequence[Case], detokenize: Detokenize, print_line: PrintLine
    ) -> None:
        self.outcome = Outcome()
        self._plan = plan
        self._stack = running
        self._cases = cases
        self._detokenize = detokenize
        self._print_line = print_line
        self._live: dict[str, History] = {}
        self._faults = FaultCount()
        self._expected: dict[str, Expected] = {}
        self._is_stopping = False  # no new request is sent
        self._clients: dict[str, tuple[Protocol, Client]] = {}
        self._started = monotonic()

    async def run(self) -> None:
        """Runs all cases without faults, then with faults, then checks the final state."""
        for i in range(max(self._plan.num_clients, _HTTP_SHARE)):
            await self._connect(i)
        try:
            await self._run_without_faults()
            watching = asyncio.create_task(self._watch_load())
            client_tasks = [
                asyncio.create_task(self._run_client(name, random.Random(f"{self._plan.seed} {i}")))
                for i, name in enumerate(list(self._clients)[: self._plan.num_clients])
            ]
            try:
                all_recovered = await self._inject_faults()
                self._stack.clear_faults()
                await self._finish_requests(client_tasks, all_recovered)
            finally:
                for task in (watching, *client_tasks):
                    task.cancel()
                await asyncio.gather(watching, *client_tasks, return_exceptions=True)
            await self._check_final_state()
        finally:
            await asyncio.gather(*(client.close() for _, client in self._clients.values()))

    async def _connect(self, i: int) -> None:
        name = f"client-{i}"
        protocol = Protocol.HTTP if i % _HTTP_SHARE == _HTTP_SHARE - 1 else Protocol.GRPC
        addresses = self._stack.addresses
        listeners = [*(addresses.http if protocol is Protocol.HTTP else addresses.grpc)]
        key = _KEYS[i // 2 % len(_KEYS)]
        # Clients start with different gateways.
        turned = listeners[i % len(listeners) :] + listeners[: i % len(listeners)]
        links = [await self._stack.connect(name, listener.dial_address) for listener in turned]
        self._clients[name] = protocol, (HttpClient if protocol is Protocol.HTTP else GrpcClient)(links, key)

    async def _run_without_faults(self) -> None:
        """Runs each case without faults. Its response is the expected one for the rest of the run."""
        queues = {protocol: [case for case in self._cases if case.protocol is protocol] for protocol in Protocol}

        async def run_cases(name: str) -> None:
            protocol, _ = self._clients[name]
            while queues[protocol]:
                case = queues[protocol].pop()
                history = await self._run_request(name, case.that_ends(), f"without-faults-{case.name}")
                assert history.error is None, f"{case.name}, without faults: {history.error}"
                expected = expected_from(history)
                assert not check(history, expected), f"{case.name}, without faults: {check(history, expected)}"
                verify(case, expected, self._detokenize)
                self._expected[case.name] = expected

        async with asyncio.TaskGroup() as group:
            for name in self._clients:
                group.create_task(run_cases(name))
        self._print_line(f"{len(self._cases)} requests without faults equal transformers: {self._seconds():.1f} s")

    async def _run_client(self, name: str, rng: random.Random) -> None:
        protocol, _ = self._clients[name]
        cases = [case for case in self._cases if case.protocol is protocol]
        while not self._is_stopping:
            case = rng.choice(cases)
            history = await self._run_request(name, case, f"{name}-{rng.getrandbits(64):x}")
            self._check_history(history)

    async def _run_request(self, name: str, case: Case, request: str) -> History:
        history = History(request, case.name, self._faults)
        self._live[name] = history
        try:
            await self._clients[name][1].run(case, history)
        finally:
            history.is_done = True
            del self._live[name]
        return history

    def _check_history(self, history: History) -> None:
        self.outcome.num_requests += 1
        self.outcome.num_resumes += history.num_resumes
        if history.may_end_so:
            self.outcome.num_ended_early[history.case.split("-")[1]] += 1
        found = check(history, self._expected[history.case])
        self.outcome.violations.update(counts(found))
        for violation in found:
            self._print_line(
                f"{violation.kind.upper()}: {history.name} ({history.case}), fault {self._faults.count}, "
                f"seed {self._plan.seed}: {violation.text}\n{excerpt(history, violation.position)}"
            )

    async def _inject_faults(self) -> bool:
        """Injects all faults. Returns whether all streams recovered from each."""
        injector = StackInjector(self._stack, self._live)
        fault_runner = FaultRunner(injector, self._live, self._faults, self._print_line)
        all_recovered = await fault_runner.run(schedule(self._plan.seed), self._plan.num_faults)
        self.outcome.num_faults = fault_runner.num_faults
        self.outcome.recoveries = fault_runner.recoveries
        return all_recovered

    async def _watch_load(self) -> None:
        """Looks at the leader's queue and preemptions until cancelled. A leader's last ones may be lost."""
        seen: dict[str, float] = {}
        while True:
            await asyncio.sleep(_SAMPLE_SECONDS)
            leader = await self._stack.leader()
            page = await self._stack.metrics(leader) if leader is not None else {}
            waiting = sum(value for name, value in page.items() if name.startswith("quire_sequences_waiting"))
            self.outcome.most_waiting = max(self.outcome.most_waiting, int(waiting))
            for name in [name for name in page if name.startswith("quire_preemptions_total")]:
                # Another leader counts from 0.
                since = page[name] - seen.get(name, 0.0)
                self.outcome.num_preemptions += int(since if since >= 0 else page[name])
                seen[name] = page[name]

    async def _finish_requests(self, client_tasks: list[asyncio.Task[None]], all_recovered: bool) -> None:
        """Waits for the running requests; counts those that do not end as incomplete."""
        self._is_stopping = True
        done, late = await asyncio.wait(client_tasks, timeout=RECOVERY_SECONDS if all_recovered else 0)
        self.outcome.violations[ViolationKind.INCOMPLETE] += len(late)
        for name, history in self._live.items():
            shown = excerpt(history, len(history.entries) - 1)
            self._print_line(f"{name} did not end, {history.name} ({history.case}), seed {self._plan.seed}:\n{shown}")
        for task in done:
            task.result()

    async def _check_final_state(self) -> None:
        """Checks that all blocks are free or cached, every role answers, and every key in Redis has a time to live."""
        end = monotonic() + _IDLE_SECONDS
        while (busy := await self._busy_reason()) and monotonic() < end:
            await asyncio.sleep(0.1)
        if busy:
            self.outcome.final_errors.append(busy)
        if keys := await asyncio.to_thread(self._stack.keys_without_ttl):
            self.outcome.final_errors.append(f"keys without a TTL: {', '.join(keys[:10])}")
        if missing := self._plan.num_faults - self.outcome.num_faults:
            self.outcome.final_errors.append(f"{missing} planned faults were not injected")
        if not self._plan.is_small and not (self.outcome.most_waiting and self.outcome.num_preemptions):
            self.outcome.final_errors.append("no sequence waited, or none was preempted: the load is too small")
        self.outcome.final_errors += too_long(self.outcome.recoveries, _SMALL_FACTOR if self._plan.is_small else 1.0)
        for error in self.outcome.final_errors:
            self._print_line(f"ERROR AT THE END: {error}")

    async def _busy_reason(self) -> str:
        """Why the stack is not idle; empty if it is."""
        if not self._stack.is_ready():
            return "a role does not answer"
        leader = await self._stack.leader()
        if leader is None:
            return "no scheduler leads"
        metrics = await self._stack.metrics(leader)
        workers = len(self._stack.instances("worker"))
        if metrics.get("quire_workers_ready") != workers:
            return f"{metrics.get('quire_workers_ready')} of {workers} workers are in use"
        blocks = {name: value for name, value in metrics.items() if name.startswith("quire_kv_blocks{") and value}
        for name, value in blocks.items():
            if 'state="free"' not in name and 'state="cached"' not in name:
                return f"{name} is {value:g}"
        for name in ("quire_sequences_running", "quire_sequences_waiting"):
            if metrics[name]:
                return f"{name} is {metrics[name]:g}"
        return ""

    def _seconds(self) -> float:
        return monotonic() - self._started


async def run_chaos(
    plan: Plan, references: Sequence[Reference], model: Path, log: Path, print_line: PrintLine
) -> Outcome:
    """Runs a plan on a new stack. `model` is the model's directory; the output of the roles is written to `log`."""
    tokenizer = Tokenizer.from_file(str(model / "tokenizer.json"))

    def detokenize(token_ids: Sequence[int]) -> str:
        text: str = tokenizer.decode(list(token_ids))
        return text

    for fault in islice(schedule(plan.seed), plan.num_faults):
        print_line(f"planned {fault.number:3d}: {fault}")
    cases = make_cases(references, detokenize, plan.is_small)
    counts = {"gateways": plan.gateways, "schedulers": plan.schedulers, "workers": plan.workers}
    with tempfile.NamedTemporaryFile("w", suffix=".toml") as keys:
        keys.write(_KEY_FILE)
        keys.flush()
        async with stack(log, ENVIRONMENT | {"QUIRE_API_KEYS": keys.name}, counts, _POLICY) as running:
            run = Run(plan, running, cases, detokenize, print_line)
            await run.run()
            num_restarts = running.num_restarts()
    outcome = run.outcome
    ended = ", ".join(f"{count} of kind {kind}" for kind, count in sorted(outcome.num_ended_early.items())) or "none"
    print_line(f"{outcome.num_requests} requests, {outcome.num_resumes} resumed, {num_restarts} restarts of roles")
    print_line(f"ended early, as they may: {ended}")
    print_line(f"at most {outcome.most_waiting} sequences waited; {outcome.num_preemptions} preemptions")
    return outcome
