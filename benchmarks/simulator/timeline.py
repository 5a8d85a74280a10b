"""A run over time as SVG: speed, memory in use, and waiting sequences."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from html import escape
from itertools import pairwise

from benchmarks.plot import nice_ticks
from benchmarks.simulator.driver import Setup
from benchmarks.simulator.recorder import Sample

_WIDTH, _HEIGHT = 860, 170
_LEFT, _RIGHT, _TOP, _BOTTOM = 70, 16, 30, 24
_COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7")


@dataclass(frozen=True)
class _Panel:
    title: str
    lines: Sequence[tuple[str, Sequence[float]]]  # name and values over time


def draw_timeline(samples: Sequence[Sample], setup: Setup) -> str:
    """Panels one below the other over a common time, from at least two samples."""
    times = [sample.at for sample in samples[1:]]
    machine = setup.machine
    num_blocks, num_host_blocks = (
        max(1, setup.num_replicas * count) for count in (machine.num_blocks, machine.num_host_blocks)
    )

    def share(of: Callable[[Sample], int], count: int) -> list[float]:
        return [100 * of(sample) / count for sample in samples[1:]]

    panels = [
        _Panel(
            "tokens generated per second",
            [("all", [(b.num_generated - a.num_generated) / (b.at - a.at) for a, b in pairwise(samples)])],
        ),
        _Panel(
            "blocks, %",
            [
                ("device, in use", share(lambda sample: sample.memory.used, num_blocks)),
                ("device, cached", share(lambda sample: sample.memory.cached, num_blocks)),
                ("host, in use", share(lambda sample: sample.memory.host_used, num_host_blocks)),
                ("host, cached", share(lambda sample: sample.memory.host_cached, num_host_blocks)),
            ],
        ),
        _Panel("waiting sequences", [("all", [float(sample.num_waiting) for sample in samples[1:]])]),
    ]
    height = _HEIGHT * len(panels) + 24
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {height}" width="{_WIDTH}" height="{height}" '
        'font-family="sans-serif" font-size="12">',
        f'<rect width="{_WIDTH}" height="{height}" fill="#ffffff"/>',
    ]
    for place, panel in enumerate(panels):
        parts += [f'<g transform="translate(0 {place * _HEIGHT})">', *_drawn(panel, times), "</g>"]
    middle = (_LEFT + _WIDTH - _RIGHT) / 2
    parts.append(f'<text x="{middle:g}" y="{height - 6}" text-anchor="middle" fill="#222222">seconds</text>')
    return "\n".join([*parts, "</svg>", ""])


def _drawn(panel: _Panel, times: Sequence[float]) -> list[str]:
    bottom, right = _HEIGHT - _BOTTOM, _WIDTH - _RIGHT
    levels = nice_ticks(max((max(values) for _, values in panel.lines), default=0.0), 4)
    moments = nice_ticks(times[-1], 8)

    def across(at: float) -> float:
        return _LEFT + at / moments[-1] * (right - _LEFT)

    def up(value: float) -> float:
        return bottom - value / levels[-1] * (bottom - _TOP)

    parts = [f'<text x="{_LEFT}" y="16" font-weight="bold" fill="#222222">{escape(panel.title)}</text>']
    for level in levels:
        y = f"{up(level):.1f}"
        parts.append(f'<line x1="{_LEFT}" y1="{y}" x2="{right}" y2="{y}" stroke="#dddddd"/>')
        parts.append(f'<text x="{_LEFT - 6}" y="{y}" dy="4" text-anchor="end" fill="#444444">{level:,.10g}</text>')
    parts += [
        f'<text x="{across(moment):.1f}" y="{bottom + 16}" text-anchor="middle" fill="#444444">{moment:g}</text>'
        for moment in moments
    ]
    for place, (name, values) in enumerate(panel.lines):
        places = " ".join(f"{across(at):.1f},{up(value):.1f}" for at, value in zip(times, values, strict=True))
        colour = _COLOURS[place]
        parts.append(f'<polyline points="{places}" fill="none" stroke="{colour}" stroke-width="1.5"/>')
        if len(panel.lines) > 1:
            x = right - 130 * (len(panel.lines) - place)
            parts.append(f'<text x="{x}" y="16" fill="{colour}">{escape(name)}</text>')
    return parts
