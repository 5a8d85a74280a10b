"""Recorded arrivals: a file of JSON lines, one for each request.

    {"at": 0.25, "output_tokens": 64, "prompt_tokens": 300, "prefix": {"name": "system", "num_tokens": 200}}
    {"at": 0.31, "output_tokens": 12, "prompt": [5, 17, 9], "tenant": "a", "weight": 2, "priority": 1, "deadline": 10}

`at` is in seconds from the start and does not fall; `deadline` is in seconds after it. A prompt is
given by its tokens, or by their number and a prefix. `max_tokens` is `output_tokens` unless given, and `n` is 1.
"""

import json
from collections.abc import Iterable, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

from benchmarks.simulator.arrivals import Arrival, Prefix

_NUMBERS = {"at": float, "weight": float, "deadline": float}
_WHOLE = ("prompt_tokens", "output_tokens", "max_tokens", "priority", "n")
_FIELDS = {*_NUMBERS, *_WHOLE, "tenant", "prefix", "prompt"}


class RecordingError(Exception):
    """An invalid recording. The text names the line."""


def read_recording(path: Path) -> Iterator[Arrival]:
    """The requests of a file, in its order, read lazily. Raises RecordingError."""
    before = 0.0
    try:
        with path.open() as lines:
            for number, line in enumerate(lines, 1):
                try:
                    arrival = _read(json.loads(line))
                    if arrival.at < before:
                        raise ValueError("arrives before the line above")
                except (ValueError, KeyError, TypeError) as error:
                    raise RecordingError(f"{path}, line {number}: {_reason(error)}") from error
                before = arrival.at
                yield arrival
    except OSError as error:
        raise RecordingError(f"{path}: {(error.strerror or 'cannot be read').lower()}") from error


def write_recording(path: Path, arrivals: Iterable[Arrival]) -> int:
    """Writes a recording, and returns the number of its requests."""
    num_requests = 0
    with path.open("w") as file:
        for arrival in arrivals:
            fields = {name: value for name, value in asdict(arrival).items() if value is not None}
            file.write(json.dumps(fields, separators=(",", ":")) + "\n")
            num_requests += 1
    return num_requests


def _read(line: dict[str, Any]) -> Arrival:
    if unknown := line.keys() - _FIELDS:
        raise ValueError(f"does not know {', '.join(sorted(unknown))}")
    values: dict[str, Any] = {name: _NUMBERS[name](line[name]) for name in _NUMBERS if name in line}
    values |= {name: _whole(line, name) for name in _WHOLE if name in line}
    prompt = tuple(line["prompt"]) if "prompt" in line else None
    prefix = Prefix(str(line["prefix"]["name"]), _whole(line["prefix"], "num_tokens")) if "prefix" in line else None
    if prompt is not None:
        values["prompt_tokens"] = len(prompt)
    arrival = Arrival(
        **{"max_tokens": values["output_tokens"], "tenant": str(line.get("tenant", "default")), **values},
        prompt=prompt,
        prefix=prefix,
    )
    least = min(arrival.prompt_tokens, arrival.output_tokens, arrival.n)
    if least < 1 or arrival.max_tokens < arrival.output_tokens or arrival.weight <= 0:
        raise ValueError("a prompt, output_tokens, n and a weight above 0, and max_tokens not below output_tokens")
    if prefix is not None and prefix.num_tokens > arrival.prompt_tokens:
        raise ValueError("a prefix longer than its prompt")
    return arrival


def _whole(line: dict[str, Any], name: str) -> int:
    if type(line[name]) is not int:
        raise ValueError(f"{name} must be a whole number")
    return int(line[name])


def _reason(error: Exception) -> str:
    return f"{error.args[0]} is missing" if isinstance(error, KeyError) else str(error)
