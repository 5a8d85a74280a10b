"""What the programs of all clients share: how checks run, and what they ask for.

Each program runs in its client's environment: this module imports only pydantic beside the standard library.
"""

import asyncio
import inspect
import json
import os
import subprocess
import sys
import time
import traceback
from collections.abc import Awaitable, Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, Literal, NoReturn, TypeVar

from pydantic import BaseModel, ConfigDict, Field

BASE_URL = os.environ["OPENAI_BASE_URL"]
MODEL = "smollm2-135m-instruct"
QUESTION = "What is the weather in Oslo?"
CHAT: list[Any] = [{"role": "user", "content": QUESTION}]
WEATHER = "It is 4 degrees and it rains."
"""What the tool answers."""

GREEDY: dict[str, Any] = {"temperature": 0, "max_tokens": 128}
ONE_CALL: dict[str, Any] = {**GREEDY, "parallel_tool_calls": False}
"""For requests with tools: a small model repeats a call until no further one is allowed."""

BAD_SCHEMA: dict[str, Any] = {
    "type": "json_schema",
    "json_schema": {"name": "bad", "schema": {"type": "no such type"}},
}
"""A response_format that no server can compile."""

# A load of the programs that are load generators: so many requests, of which so many at once, each for so many tokens.
REQUESTS, CONCURRENT, TOKENS = 20, 4, 16

REPEAT = 'Repeat this JSON: {"city": "Oslo"}'
"""A question whose answer is a City, for requests whose grammar allows any object."""

Check = Callable[[], Awaitable[None] | None]
Error = TypeVar("Error", bound=Exception)
_checks: list[Check] = []
_loop = asyncio.Runner()


class City(BaseModel):
    """A city."""

    model_config = ConfigDict(extra="forbid")

    city: str


class Forecast(BaseModel):
    """The forecast for one city."""

    model_config = ConfigDict(extra="forbid")  # a small model may add properties without end

    city: Literal["Berlin", "Lima", "Oslo"]
    celsius: int = Field(ge=-30, le=45)
    rain: bool
    warnings: list[Literal["storm", "heat", "ice"]] = Field(max_length=2)


class WeatherQuery(BaseModel):
    """Weather of a city."""

    model_config = ConfigDict(extra="forbid")

    city: Literal["Berlin", "Lima", "Oslo"]
    unit: Literal["celsius", "fahrenheit"]


TOOL: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "Weather of a city.",
        "parameters": WeatherQuery.model_json_schema(),
    },
}


def get_weather(city: Literal["Berlin", "Lima", "Oslo"], unit: Literal["celsius", "fahrenheit"]) -> str:
    """Weather of a city.

    Args:
        city: The city.
        unit: The unit of the temperature.
    """
    WeatherQuery(city=city, unit=unit)
    return WEATHER


def run_command(name: str, *arguments: str | Path) -> str:
    """Runs a command that the client's package installs; returns what it prints. Raises AssertionError if it fails."""
    command = [Path(sys.executable).with_name(name), *arguments]
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False)
    assert done.returncode == 0, done.stdout[-8000:]
    return done.stdout


def error_of(kind: type[Error], call: Callable[[], object]) -> Error:
    """The exception of a kind that a call raises, at once or when awaited. Raises AssertionError if there is none."""
    try:
        _finish(call())
    except kind as error:
        return error
    raise AssertionError("the request is accepted")


def assert_fields(client: str, version: str, types: Mapping[str, Iterable[str]]) -> None:
    """Asserts that request_fields.json has the fields of the client's types: docs/parameters.md has those."""
    fields = {"version": version, "types": {name: sorted(names) for name, names in types.items()}}
    listed = json.loads(Path(__file__).with_name("request_fields.json").read_text())
    assert listed[client] == fields, f"should be {json.dumps(fields)}"


def check(function: Check) -> Check:
    """Registers a check of the program. It fails if it raises."""
    _checks.append(function)
    return function


def _finish(outcome: object) -> None:
    """Waits for the result of an asynchronous call, always on the same event loop: clients belong to one."""
    if inspect.iscoroutine(outcome):
        _loop.run(outcome)


def run() -> NoReturn:
    """Runs the registered checks and prints each result as a line of JSON, and at the end the number of checks. Exits
    with 1 if one failed."""
    passed = True
    for function in _checks:
        started = time.monotonic()
        result: dict[str, Any] = {"check": function.__name__, "passed": True}
        try:
            _finish(function())
        except Exception:
            result |= {"passed": False, "error": traceback.format_exc()}
            passed = False
        print(json.dumps(result | {"seconds": round(time.monotonic() - started, 1)}), flush=True)
    print(json.dumps({"checks": len(_checks)}), flush=True)
    sys.exit(0 if passed else 1)
