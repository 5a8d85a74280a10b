"""Charts: round axes, every point in its place, and well-formed SVG."""

from xml.etree import ElementTree

import pytest

from benchmarks.plot import Chart, Series, draw, nice_ticks

SVG = "{http://www.w3.org/2000/svg}"


@pytest.mark.parametrize(
    ("highest", "ticks"),
    [(10, [0, 2, 4, 6, 8, 10]), (870, [0, 200, 400, 600, 800, 1000]), (0.31, [0, 0.1, 0.2, 0.30000000000000004, 0.4])],
)
def test_axes_are_round_and_reach_the_highest_point(highest: float, ticks: list[float]) -> None:
    assert nice_ticks(highest) == pytest.approx(ticks)


def points(polyline: ElementTree.Element) -> list[tuple[float, float]]:
    return [(float(x), float(y)) for x, y in (pair.split(",") for pair in polyline.attrib["points"].split())]


def test_a_factor_is_the_same_way_everywhere_and_more_is_higher() -> None:
    chart = Chart("Speed", "in flight", [Series("Ours", [(1, 10), (4, 20), (16, 40)])])
    root = ElementTree.fromstring(draw([chart]))
    (line,) = root.iter(f"{SVG}polyline")
    (x1, y1), (x2, y2), (x3, y3) = points(line)
    assert x2 - x1 == pytest.approx(x3 - x2, abs=0.2)
    assert y1 > y2 > y3
    assert y1 - y2 == pytest.approx((y2 - y3) / 2, abs=0.2)


def test_each_series_is_plotted_and_named_once() -> None:
    series = [Series("Ours & <theirs>", [(1, 1), (2, 2)]), Series("Theirs", [(1, 2), (2, 1)])]
    root = ElementTree.fromstring(draw([Chart("One", "x", series), Chart("Two", "x", series)]))
    texts = [element.text for element in root.iter(f"{SVG}text")]
    assert len(list(root.iter(f"{SVG}polyline"))) == 4
    assert [texts.count(name) for name in ("Ours & <theirs>", "Theirs", "One", "Two")] == [1, 1, 1, 1]


def test_one_point_makes_a_chart() -> None:
    ElementTree.fromstring(draw([Chart("One", "x", [Series("Ours", [(8, 0.0)])])]))
