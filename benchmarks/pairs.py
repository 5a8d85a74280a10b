"""Compares this tree with another checkout of Quire, in pairs of runs that take turns (`make bench-pairs`).

    python -m benchmarks.pairs TREE [--pairs 10] [--parts steps,serving] [--output FILE]

Each pair runs both trees, this one first in every second pair, with this environment's packages. A ratio is this tree's
figure over the other's, or the other way round for tokens per second: above 1 is worse. Commit both trees first.
"""

import json
import os
import random
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Self

from benchmarks.deployment import running_quire
from benchmarks.processes import BenchmarkFailed
from benchmarks.record import RESULTS, ROOT, provenance, write_result
from benchmarks.runner import failures_exit, make_parser

NUM_SEQUENCES = 256
FORWARD_MS = 10
REQUESTS = {1: 6, 8: 32, 32: 64}
"""By concurrency, how many requests are sent."""
RATES = tuple(f"tokens_per_second_at_{concurrency}" for concurrency in REQUESTS)
"""The figures that are better when they are higher."""
RESULT = RESULTS / "pairs.json"

_IMPORTED = ("", "protos", "kernels", "client")
_RESAMPLES = 5000
_TAIL = 0.025


@dataclass(frozen=True)
class PairedRatio:
    """This tree's figure over the other tree's: the median of all pairs, and its 95 % interval (bootstrap)."""

    median: float
    low: float
    high: float
    ratios: tuple[float, ...]

    @classmethod
    def of(cls, ratios: Sequence[float]) -> Self:
        """Of at least one pair. The same ratios always have the same interval."""
        rng = random.Random(0)
        medians = sorted(median(rng.choices(ratios, k=len(ratios))) for _ in range(_RESAMPLES))
        tail = round(_RESAMPLES * _TAIL)
        return cls(median(ratios), medians[tail], medians[-1 - tail], tuple(ratios))

    def __str__(self) -> str:
        return f"{self.median:.3f} ({self.low:.3f} to {self.high:.3f})"


def import_environment(tree: Path) -> dict[str, str]:
    """Makes Python import a tree's own packages."""
    return {"PYTHONPATH": os.pathsep.join(str(tree / part) for part in _IMPORTED)}


def measure_steps(tree: Path) -> dict[str, float]:
    """What a step costs beside the forward pass, in milliseconds. Raises BenchmarkFailed."""
    with TemporaryDirectory(prefix="quire-pairs-") as folder:
        output = Path(folder, "steps.json")
        sizes = ("--sequences", str(NUM_SEQUENCES), "--forward-ms", str(FORWARD_MS))
        _run(tree, "benchmarks.steps", "--runs", "1", *sizes, "--output", str(output))
        (case,) = json.loads(output.read_text())["cases"]
    return {f"{name}_ms": case[name]["p50"] for name in ("schedule_and_commit", "round_trip")}


def measure_serving(tree: Path, seed: int) -> dict[str, float]:
    """Seconds until a deployment is ready, its output tokens per second, and the median time to the first token in
    seconds, asked by this tree's client.

    Raises BenchmarkFailed.
    """
    started = time.monotonic()
    with running_quire(f"Quire of {tree}", import_environment(tree), tree) as deployment:
        figures = {"start_seconds": time.monotonic() - started}
        for concurrency, num_requests in REQUESTS.items():
            load = ("-c", str(concurrency), "-n", str(num_requests), "--seed", str(seed), "-o", "json")
            printed = _run(ROOT, "quire_client", "bench", "--address", deployment.gateway, *load)
            summary = json.loads(printed)["summary"]
            if summary is None:
                raise BenchmarkFailed(f"no request succeeded: {printed}")
            figures[f"tokens_per_second_at_{concurrency}"] = summary["output_tokens_per_second"]
            figures[f"first_token_at_{concurrency}"] = summary["time_to_first_token"]["p50"]
    return figures


PARTS: dict[str, Callable[[Path, int], dict[str, float]]] = {
    "steps": lambda tree, _pair: measure_steps(tree),
    "serving": measure_serving,
}


def compare(other: Path, num_pairs: int, part: str) -> dict[str, PairedRatio]:
    """Ratios of one part's figures, by name. Raises BenchmarkFailed."""
    ratios: dict[str, list[float]] = {}
    for pair in range(num_pairs):
        trees = (ROOT, other) if pair % 2 else (other, ROOT)
        figures = {tree: PARTS[part](tree, pair) for tree in trees}
        for name, ours in figures[ROOT].items():
            theirs = figures[other][name]
            ratios.setdefault(name, []).append(theirs / ours if name in RATES else ours / theirs)
        last = ", ".join(f"{name} {found[-1]:.3f}" for name, found in ratios.items())
        print(f"pair {pair + 1} of {num_pairs}: {last}", flush=True)
    return {name: PairedRatio.of(found) for name, found in ratios.items()}


def _run(tree: Path, module: str, *arguments: str) -> str:
    command = [sys.executable, "-m", module, *arguments]
    environment = os.environ | import_environment(tree)
    done = subprocess.run(command, cwd=tree, env=environment, capture_output=True, text=True)
    if done.returncode:
        raise BenchmarkFailed(f"{module} in {tree} ended with status {done.returncode}:\n{done.stderr[-2000:]}")
    return done.stdout


def main() -> None:
    parser = make_parser(__doc__, RESULT)
    parser.add_argument("tree", type=Path, help="the other checkout")
    parser.add_argument("--pairs", type=int, default=10, help="default 10")
    parser.add_argument("--parts", default=",".join(PARTS), help="default all")
    options = parser.parse_args()
    other = options.tree.resolve()
    with failures_exit("pairs"):
        found = {part: compare(other, options.pairs, part) for part in options.parts.split(",")}
    described = subprocess.run(["git", "-C", other, "rev-parse", "HEAD"], capture_output=True, text=True, check=True)
    ratios = {name: ratio for part in found.values() for name, ratio in part.items()}
    result = {name: asdict(ratio) for name, ratio in ratios.items()}
    write_result(options.output or RESULT, {**provenance(), "other_commit": described.stdout.strip(), "ratios": result})
    for name, ratio in ratios.items():
        print(f"{name}: {ratio}")


if __name__ == "__main__":
    main()
