"""What benchmarks do around their measurements: flags, turns, medians, failures, the result's file.

Those of kernels and of a GPU do not use it: they run where only torch is installed.
"""

import argparse
import os
import signal
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import fields, is_dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any, TypeVar

import httpx

from benchmarks.processes import BenchmarkFailed
from benchmarks.record import write_result
from benchmarks.report import Cells, target_lines
from quire_client.bench.latency import BenchSummary
from quire_client.bench.load import LoadResult
from quire_client.bench.targets import TargetError
from quire_client.errors import QuireError
from svc_common.models import ModelNotFound

EXPECTED_ERRORS = (BenchmarkFailed, ModelNotFound, QuireError, TargetError, httpx.HTTPError)

T = TypeVar("T")


def log(text: str) -> None:
    """Prints progress to standard error."""
    print(text, file=sys.stderr, flush=True)


def make_parser(doc: str | None, result: Path, condition: str = "") -> argparse.ArgumentParser:
    """Flags of a benchmark whose result is by default written to `result`, on a condition that the help names."""
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, help=f"file for the result; default {result.name}{condition}")
    return parser


@contextmanager
def failures_exit(name: str) -> Iterator[None]:
    """Exits with 1 and a line on an expected error, with 130 on Ctrl-C. SIGTERM too ends what was started."""
    before = signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    try:
        yield
    except EXPECTED_ERRORS as error:
        sys.exit(f"{name}: {error}")
    except KeyboardInterrupt:
        sys.exit(130)
    finally:
        signal.signal(signal.SIGTERM, before)


def select_named(names: str, known: Mapping[str, T], kind: str) -> dict[str, T]:
    """Those of a comma-separated list, in its order. Raises BenchmarkFailed for one that is not known."""
    for name in names.split(","):
        if name not in known:
            raise BenchmarkFailed(f"no {kind} named {name!r}: {', '.join(known)}")
    return {name: known[name] for name in names.split(",")}


def in_turns(cases: Sequence[T], num_runs: int) -> Iterator[tuple[int, T]]:
    """Run numbers and cases, `num_runs` times each. Runs start with another case each: other load affects all alike."""
    for run in range(num_runs):
        start = run % len(cases)
        for case in (*cases[start:], *cases[:start]):
            yield run, case


def median_of(runs: Sequence[T]) -> T:
    """The median of each number in dataclasses of one kind, nested ones included. Other fields are the same in all."""
    first: Any = runs[0]
    columns = {field.name: [getattr(run, field.name) for run in runs] for field in fields(first)}
    median_run: T = replace(first, **{name: _median(values) for name, values in columns.items()})
    return median_run


def check_load(sent: LoadResult, title: str) -> BenchSummary:
    """The summary of a load that was answered as a whole. Raises BenchmarkFailed."""
    if sent.failures or sent.num_short or sent.summary is None:
        reasons = "; ".join(f"{count} × {reason}" for reason, count in sent.failures.items())
        raise BenchmarkFailed(f"{title}: {sent.num_short} requests of a wrong length; failed: {reasons or 'none'}")
    return sent.summary


def publish(result: dict[str, Any], output: Path | None, tables: Mapping[str, Cells]) -> None:
    """Prints the tables, by their titles, and the targets; writes the result where `output` names a file."""
    for title, table in tables.items():
        table.print(title)
    for line in target_lines(result):
        print(line)
    if output is not None:
        write_result(output, result)
        log(f"written to {os.path.relpath(output)}")


def _median(values: list[Any]) -> Any:
    if is_dataclass(values[0]):
        return median_of(values)
    is_same = all(value == values[0] for value in values)  # also what is no measurement, such as a number of requests
    return values[0] if is_same else median(values)
