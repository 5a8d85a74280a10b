"""A run: clients that ask all the time, faults one after another, and the judgement of all that the clients saw."""

import asyncio
import random
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from time import monotonic

from tokenizers import Tokenizer

from reference import Reference
from svc_common.supervisor.runner import RestartPolicy
from tests.chaos.cases import Case, Detokenize, Protocol, make_cases, verify
from tests.chaos.checker import Wrong, check, counts, excerpt
from tests.chaos.clients import Client, GrpcClient, HttpClient
from tests.chaos.disturber import GO_ON_SECONDS, Disturber
from tests.chaos.faults import Fault, schedule
from tests.chaos.histories import Expected, FaultCount, History, fold
from tests.chaos.injector import Injector
from tests.chaos.stack import Stack, stack

ENVIRONMENT = {
    "QUIRE_DTYPE": "float32",
    "QUIRE_NUM_BLOCKS": "1200",
    # Less than a request takes, so that a gateway that ends hands requests over.
    "QUIRE_DRAIN_GRACE": "3",
}
# A role that dies every few seconds is what is wanted here, and no reason to wait for long.
_POLICY = RestartPolicy(max_backoff=1.0, stable_after=5.0)
_HTTP_SHARE = 3  # every third client speaks HTTP
_REST_SECONDS = 60.0

Say = Callable[[str], None]


@dataclass(frozen=True)
class Plan:
    """What a run is told."""

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
    """What came of it."""

    num_faults: int = 0
    num_requests: int = 0
    num_resumes: int = 0
    wrong: Counter[Wrong] = field(default_factory=Counter)
    left_over: list[str] = field(default_factory=list)
    """What was not as it should be once all was at rest."""
    recoveries: list[tuple[Fault, float]] = field(default_factory=list)
    """Seconds from each fault until every stream that ran had gone on."""

    @property
    def is_right(self) -> bool:
        """Every promise was kept."""
        return not self.wrong.total() and not self.left_over

    def summary(self) -> str:
        """The last line."""
        return " ".join((f"faults={self.num_faults}", *(f"{kind}={self.wrong[kind]}" for kind in Wrong)))


class Run:
    """Clients, faults and judgement over one stack."""

    def __init__(self, plan: Plan, running: Stack, cases: Sequence[Case], detokenize: Detokenize, say: Say) -> None:
        self.outcome = Outcome()
        self._plan = plan
        self._stack = running
        self._cases = cases
        self._detokenize = detokenize
        self._say = say
        self._live: dict[str, History] = {}
        self._faults = FaultCount()
        self._expected: dict[str, Expected] = {}
        self._is_over = False  # nothing more is asked
        self._clients: dict[str, tuple[Protocol, Client]] = {}
        self._started = monotonic()

    async def run(self) -> None:
        """From the undisturbed answers to the state at rest."""
        for i in range(max(self._plan.num_clients, _HTTP_SHARE)):
            await self._connect(i)
        try:
            await self._ask_undisturbed()
            asking = [
                asyncio.create_task(self._keep_asking(name, random.Random(f"{self._plan.seed} {i}")))
                for i, name in enumerate(list(self._clients)[: self._plan.num_clients])
            ]
            try:
                is_alive = await self._disturb()
                self._stack.heal()
                await self._let_end(asking, is_alive)
            finally:
                for task in asking:
                    task.cancel()
                await asyncio.gather(*asking, return_exceptions=True)
            await self._check_at_rest()
        finally:
            await asyncio.gather(*(client.close() for _, client in self._clients.values()))

    async def _connect(self, i: int) -> None:
        name = f"client-{i}"
        protocol = Protocol.HTTP if i % _HTTP_SHARE == _HTTP_SHARE - 1 else Protocol.GRPC
        addresses = self._stack.addresses
        listeners = addresses.http if protocol is Protocol.HTTP else addresses.grpc
        # Each begins with another gateway.
        turned = listeners[i % len(listeners) :] + listeners[: i % len(listeners)]
        links = [await self._stack.connect(name, listener.dial_address) for listener in turned]
        self._clients[name] = protocol, (HttpClient if protocol is Protocol.HTTP else GrpcClient)(links)

    async def _ask_undisturbed(self) -> None:
        """What each case answers when nothing is wrong, which is what it must answer ever after."""
        queues = {protocol: [case for case in self._cases if case.protocol is protocol] for protocol in Protocol}

        async def ask(name: str) -> None:
            protocol, _ = self._clients[name]
            while queues[protocol]:
                case = queues[protocol].pop()
                history = await self._ask(name, case, f"undisturbed-{case.name}")
                assert history.error is None, f"{case.name}, undisturbed: {history.error}"
                expected = fold(history)
                assert not check(history, expected), f"{case.name}, undisturbed: {check(history, expected)}"
                verify(case, expected, self._detokenize)
                self._expected[case.name] = expected

        async with asyncio.TaskGroup() as group:
            for name in self._clients:
                group.create_task(ask(name))
        self._say(f"{len(self._cases)} requests undisturbed, as transformers answers them: {self._seconds():.1f} s")

    async def _keep_asking(self, name: str, rng: random.Random) -> None:
        protocol, _ = self._clients[name]
        cases = [case for case in self._cases if case.protocol is protocol]
        while not self._is_over:
            case = rng.choice(cases)
            history = await self._ask(name, case, f"{name}-{rng.getrandbits(64):x}")
            self._judge(history)

    async def _ask(self, name: str, case: Case, request: str) -> History:
        history = History(request, case.name, self._faults)
        self._live[name] = history
        try:
            await self._clients[name][1].ask(case, history)
        finally:
            history.is_over = True
            del self._live[name]
        return history

    def _judge(self, history: History) -> None:
        self.outcome.num_requests += 1
        self.outcome.num_resumes += history.num_resumes
        violations = check(history, self._expected[history.case])
        self.outcome.wrong.update(counts(violations))
        for violation in violations:
            self._say(
                f"{violation.kind.upper()}: {history.name} ({history.case}), fault {self._faults.count}, "
                f"seed {self._plan.seed}: {violation.text}\n{excerpt(history, violation.place)}"
            )

    async def _disturb(self) -> bool:
        """One fault after another; whether streams went on after each."""
        injector = Injector(self._stack, self._live)
        disturber = Disturber(injector, self._live, self._faults, self._say)
        is_alive = await disturber.disturb(schedule(self._plan.seed), self._plan.num_faults)
        self.outcome.num_faults = disturber.num_faults
        self.outcome.recoveries = disturber.recoveries
        return is_alive

    async def _let_end(self, asking: list[asyncio.Task[None]], is_alive: bool) -> None:
        """Lets every request that runs come to its end; what does not is incomplete."""
        self._is_over = True
        done, late = await asyncio.wait(asking, timeout=GO_ON_SECONDS if is_alive else 0)
        self.outcome.wrong[Wrong.INCOMPLETE] += len(late)
        for name, history in self._live.items():
            shown = excerpt(history, len(history.entries) - 1)
            self._say(f"{name} did not end, {history.name} ({history.case}), seed {self._plan.seed}:\n{shown}")
        for task in done:
            task.result()

    async def _check_at_rest(self) -> None:
        """All blocks are free or cached, every role answers, and Redis keeps nothing for ever."""
        end = monotonic() + _REST_SECONDS
        while (busy := await self._busy()) and monotonic() < end:
            await asyncio.sleep(0.1)
        if busy:
            self.outcome.left_over.append(busy)
        if keys := await asyncio.to_thread(self._stack.keys_without_ttl):
            self.outcome.left_over.append(f"keys without a TTL: {', '.join(keys[:10])}")
        if missing := self._plan.num_faults - self.outcome.num_faults:
            self.outcome.left_over.append(f"{missing} faults that were planned")
        for what in self.outcome.left_over:
            self._say(f"LEFT OVER: {what}")

    async def _busy(self) -> str:
        """What is not at rest; empty where all is."""
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
        for name in ("quire_requests_running", "quire_requests_waiting"):
            if metrics[name]:
                return f"{name} is {metrics[name]:g}"
        return ""

    def _seconds(self) -> float:
        return monotonic() - self._started


async def run_chaos(plan: Plan, references: Sequence[Reference], model: Path, log: Path, say: Say) -> Outcome:
    """A whole run. `model` is the model's directory; `log` takes what the roles write."""
    tokenizer = Tokenizer.from_file(str(model / "tokenizer.json"))

    def detokenize(token_ids: Sequence[int]) -> str:
        text: str = tokenizer.decode(list(token_ids))
        return text

    for fault in islice(schedule(plan.seed), plan.num_faults):
        say(f"planned {fault.number:3d}: {fault}")
    cases = make_cases(references, detokenize, plan.is_small)
    counts = {"gateways": plan.gateways, "schedulers": plan.schedulers, "workers": plan.workers}
    async with stack(log, ENVIRONMENT, counts, _POLICY) as running:
        run = Run(plan, running, cases, detokenize, say)
        await run.run()
        num_restarts = running.num_restarts()
    outcome = run.outcome
    say(f"{outcome.num_requests} requests, {outcome.num_resumes} resumed, {num_restarts} restarts of roles")
    return outcome
