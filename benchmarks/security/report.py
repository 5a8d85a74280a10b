"""The cost of TLS and limits: figures of the runs, their targets, and the section of docs/performance.md."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from benchmarks.pairs import PairedRatio
from benchmarks.report import Cells, Sense, origin, target, target_list
from benchmarks.runner import median_of

MAX_RATIO = 1.05
"""Inter-token p99 with TLS and limits, divided by that without, as the median of the pairs."""
MAX_GATEWAY_MICROSECONDS = 60
"""The gateway's processor time for a token without TLS and limits, as the median of the runs."""


@dataclass(frozen=True)
class StreamFigures:
    """One run: inter-token latencies over all streams, in seconds, and tokens per second of all of them together.

    `gateway_cpu` and `scheduler_cpu` are the services' processor time for a token of streams that decode, in seconds.
    `gateway_request_cpu` is the gateway's for a token with its part of the request's beginning and end.
    """

    inter_token_p50: float
    inter_token_p99: float
    tokens_per_second: float
    gateway_cpu: float
    scheduler_cpu: float
    gateway_request_cpu: float

    def ratios_to(self, without: "StreamFigures") -> dict[str, float]:
        """By figure, how much worse this is: above 1 is slower."""
        ours, theirs = asdict(self), asdict(without)
        ratios = {name: ours[name] / theirs[name] for name in ours}
        return ratios | {"tokens_per_second": 1 / ratios["tokens_per_second"]}


@dataclass(frozen=True)
class FigurePair:
    """Runs of both variants with the same requests, one directly after the other."""

    without: StreamFigures
    with_parts: StreamFigures


def summarize(pairs: Mapping[str, Sequence[FigurePair]]) -> dict[str, Any]:
    """The pairs by protocol, as a result holds them."""
    protocols: dict[str, Any] = {}
    for protocol, found in pairs.items():
        ratios = [pair.with_parts.ratios_to(pair.without) for pair in found]
        protocols[protocol] = {
            "without": asdict(median_of([pair.without for pair in found])),
            "with": asdict(median_of([pair.with_parts for pair in found])),
            "ratios": {name: asdict(PairedRatio.of([ratio[name] for ratio in ratios])) for name in ratios[0]},
            "pairs": [{"without": asdict(pair.without), "with": asdict(pair.with_parts)} for pair in found],
        }
    return protocols


def judge(protocols: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The targets of each protocol."""
    targets = []
    for protocol, found in protocols.items():
        ratio = found["ratios"]["inter_token_p99"]
        what, interval = f"{protocol}: inter-token p99, ratio", (ratio["low"], ratio["high"])
        targets.append(target(what, ratio["median"], Sense.AT_MOST, MAX_RATIO, interval))
        what, microseconds = f"{protocol}: gateway's CPU for a token, µs", found["without"]["gateway_cpu"] * 1e6
        targets.append(target(what, microseconds, Sense.AT_MOST, MAX_GATEWAY_MICROSECONDS))
    return targets


_COLUMNS = {
    "inter_token_p50": ("inter-token p50, ms", 1e3, ".1f"),
    "inter_token_p99": ("p99, ms", 1e3, ".1f"),
    "tokens_per_second": ("output tokens/s", 1.0, ",.0f"),
    "gateway_cpu": ("gateway's CPU for a token, µs", 1e6, ".0f"),
    "gateway_request_cpu": ("with the requests' beginnings and ends, µs", 1e6, ".0f"),
    "scheduler_cpu": ("scheduler's CPU for a token, µs", 1e6, ".0f"),
}
"""By figure, its title, and how it is written."""


def security_table(result: dict[str, Any]) -> Cells:
    """A row for each variant and protocol, and one for the ratios."""
    rows = []
    for protocol, found in result["protocols"].items():
        for title, variant in (("without", "without"), (f"with {result['measured']}", "with")):
            figures = [format(found[variant][name] * unit, form) for name, (_, unit, form) in _COLUMNS.items()]
            rows.append([protocol, title, *figures])
        ratios = [found["ratios"][name] for name in _COLUMNS]
        rows.append(["", "ratio", *(f"{one['median']:.3f} ({one['low']:.3f}–{one['high']:.3f})" for one in ratios)])
    return Cells(("", "", *(title for title, _, _ in _COLUMNS.values())), rows, num_labels=2)


def security_section(result: dict[str, Any]) -> str:
    """The section of docs/performance.md."""
    return (
        f"{result['model']}, bfloat16, {result['num_streams']} streams of {result['num_tenants']} tenants, "
        f"{result['measured_tokens']} tokens of each stream in each run; medians of {result['num_pairs']} pairs of "
        f"runs and of their ratios, with 95 % intervals of the latter; {origin(result)}.\n\n"
        f"{security_table(result).markdown()}\n\n{target_list(result)}"
    )
