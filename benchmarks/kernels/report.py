"""Ops and their peers as a table, and what is asked of ops on a GPU, from the result that was written."""

from collections.abc import Iterator
from typing import Any

from benchmarks.kernels.case import SpeedTarget, best_peer
from benchmarks.result_text import mark_missed, version
from benchmarks.tables import Cells

DECODE_OF_COPY_RATE = 0.85
PREFILL_OF_SDPA = 0.8


def judge(result: dict[str, Any]) -> list[dict[str, Any]]:
    """How ops on a GPU stand to what is asked of them; nothing is asked on a processor."""
    return list(_verdicts(result)) if result["gpu"] else []


def _verdicts(result: dict[str, Any]) -> Iterator[dict[str, Any]]:
    for case in result["cases"]:
        if "ms" not in case:
            continue
        best = best_peer(case)
        name = f"{case['op']}, {case['shape']}"
        if case["asked"] == SpeedTarget.DECODE.value:
            yield _verdict(f"{name}: share of the copy rate", case["of_device"], DECODE_OF_COPY_RATE)
            if best:
                yield _verdict(f"{name}: speed beside {best[0]}", best[1] / case["ms"], 1.0)
        if case["asked"] == SpeedTarget.PREFILL.value:
            times = [peer["ms"] for peer_name, peer in case["peers"].items() if _is_sdpa(peer_name) and "ms" in peer]
            if times:
                yield _verdict(f"{name}: speed beside the fastest SDPA", min(times) / case["ms"], PREFILL_OF_SDPA)


def _is_sdpa(name: str) -> bool:
    return name.startswith("SDPA") and "gather" not in name


def _verdict(what: str, value: float, at_least: float) -> dict[str, Any]:
    return {"what": what, "value": value, "at_least": at_least, "holds": value >= at_least}


def kernels_table(result: dict[str, Any]) -> Cells:
    """A row for each case."""
    rows = []
    for case in result["cases"]:
        if "ms" not in case:
            rows.append([case["op"], case["shape"], "–", "–", "–", case["error"]])
            continue
        share = "–" if case["of_device"] is None else f"{case['of_device']:.0%}"
        peers = (f"{name} {_peer(case, peer)}" for name, peer in case["peers"].items())
        rate = f"{case['rate']:,.4g} {case['bound']}"
        rows.append([case["op"], case["shape"], f"{case['ms']:.4g}", rate, share, "; ".join(peers)])
    columns = ("op", "shape", "ms", "rate", "of the device's", "peers: their time by ours")
    return Cells(columns, rows, num_labels=2)


def kernels_section(result: dict[str, Any]) -> str:
    """What docs/performance.md says of kernels."""
    rates, machine = result["rates"], result["machine"]
    where = result["gpu"]["name"] if result["gpu"] else f"{result['threads']} threads of {machine['processor']}"
    asked = "\n".join(f"- {_verdict_text(verdict)}" for verdict in result["targets"])
    head = (
        f"{where}, torch {machine['torch']}; {version(result)}. "
        f"The device itself copies {rates['memory']:,.0f} GB/s (read and written) and multiplies "
        f"{rates['matrix']:,.4g} TFLOP/s in bfloat16."
    )
    return "\n\n".join(part for part in (head, kernels_table(result).markdown(), asked) if part)


def _verdict_text(verdict: dict[str, Any]) -> str:
    text = f"{verdict['what']} {verdict['value']:.2f}, asked ≥ {verdict['at_least']:g}"
    return mark_missed(text, holds=verdict["holds"])


def _peer(case: dict[str, Any], peer: dict[str, Any]) -> str:
    return f"{peer['ms'] / case['ms']:.2f}" if "ms" in peer else "cannot run"
