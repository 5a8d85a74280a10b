"""What steps cost, as a table, from the result that was written."""

from typing import Any

from benchmarks.result_text import mark_missed, origin
from benchmarks.steps.figures import PERCENTILE_FIELDS
from benchmarks.tables import Cells

_COLUMNS = (
    *("sequences", "forward", "schedule", "commit", "both", "send to sessions", "round trip", "device waits"),
    *("of the time", "steps/s"),
)


def steps_table(result: dict[str, Any]) -> Cells:
    """A row for each case; durations are p50 / p99 in milliseconds."""
    rows = []
    for case in result["cases"]:
        spreads = [f"{case[name]['p50']:.2f} / {case[name]['p99']:.2f}" for name in PERCENTILE_FIELDS]
        share = f"{case['idle_share']:.1%}"
        numbers = (str(case["num_sequences"]), f"{case['forward_ms']:g}")
        rows.append([*numbers, *spreads, share, f"{case['steps_per_second']:,.0f}"])
    return Cells(_COLUMNS, rows, num_labels=0)


def steps_section(result: dict[str, Any]) -> str:
    """What docs/performance.md says of steps."""
    told = [f"{target['what']}: {_verdict(target)}" for target in result["targets"]]
    return (
        f"Milliseconds, p50 / p99 over {result['num_steps']} steps, medians of {result['num_runs']} runs in turns; "
        f"{origin(result)}.\n\n"
        f"{steps_table(result).markdown()}\n\n"
        f"At 256 sequences and a forward pass of 10 ms: {'; '.join(told) or 'not measured'}.\n\n"
        f"{exchange_lines(result)}"
    )


def exchange_lines(result: dict[str, Any]) -> str:
    """What gRPC alone takes, with its event engine and without."""
    direct, engine = (_exchange(result["exchanges"][polling]) for polling in ("direct", "event_engine"))
    return (
        f"A message of {result['exchange_bytes']:,} bytes there and back through gRPC alone: {direct}; where gRPC's "
        f"event engine reads the sockets, which is grpcio's default, {engine}."
    )


def _exchange(times: dict[str, float]) -> str:
    return f"{times['round_trip']:.2f} ms, {times['processor']:.2f} ms of processor time where it began"


def _verdict(target: dict[str, Any]) -> str:
    style = ".1%" if target["below"] < 0.1 else ".2f"
    text = f"{target['value']:{style}}, asked < {target['below']:{style}}"
    return mark_missed(text, holds=target["holds"])
