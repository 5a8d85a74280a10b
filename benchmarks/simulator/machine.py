"""A modelled worker as a table: its memory, and the durations of steps and copies."""

import json
from bisect import bisect_left
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields, replace
from enum import Enum
from pathlib import Path
from typing import Any


class CopyMode(Enum):
    """Where a worker copies blocks between device and host."""

    BEFORE_THE_STEP = "before the step"  # on the computing thread, as on a CPU
    BESIDE_THE_STEPS = "beside the steps"  # on a stream of their own, as on a GPU


@dataclass(frozen=True, slots=True)
class Machine:
    """Memory of a worker, and the costs of its work in seconds.

    A step of n tokens takes `step_seconds` of n, without attention: points (n, seconds) with n rising, interpolated and
    extrapolated linearly. Attention adds `context_seconds` for each context token of a decode, and `pair_seconds` for
    each pair of a prompt's token and one before it. A transfer takes `transfer_seconds` and its bytes at
    `bytes_per_second`. A plan takes `dispatch_seconds` to the worker, and so do its results back.
    """

    name: str
    step_seconds: tuple[tuple[int, float], ...]
    context_seconds: float
    pair_seconds: float
    block_size: int
    block_bytes: int
    bytes_per_second: float
    transfer_seconds: float
    copies: CopyMode
    dispatch_seconds: float
    num_blocks: int
    num_host_blocks: int
    context_length: int
    max_sequences: int
    max_step_tokens: int
    usual_step_tokens: int = 0  # 0: max_step_tokens

    def __post_init__(self) -> None:
        counts = [count for count, _ in self.step_seconds]
        if len(counts) < 2 or counts != sorted(set(counts)):
            raise MachineError(f"{self.name}: step_seconds must be at least two points whose token counts rise")

    def compute_seconds(self, num_tokens: int) -> float:
        """A forward pass without attention."""
        if num_tokens == 0:
            return 0.0
        points = self.step_seconds
        after = min(max(bisect_left(points, (num_tokens, 0.0)), 1), len(points) - 1)
        (low, low_seconds), (high, high_seconds) = points[after - 1], points[after]
        share = max(0.0, (num_tokens - low) / (high - low))
        return low_seconds + share * (high_seconds - low_seconds)

    def copy_seconds(self, num_blocks: int) -> float:
        """A transfer in one direction."""
        return self.transfer_seconds + num_blocks * self.block_bytes / self.bytes_per_second if num_blocks else 0.0

    @property
    def prefill_tokens_per_second(self) -> float:
        """The rate of prefill in steps of the usual size, as a worker measures it at its start."""
        num_tokens = min(self.usual_step_tokens or self.max_step_tokens, self.context_length)
        return num_tokens / (self.compute_seconds(num_tokens) + self.pair_seconds * num_tokens * num_tokens / 2)


class MachineError(Exception):
    """An invalid table."""


def read_machine(name: str, machines: Mapping[str, Machine]) -> Machine:
    """One of `machines` by its name, or a table from a JSON file: a preset's name as `like`, and the differences.

    Raises MachineError.
    """
    if name in machines:
        return machines[name]
    try:
        table = json.loads(Path(name).read_bytes())
        machine = machines[table.pop("like")]
        unknown = table.keys() - {field.name for field in fields(Machine)}
        if unknown:
            raise MachineError(f"{name}: does not know {', '.join(sorted(unknown))}")
        if "step_seconds" in table:
            table["step_seconds"] = tuple((int(count), float(seconds)) for count, seconds in table["step_seconds"])
        if "copies" in table:
            table["copies"] = CopyMode(table["copies"])
        return replace(machine, **table)
    except OSError as error:
        raise MachineError(f"{name}: neither a file nor one of {', '.join(machines)}") from error
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise MachineError(f'{name}: not a table: {{"like": {" | ".join(machines)}, …}}') from error


def machine_to_json(machine: Machine) -> dict[str, Any]:
    """As a result holds it."""
    return {**asdict(machine), "copies": machine.copies.value}
