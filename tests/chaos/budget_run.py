"""Streams of an API key with `tokens_per_minute`, over two gateways, while the leading scheduler is killed.

After each chunk it is compared what was delivered to the key with what its budget has issued since before the first
request: a minute's tokens, and as many for each minute since.
"""

import asyncio
import math
import signal
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from time import monotonic

from quire_client import AsyncClient
from svc_common.supervisor.runner import RestartPolicy
from tests.chaos.stack import Stack, stack

PROMPT_TOKENS = 8
_SECONDS = 1200.0  # for all streams
_FREE_SHARE = 5  # every fifth stream is of a key without a limit
_LIMITED, _FREE = "a-key-with-a-token-budget", "a-key-without-a-token-budget"
_KEY_FILE = """
[[keys]]
key = "{limited}"
tenant = "limited"
tokens_per_minute = {per_minute}

[[keys]]
key = "{free}"
tenant = "free"
"""


@dataclass(frozen=True)
class BudgetPlan:
    """The run ends when `stop_at` tokens are delivered to the limited key; None: when all streams have ended."""

    num_streams: int
    per_minute: int
    max_tokens: int
    stop_at: int | None = None


@dataclass
class BudgetOutcome:
    """Tokens that were delivered to the limited key, prompts included, and what was wrong."""

    delivered: int = 0
    delivered_before_death: int = 0
    most_beyond: int = 0
    """The most tokens by which it was ahead of its budget."""
    num_ended: int = 0
    """Streams that have all their tokens, of both keys."""
    num_free_ended: int = 0
    seconds: float = 0.0


class BudgetRun:
    """All streams of a plan on one stack."""

    def __init__(self, plan: BudgetPlan, running: Stack) -> None:
        self.outcome = BudgetOutcome()
        self._plan = plan
        self._stack = running
        self._started = monotonic()
        self._is_half_spent = asyncio.Event()
        self._is_enough = asyncio.Event()

    async def run(self) -> None:
        """Starts all streams, kills the leader when half of a minute's tokens is delivered, and waits for the end."""
        plan, addresses = self._plan, [listener.dial_address for listener in self._stack.addresses.grpc]
        clients = {
            (key, first): AsyncClient(
                ",".join(addresses[first:] + addresses[:first]), api_key=key, resume_patience=_SECONDS
            )
            for key in (_LIMITED, _FREE)
            for first in range(len(addresses))
        }
        try:
            async with asyncio.timeout(_SECONDS):
                streams = [
                    asyncio.create_task(
                        self._stream(clients[_FREE if i % _FREE_SHARE == 0 else _LIMITED, i // 2 % len(addresses)], i)
                    )
                    for i in range(plan.num_streams)
                ]
                try:
                    await self._kill_leader()
                    free = [stream for i, stream in enumerate(streams) if i % _FREE_SHARE == 0]
                    await asyncio.gather(*free)
                    if plan.stop_at is None:
                        await asyncio.gather(*streams)
                    else:
                        await self._is_enough.wait()
                finally:
                    for stream in streams:
                        stream.cancel()
                    await asyncio.gather(*streams, return_exceptions=True)
        finally:
            self.outcome.seconds = monotonic() - self._started
            await asyncio.gather(*(client.aclose() for client in clients.values()))

    async def _kill_leader(self) -> None:
        await self._is_half_spent.wait()
        while (leader := await self._stack.leader()) is None:
            await asyncio.sleep(0.05)
        self.outcome.delivered_before_death = self.outcome.delivered
        self._stack.send(leader, signal.SIGKILL)

    async def _stream(self, client: AsyncClient, number: int) -> None:
        is_free, num_tokens = number % _FREE_SHARE == 0, 0
        prompt = [1000 + 37 * number + i for i in range(PROMPT_TOKENS)]  # none shares a prefix
        stream = client.stream(
            prompt, max_tokens=self._plan.max_tokens, temperature=0, ignore_eos=True, request_id=f"stream-{number}"
        )
        async for chunk in stream:
            if not is_free and chunk.token_ids:
                self._note(len(chunk.token_ids) + (0 if num_tokens else PROMPT_TOKENS))
            num_tokens += len(chunk.token_ids)
        assert num_tokens == self._plan.max_tokens, f"stream {number} has {num_tokens} tokens"
        self.outcome.num_ended += 1
        self.outcome.num_free_ended += is_free

    def _note(self, num_tokens: int) -> None:
        outcome, plan = self.outcome, self._plan
        outcome.delivered += num_tokens
        issued = plan.per_minute + math.ceil(plan.per_minute * (monotonic() - self._started) / 60)
        outcome.most_beyond = max(outcome.most_beyond, outcome.delivered - issued)
        if 2 * outcome.delivered >= plan.per_minute:
            self._is_half_spent.set()
        if plan.stop_at is not None and outcome.delivered >= plan.stop_at:
            self._is_enough.set()


async def run_budgets(plan: BudgetPlan, log: Path, print_line: Callable[[str], None]) -> BudgetOutcome:
    """Runs a plan on a new stack of two gateways, two schedulers and a worker; their output is written to `log`."""
    with tempfile.NamedTemporaryFile("w", suffix=".toml") as keys:
        keys.write(_KEY_FILE.format(limited=_LIMITED, free=_FREE, per_minute=plan.per_minute))
        keys.flush()
        counts = {"gateways": 2, "schedulers": 2, "workers": 1}
        async with stack(log, {"QUIRE_API_KEYS": keys.name}, counts, RestartPolicy()) as running:
            run = BudgetRun(plan, running)
            await run.run()
    outcome = run.outcome
    print_line(
        f"{outcome.delivered} tokens delivered in {outcome.seconds:.0f} s, {outcome.delivered_before_death} of them "
        f"before a scheduler was killed; {outcome.num_ended} streams ended"
    )
    return outcome
