"""Plain and constrained streams beside grammars that take as much time and memory as anyone can make them take, and
beside usual ones for comparison.

`python -m tests.acceptance.hostile_grammars ADDRESS hostile` sends them until it is terminated, and `usual` the others:
a process of its own, so that it does not delay those who read the streams. No grammar is sent twice, and as many are
sent in a second, so that the time of usual work does not count.
"""

import asyncio
import json
import math
import os
import sys
from asyncio.subprocess import PIPE
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from itertools import cycle
from statistics import median
from time import monotonic
from typing import Any

from quire_client import AsyncClient, QuireError

NUM_STREAMS = 16
NUM_HOSTILE = 4
"""Hostile requests at the same time."""
KINDS = ("plain", "constrained")
"""Of streams; there are as many of each."""

_SECONDS_BETWEEN = 1.0  # two requests of one sender
_REFUSALS = ("GRAMMAR_INVALID", "GRAMMAR_TOO_COMPLEX", "MESSAGE_TOO_LARGE")
_BEGINS = "begins"
_TREE = {"anyOf": [{"type": "null"}, {"type": "array", "items": {"$ref": "#/$defs/t"}}]}


def _deep(depth: int) -> dict[str, Any]:
    schema: dict[str, Any] = {"type": "null"}
    for _ in range(depth):
        schema = {"type": "array", "items": schema}
    return schema


HOSTILE: dict[str, dict[str, Any]] = {
    "exponential states": {"regex": "(a|b)*a(a|b){40}"},
    "exponential intersection": {
        "json_schema": {"allOf": [{"type": "string", "pattern": f"a.{{{n}}}b"} for n in range(40)]}
    },
    "exponential rules": {
        "grammar": "start: A0\n" + "".join(f"A{n}: A{n + 1} A{n + 1}\n" for n in range(60)) + 'A60: "a"'
    },
    "ambiguous": {"grammar": 'start: e\ne: e e | e e e | "a" | ""'},
    "masks that take long": {"grammar": 'start: e\ne: e e | e e e | "a"', "n": 16, "max_tokens": 150},
    "masks that take long at times": {
        "grammar": 'start: (e /\\n/)+\ne: e e | e e e | x\nx: "~" ("a" | "b" | "c" | "d")',
        "n": 16,
        "max_tokens": 150,
    },
    "long text": {"grammar": f'start: "{"never to end " * 9_000}"'},
    "counted": {"regex": "((a{1,100}){1,100}){1,100}"},
    "larger than a message": {"json_schema": '{"enum": ["' + "x" * 10_000_000 + '"]}'},
    "4 MB": {"json_schema": '{"enum": ["' + "x" * 4_000_000 + '"]}'},
    "many values": {"json_schema": {"enum": [f"{n:x}" * 4 for n in range(6000)]}},
    "deep": {"json_schema": '{"items":' * 100_000},
    "as deep as it may be": {"json_schema": _deep(40)},
    "nested groups": {"regex": "(" * 60_000 + ")" * 60_000},
    "recursive": {"json_schema": {"$defs": {"t": _TREE}, "$ref": "#/$defs/t"}},
    "many optional properties": {
        "json_schema": {"type": "object", "properties": {f"p{n}": {} for n in range(1500)}, "additionalProperties": {}}
    },
    "long string": {"json_schema": {"type": "string", "minLength": 5000, "maxLength": 5000}},
}
"""Options of a request by name. Some are refused, the others are generated."""

USUAL: dict[str, dict[str, Any]] = {
    "schema": {"json_schema": {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}},
    "regular expression": {"regex": "[a-z]{1,10}"},
}
"""The same of requests that delay others as any do."""

Times = Callable[[], Awaitable[tuple[float, float]]]
"""Returns the worker's steps, and the seconds that they took."""


def _options(number: int, num_tokens: int) -> dict[str, Any]:
    """Of a stream of so many tokens. Each constrained one has a grammar of its own."""
    sampling = {"max_tokens": num_tokens, "temperature": 1, "seed": number}
    if _kind(number) == "plain":
        return {**sampling, "ignore_eos": True}
    properties = {
        "name": {"type": "string", "maxLength": 20},
        f"number_{number}": {"type": "integer"},
        "kind": {"enum": ["small", "medium", "large"]},
    }
    item = {"type": "object", "properties": properties, "required": list(properties), "additionalProperties": False}
    return {**sampling, "json_schema": {"type": "array", "minItems": 5_000, "items": item}}


def variant(options: dict[str, Any], number: int) -> dict[str, Any]:
    """Options with another grammar of the same kind: what was found out about one is kept."""
    match options:
        case {"regex": regex}:
            return {**options, "regex": f"{regex}|x{number}"}
        case {"grammar": grammar}:
            return {**options, "grammar": f"{grammar}\n// {number}"}
        case {"json_schema": str(schema)}:
            return {**options, "json_schema": schema.replace("{", f'{{"title": "{number}", ', 1)}
        case {"json_schema": schema}:
            return {**options, "json_schema": {"title": str(number), **schema}}
    raise ValueError(options)


def _kind(number: int) -> str:
    return KINDS[number % len(KINDS)]


@dataclass
class Gaps:
    """Of all streams of a round, since each has its first token: the longest time between two tokens by kind, the mean
    time of a step, steps, and which hostile grammars there were.
    """

    longest: dict[str, float]
    mean_step: float
    num_steps: int
    hostile: set[str] = field(default_factory=set)


@dataclass
class HostileOutcome:
    """The rounds with and without hostile grammars, and what was wrong. `alone` is beside usual ones."""

    alone: list[Gaps] = field(default_factory=list)
    beside: list[Gaps] = field(default_factory=list)
    refused: set[str] = field(default_factory=set)
    accepted: set[str] = field(default_factory=set)
    errors: list[str] = field(default_factory=list)
    running: Counter[str] = field(default_factory=Counter)
    in_round: set[str] = field(default_factory=set)
    """Hostile grammars of the round that goes on."""

    def begin(self, name: str) -> None:
        """A hostile request was sent."""
        self.running[name] += 1
        self.in_round.add(name)

    def note(self, name: str, reason: str | None) -> None:
        """A hostile request ended, with this reason of an error."""
        self.running[name] -= 1
        if reason is None:
            self.accepted.add(name)
        elif reason in _REFUSALS:
            self.refused.add(name)
        else:
            self.errors.append(f"hostile: {name} ended with {reason}")

    def end_round(self) -> None:
        """Notes which hostile grammars the last round had."""
        self.beside[-1].hostile = self.in_round
        self.in_round = {name for name, number in self.running.items() if number}

    def has_rounds(self, num_rounds: int) -> bool:
        """Whether every hostile grammar was there in so many rounds."""
        counts = Counter(name for gaps in self.beside for name in gaps.hostile)
        return bool(self.errors) or all(counts[name] >= num_rounds for name in HOSTILE)

    @property
    def more_steps(self) -> float:
        """How many steps more the streams took than alone. A stream that is in every step takes none."""
        alone, beside = (median(gaps.num_steps for gaps in rounds) for rounds in (self.alone, self.beside))
        return beside - alone

    def longest(self, kind: str) -> tuple[float, float]:
        """The longest time between two tokens of such a stream, alone and beside: medians of rounds, since other
        processes add to it. Beside: of the rounds with the grammar that delays most.
        """
        beside: dict[str, list[float]] = {}
        for gaps in self.beside:
            for name in gaps.hostile:
                beside.setdefault(name, []).append(gaps.longest[kind])
        return median(gaps.longest[kind] for gaps in self.alone), max(map(median, beside.values()), default=math.inf)

    def longer_by_steps(self, kind: str) -> float:
        """By how many steps the longest time between two tokens of such a stream grew."""
        alone, beside = self.longest(kind)
        return (beside - alone) / median(gaps.mean_step for gaps in self.alone)

    def summary(self) -> dict[str, float]:
        """For the last line of the output. Times of steps are medians of rounds."""
        step, step_beside = (median(gaps.mean_step for gaps in rounds) for rounds in (self.alone, self.beside))
        return {
            "refused": len(self.refused),
            "accepted": len(self.accepted),
            "more_steps": self.more_steps,
            "step": round(step, 4),
            "step_beside": round(step_beside, 4),
            **{f"longest_gap_alone_{kind}": round(self.longest(kind)[0], 4) for kind in KINDS},
            **{f"longest_gap_beside_{kind}": round(self.longest(kind)[1], 4) for kind in KINDS},
            **{
                f"longest_gap_of_all_rounds_{which}_{kind}": round(max(gaps.longest[kind] for gaps in rounds), 4)
                for which, rounds in (("alone", self.alone), ("beside", self.beside))
                for kind in KINDS
            },
            **{f"longer_by_steps_{kind}": round(self.longer_by_steps(kind), 2) for kind in KINDS},
        }


async def run_hostile(
    client: AsyncClient, address: str, times: Times, num_tokens: int, num_rounds: int
) -> HostileOutcome:
    """Runs streams of so many tokens beside usual grammars, and then beside hostile ones until each was sent."""
    outcome = HostileOutcome()
    expected = await _round(client, times, num_tokens, [])  # warms up

    async def run(gaps: list[Gaps]) -> None:
        if await _round(client, times, num_tokens, gaps) != expected:
            outcome.errors.append("hostile: tokens of streams are others than alone")

    async with _sending("usual", address, HostileOutcome()):
        for _ in range(num_rounds):
            await run(outcome.alone)
    async with _sending("hostile", address, outcome):
        while not outcome.has_rounds(num_rounds):
            await run(outcome.beside)
            outcome.end_round()
    return outcome


@asynccontextmanager
async def _sending(which: str, address: str, outcome: HostileOutcome) -> AsyncIterator[None]:
    """Another process sends hostile or usual grammars until the end of `async with`."""
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "tests.acceptance.hostile_grammars", address, which, stdout=PIPE, env=environment
    )

    async def read() -> None:
        assert process.stdout is not None
        async for line in process.stdout:
            name, event = json.loads(line)
            if event == _BEGINS:
                outcome.begin(name)
            else:
                outcome.note(name, event)

    reading = asyncio.create_task(read())
    try:
        yield
        assert process.returncode is None, "the process that sends grammars ended"
    finally:
        if process.returncode is None:
            process.terminate()
        await process.wait()
        await reading


async def send_grammars(address: str, grammars: dict[str, dict[str, Any]]) -> None:
    """Sends a variant of each, several at once, again and again. Prints when each begins and why it ends."""
    left = enumerate(cycle(grammars.items()))
    async with AsyncClient(address) as client:

        async def send_some() -> None:
            for number, (name, options) in left:
                next_one = asyncio.create_task(asyncio.sleep(_SECONDS_BETWEEN))
                print(json.dumps([name, _BEGINS]), flush=True)
                reason = None
                try:
                    await client.generate("a", temperature=1, seed=1, **{"max_tokens": 4} | variant(options, number))
                except QuireError as error:
                    reason = error.reason
                print(json.dumps([name, reason]), flush=True)
                await next_one

        await asyncio.gather(*(send_some() for _ in range(NUM_HOSTILE)))


async def _round(client: AsyncClient, times: Times, num_tokens: int, gaps: list[Gaps]) -> list[list[int]]:
    """The tokens of all streams."""
    longest = dict.fromkeys(KINDS, 0.0)
    num_started = 0
    steps = busy = 0.0

    async def stream(number: int) -> list[int]:
        nonlocal num_started, steps, busy
        token_ids: list[int] = []
        last = 0.0
        async for chunk in client.stream(f"Story {number}:", **_options(number, num_tokens)):
            now = monotonic()
            # The first tokens wait for the prompts of others.
            if len(token_ids) > num_tokens // 10:
                longest[_kind(number)] = max(longest[_kind(number)], now - last)
            token_ids += chunk.token_ids
            last = now
            if len(token_ids) == len(chunk.token_ids):
                num_started += 1
                if num_started == NUM_STREAMS:
                    steps, busy = await times()
        return token_ids

    streams = await asyncio.gather(*map(stream, range(NUM_STREAMS)))
    more_steps, more_busy = await times()
    num_steps = more_steps - steps
    gaps.append(Gaps(longest, (more_busy - busy) / num_steps, int(num_steps)))
    return streams


if __name__ == "__main__":
    asyncio.run(send_grammars(sys.argv[1], {"hostile": HOSTILE, "usual": USUAL}[sys.argv[2]]))
