"""The comparison and the sweep: figures, targets, tables, charts, and the sections of docs/performance.md."""

from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from typing import Any

from benchmarks.plot import Chart, Series
from benchmarks.report import Cells, Sense, origin
from quire_client.bench.latency import BenchSummary

_FIGURES = (
    ("output tokens/s", "output_tokens_per_second", 1, ",.0f"),
    ("time to first token p50, ms", "time_to_first_token_p50", 1e3, ",.0f"),
    ("time to first token p99, ms", "time_to_first_token_p99", 1e3, ",.0f"),
    ("inter-token latency p50, ms", "inter_token_p50", 1e3, ",.1f"),
    ("inter-token latency p99, ms", "inter_token_p99", 1e3, ",.1f"),
)


@dataclass(frozen=True)
class Figures:
    """Figures of a load, of one run or the medians of several: seconds, and tokens per second."""

    output_tokens_per_second: float
    time_to_first_token_p50: float
    time_to_first_token_p99: float
    inter_token_p50: float
    inter_token_p99: float
    wall_seconds: float

    @classmethod
    def of(cls, summary: BenchSummary) -> "Figures":
        """From a summary with streams of two tokens or more."""
        first, between = summary.time_to_first_token, summary.inter_token
        if between is None:
            raise ValueError("no stream has two tokens that came one after the other")
        return cls(
            output_tokens_per_second=summary.output_tokens_per_second,
            time_to_first_token_p50=first.p50,
            time_to_first_token_p99=first.p99,
            inter_token_p50=between.p50,
            inter_token_p99=between.p99,
            wall_seconds=summary.wall_seconds,
        )


@dataclass(frozen=True)
class RatioTarget:
    """A bound on Quire's figure divided by that of another system under the same load."""

    load: str
    figure: str
    against: str
    sense: Sense
    bound: float


def _beside_vllm(load: str, throughput: float, first_token: float, between: float | None) -> Iterator[RatioTarget]:
    """Targets beside vLLM with each of its budgets for a step."""
    for vllm in ("vllm", "vllm_small_steps"):
        yield RatioTarget(load, "output_tokens_per_second", vllm, Sense.AT_LEAST, throughput)
        yield RatioTarget(load, "time_to_first_token_p50", vllm, Sense.AT_MOST, first_token)
        if between is not None:
            yield RatioTarget(load, "inter_token_p99", vllm, Sense.AT_MOST, between)


RATIOS = "Quire's figure divided by that of each system, in bold where the target is missed"
TARGETS = (
    *_beside_vllm("mix-1", 2.1, 0.8, None),
    *_beside_vllm("mix-8", 1.9, 0.8, 0.5),
    *_beside_vllm("mix-32", 1.7, 1.0, 0.5),
    *_beside_vllm("mix-64", 1.6, 1.0, 0.5),
    RatioTarget("shared-prefix", "output_tokens_per_second", "vllm", Sense.AT_LEAST, 2.0),
    RatioTarget("mix-48", "output_tokens_per_second", "static_batches", Sense.AT_LEAST, 8.0),
)


def judge(medians: Mapping[str, Mapping[str, Figures]]) -> list[dict[str, Any]]:
    """The targets whose figures were measured. `medians` are by system and load."""
    targets = []
    for target in TARGETS:
        ours = medians.get("quire", {}).get(target.load)
        theirs = medians.get(target.against, {}).get(target.load)
        if ours is None or theirs is None:
            continue
        ratio = getattr(ours, target.figure) / getattr(theirs, target.figure)
        described = asdict(target) | {"sense": target.sense.value}
        targets.append(described | {"ratio": ratio, "holds": target.sense.holds(ratio, target.bound)})
    return targets


def ratio_table(result: dict[str, Any]) -> Cells:
    """A row for each figure that has a target: Quire's, divided by that of each system that it is judged beside."""
    targets = result["targets"]
    peers = [name for name in result["systems"] if any(target["against"] == name for target in targets)]
    labels = {figure: label for label, figure, *_ in _FIGURES}
    rows: dict[tuple[str, str, str], dict[str, Any]] = {}
    for target in targets:
        bound = f"{Sense(target['sense']).sign} {target['bound']:g}"
        rows.setdefault((target["load"], target["figure"], bound), {})[target["against"]] = target
    lines = []
    for (load, figure, bound), by_peer in rows.items():
        cells = [_ratio(by_peer[peer]) if peer in by_peer else "" for peer in peers]
        lines.append([result["loads"][load]["title"], labels[figure].partition(",")[0], *cells, bound])
    columns = ["", "", *(result["systems"][peer]["title"] for peer in peers), "target"]
    return Cells(columns, lines, num_labels=2)


def _ratio(target: dict[str, Any]) -> str:
    """A ratio; in bold where the target is missed, with so many digits that this shows."""
    if target["holds"]:
        return f"{target['ratio']:.2f}"
    seems_met = Sense(target["sense"]).holds(round(target["ratio"], 2), target["bound"])
    return f"**{target['ratio']:{'.3f' if seems_met else '.2f'}}**"


def comparison_table(result: dict[str, Any]) -> Cells:
    """A row for each figure under each load: the systems side by side."""
    systems = result["systems"]
    rows = []
    for load, about in result["loads"].items():
        title = f"{about['title']}, {about['num_requests']} requests"
        for label, figure, scale, style in _FIGURES:
            medians = [system["loads"].get(load, {}).get("median") for system in systems.values()]
            cells = ["–" if median is None else format(median[figure] * scale, style) for median in medians]
            rows.append([title, label, *cells])
            title = ""
    columns = ["", "", *(system["title"] for system in systems.values())]
    return Cells(columns, rows, num_labels=2)


def summary_lines(result: dict[str, Any]) -> str:
    """What was measured, when, and on which machine."""
    machine = result["machine"]
    versions = ", ".join(f"{name} {machine[name]}" for name in ("torch", "transformers") if name in machine)
    peer = f", {result['vllm']}" if result.get("vllm") else ""
    wasted = result["systems"].get("quire", {}).get("loads", {}).get("mix-48", {}).get("kv_wasted")
    waste = "" if wasted is None else f" Of the KV memory in use, {wasted:.1%} held no token (48 at a time)."
    runs = "one run" if result["num_runs"] == 1 else f"medians of {result['num_runs']}"
    return f"{result['model']}, bfloat16, {runs}; {origin(result)}, {versions}{peer}.{waste}"


def serving_section(result: dict[str, Any]) -> str:
    """The comparison's section of docs/performance.md."""
    ratios = (f"{RATIOS}:", ratio_table(result).markdown()) if result["targets"] else ()
    figures = comparison_table(result).markdown()
    return "\n\n".join(
        (summary_lines(result), *ratios, "<details><summary>All figures</summary>", figures, "</details>")
    )


def sweep_table(result: dict[str, Any]) -> Cells:
    """A row for each concurrency: each system's throughput and time to first token."""
    systems = result["systems"].values()
    columns = ["requests in flight"]
    for system in systems:
        columns += [f"{system['title']}: tokens/s", "first token p50, ms", "inter-token p50, ms"]
    rows = []
    for points in zip(*(system["points"] for system in systems), strict=True):
        row = [str(points[0]["concurrency"])]
        for point in points:
            row.append(f"{point['output_tokens_per_second']:,.0f}")
            row.append(f"{point['time_to_first_token_p50'] * 1e3:,.0f}")
            row.append(f"{point['inter_token_p50'] * 1e3:,.1f}")
        rows.append(row)
    return Cells(columns, rows)


def sweep_charts(result: dict[str, Any]) -> list[Chart]:
    """Throughput, time to first token and inter-token latency over concurrency."""
    shown = (
        ("Output tokens/s", "output_tokens_per_second", 1.0),
        ("Time to first token p50, s", "time_to_first_token_p50", 1.0),
        ("Inter-token latency p50, ms", "inter_token_p50", 1e3),
    )
    return [
        Chart(
            title,
            "requests in flight",
            [
                Series(system["title"], [(point["concurrency"], point[figure] * scale) for point in system["points"]])
                for system in result["systems"].values()
            ],
        )
        for title, figure, scale in shown
    ]


def sweep_section(result: dict[str, Any]) -> str:
    """The sweep's section of docs/performance.md."""
    return (
        f"{result['model']}, bfloat16, one run; {origin(result)}.\n\n"
        f"![Output tokens per second, time to first token and inter-token latency over concurrency](sweep.svg)\n\n"
        f"{sweep_table(result).markdown()}"
    )
