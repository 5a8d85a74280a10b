"""Line charts as SVG, side by side: series over a logarithmic axis, from plain numbers and without a library."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

# Distinguishable with colour blindness (Okabe and Ito), on white and on black.
_COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7")
_WIDTH, _HEIGHT = 430, 300
_LEFT, _RIGHT, _TOP, _BOTTOM = 58, 16, 34, 66


@dataclass(frozen=True)
class Series:
    """A named line through (x, y)."""

    name: str
    points: Sequence[tuple[float, float]]


@dataclass(frozen=True)
class Chart:
    """Lines over a common, positive, logarithmic x; y starts at 0."""

    title: str
    x_label: str
    series: Sequence[Series]


def draw(charts: Sequence[Chart]) -> str:
    """The charts side by side, with one legend below, which names the first one's series."""
    width, height = _WIDTH * len(charts), _HEIGHT + 24
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}" '
        'font-family="sans-serif" font-size="12">',
        f'<rect width="{width}" height="{height}" fill="#ffffff"/>',
    ]
    for place, chart in enumerate(charts):
        parts += [f'<g transform="translate({place * _WIDTH} 0)">', *_chart(chart), "</g>"]
    parts += _legend([series.name for series in charts[0].series], width)
    return "\n".join([*parts, "</svg>", ""])


def nice_ticks(highest: float, count: int = 5) -> list[float]:
    """Round steps of 1, 2 or 5 times a power of ten from 0 to at least `highest`, about `count` of them."""
    rough = max(highest, 1e-9) / count
    unit = 10 ** math.floor(math.log10(rough))
    step = next(factor * unit for factor in (1, 2, 5, 10) if factor * unit >= rough * (1 - 1e-9))
    return [place * step for place in range(max(1, math.ceil(highest / step - 1e-9)) + 1)]


def _chart(chart: Chart) -> list[str]:
    xs = sorted({x for series in chart.series for x, _ in series.points})
    ticks = nice_ticks(max(y for series in chart.series for _, y in series.points))
    span = math.log(xs[-1] / xs[0]) or 1.0
    bottom, right = _HEIGHT - _BOTTOM, _WIDTH - _RIGHT

    def across(x: float) -> float:
        return _LEFT + math.log(x / xs[0]) / span * (right - _LEFT)

    def up(y: float) -> float:
        return bottom - y / ticks[-1] * (bottom - _TOP)

    parts = [f'<text x="{_LEFT}" y="18" font-size="13" font-weight="bold" fill="#222222">{escape(chart.title)}</text>']
    for tick in ticks:
        level = f"{up(tick):.1f}"
        parts.append(f'<line x1="{_LEFT}" y1="{level}" x2="{right}" y2="{level}" stroke="#dddddd"/>')
        parts.append(f'<text x="{_LEFT - 6}" y="{level}" dy="4" text-anchor="end" fill="#444444">{tick:,.10g}</text>')
    for x in xs:
        text = f'text-anchor="middle" fill="#444444">{x:g}</text>'
        parts.append(f'<text x="{across(x):.1f}" y="{bottom + 18}" {text}')
    middle = (_LEFT + right) / 2
    parts.append(
        f'<text x="{middle:g}" y="{bottom + 38}" text-anchor="middle" fill="#222222">{escape(chart.x_label)}</text>'
    )
    for colour, series in zip(_COLOURS, chart.series, strict=False):
        places = [f"{across(x):.1f},{up(y):.1f}" for x, y in series.points]
        parts.append(f'<polyline points="{" ".join(places)}" fill="none" stroke="{colour}" stroke-width="2"/>')
        parts += [f'<circle cx="{across(x):.1f}" cy="{up(y):.1f}" r="3" fill="{colour}"/>' for x, y in series.points]
    return parts


def _legend(names: Sequence[str], width: float) -> list[str]:
    parts = []
    share = width / len(names)
    for place, (colour, name) in enumerate(zip(_COLOURS, names, strict=False)):
        x = place * share + 24
        parts.append(f'<rect x="{x:g}" y="{_HEIGHT}" width="14" height="4" fill="{colour}"/>')
        parts.append(f'<text x="{x + 20:g}" y="{_HEIGHT + 7}" fill="#222222">{escape(name)}</text>')
    return parts
