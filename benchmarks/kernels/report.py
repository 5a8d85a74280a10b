"""Ops beside their peers: the table, the targets, and the section of docs/performance.md."""

from collections.abc import Iterator
from typing import Any

from benchmarks.kernels.case import BY_AMX, SpeedTarget, best_peer
from benchmarks.report import Cells, Sense, target, target_list, version

DECODE_OF_COPY_RATE, RAGGED_DECODE_OF_COPY_RATE = 0.9, 0.8
PREFILL_OF_FASTEST = 0.7
GOPS_A_THREAD = 600


def judge(result: dict[str, Any]) -> list[dict[str, Any]]:
    """The targets of ops on this device."""
    return list(_targets(result) if result["gpu"] else _targets_of_a_processor(result))


def _targets(result: dict[str, Any]) -> Iterator[dict[str, Any]]:
    for case in result["cases"]:
        if "ms" not in case:
            continue
        best = best_peer(case)
        name = f"{case['op']}, {case['shape']}"
        if case["asked"] == SpeedTarget.DECODE.value:
            yield target(f"{name}: share of the copy rate", case["of_device"], Sense.AT_LEAST, DECODE_OF_COPY_RATE)
            if best:
                yield target(f"{name}: speed relative to {best[0]}", best[1] / case["ms"], Sense.AT_LEAST, 1.0)
        if case["asked"] == SpeedTarget.RAGGED_DECODE.value:
            share = case["of_device"]
            yield target(f"{name}: share of the copy rate", share, Sense.AT_LEAST, RAGGED_DECODE_OF_COPY_RATE)
        if case["asked"] == SpeedTarget.PREFILL.value and best:
            yield target(
                f"{name}: speed relative to {best[0]}", best[1] / case["ms"], Sense.AT_LEAST, PREFILL_OF_FASTEST
            )


def _targets_of_a_processor(result: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Of products with many rows: by AMX where that was measured, since it serves where the processor has it."""
    served: dict[str, dict[str, Any]] = {}
    for case in result["cases"]:
        name = f"{case['op']}, {case['shape'].removesuffix(BY_AMX)}"
        if "ms" in case and (name not in served or case["shape"].endswith(BY_AMX)):
            served[name] = case
    for name, case in served.items():
        if case["asked"] == SpeedTarget.INTEGER_PRODUCT.value:
            yield target(
                f"{name}: GOP/s a thread", 1e3 * case["rate"] / result["threads"], Sense.AT_LEAST, GOPS_A_THREAD
            )
        if case["asked"] == SpeedTarget.WIDE_PRODUCT.value and (best := best_peer(case)):
            yield target(f"{name}: speed relative to {best[0]}", best[1] / case["ms"], Sense.AT_LEAST, 1.0)


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
    """The section of docs/performance.md."""
    rates, machine = result["rates"], result["machine"]
    where = result["gpu"]["name"] if result["gpu"] else f"{result['threads']} threads of {machine['processor']}"
    head = (
        f"{where}, torch {machine['torch']}; {version(result)}. "
        f"The device itself copies {rates['memory']:,.0f} GB/s (read and written) and multiplies "
        f"{rates['matrix']:,.4g} TFLOP/s in bfloat16."
    )
    return "\n\n".join(part for part in (head, kernels_table(result).markdown(), target_list(result)) if part)


def _peer(case: dict[str, Any], peer: dict[str, Any]) -> str:
    return f"{peer['ms'] / case['ms']:.2f}" if "ms" in peer else "cannot run"
