"""Streams of synthetic requests (`synthetic.ArrivalStream`) from a JSON file.

[{"tenant": "a", "rate": 20, "prompt": [16, 512], "output": [16, 256]},
 {"tenant": "b", "rate": 5, "prompt": [16, 64], "output": [64, 64], "process": "bursts", "burst": 8, "weight": 2,
  "priorities": {"0": 0.9, "2": 0.1}, "sequences": {"1": 0.8, "4": 0.2}, "deadline": 30,
  "prefixes": {"count": 4, "num_tokens": 512, "share": 0.5}}]
"""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks.simulator.synthetic import ArrivalProcess, ArrivalStream, Lengths, Prefixes


def _shares(value: dict[str, Any]) -> tuple[tuple[int, float], ...]:
    return tuple((int(number), float(share)) for number, share in value.items())


_READ: dict[str, Callable[[Any], Any]] = {
    "rate": float,
    "prompt": lambda value: Lengths(*value),
    "output": lambda value: Lengths(*value),
    "tenant": str,
    "weight": float,
    "process": ArrivalProcess,
    "burst": int,
    "priorities": _shares,
    "sequences": _shares,
    "prefixes": lambda value: Prefixes(**value),
    "deadline": float,
    "max_tokens": int,
}


class StreamsError(Exception):
    """An invalid file."""


def read_streams(path: Path) -> list[ArrivalStream]:
    """The streams of a file, at least one. Raises StreamsError."""
    try:
        streams = [_read(entry) for entry in json.loads(path.read_bytes())]
    except OSError as error:
        raise StreamsError(f"{path}: {(error.strerror or 'cannot be read').lower()}") from error
    except (ValueError, TypeError, AttributeError) as error:
        raise StreamsError(f"{path}: {error}") from error
    if not streams:
        raise StreamsError(f"{path}: holds no streams")
    return streams


def _read(entry: dict[str, Any]) -> ArrivalStream:
    if unknown := entry.keys() - _READ.keys():
        raise ValueError(f"does not know {', '.join(sorted(unknown))}")
    return ArrivalStream(**{name: _READ[name](value) for name, value in entry.items()})
