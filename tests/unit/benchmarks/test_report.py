"""Tables, targets and the version of a result as text."""

import pytest

from benchmarks.report import Cells, Sense, target, target_lines, target_list, version

TABLE = Cells(("name", "kind", "figure"), [("a", "x", "1.0"), ("b", "y", "2.0")], num_labels=2)


def test_figures_stand_right_in_markdown() -> None:
    lines = ("| name | kind | figure |", "| --- | --- | ---: |", "| a | x | 1.0 |", "| b | y | 2.0 |")
    assert TABLE.markdown() == "\n".join(lines)


def test_the_terminal_shows_title_and_cells(capsys: pytest.CaptureFixture[str]) -> None:
    TABLE.print("A title")
    printed = capsys.readouterr().out
    assert all(text in printed for text in ("A title", "figure", "2.0"))


@pytest.mark.parametrize(
    ("sense", "value", "holds"),
    [
        (Sense.AT_LEAST, 1.5, True),
        (Sense.AT_LEAST, 1.49, False),
        (Sense.AT_MOST, 1.5, True),
        (Sense.AT_MOST, 1.51, False),
        (Sense.BELOW, 1.49, True),
        (Sense.BELOW, 1.5, False),
    ],
)
def test_a_target_holds_on_its_side_of_the_bound(sense: Sense, value: float, holds: bool) -> None:
    assert target("a figure", value, sense, 1.5)["holds"] is holds


def test_a_missed_target_is_marked() -> None:
    targets = [target("bytes", 5812.4, Sense.AT_MOST, 16384), target("share", 0.05, Sense.BELOW, 0.03)]
    assert target_lines({"targets": targets}) == [
        "bytes: 5,812, target ≤ 16,384",
        "**share: 0.05, target < 0.03: missed**",
    ]


def test_targets_of_one_figure_and_bound_share_a_line() -> None:
    ratios = {"one": 2.0, "two": 1.2, "three": 1.75, "four": 3.0}
    targets = [target(f"{load}: speed", ratio, Sense.AT_LEAST, 1.5) for load, ratio in ratios.items()]
    other = target("one: delay", 0.5, Sense.AT_MOST, 1.0)
    assert target_list({"targets": [*targets, other]}).splitlines() == [
        "- speed, 3 of 4 with this target: 1.75 to 3, target ≥ 1.5",
        "- **two: speed: 1.2, target ≥ 1.5: missed**",
        "- one: delay: 0.5, target ≤ 1",
    ]
    met = [one for one in targets if one["holds"]]
    assert target_list({"targets": met}) == "- speed, 3 of 3 with this target: 1.75 to 3, target ≥ 1.5"
    assert target_list({"targets": met[:2]}).count("\n") == 1
    named = [target(f"one, {load}: speed", 2.0, Sense.AT_LEAST, 1.5) for load in ratios]
    assert target_list({"targets": named}) == "- one: speed, 4 of 4 with this target: 2 to 2, target ≥ 1.5"
    alike = [target("speed", 2.0, Sense.AT_LEAST, 1.5)] * 3
    assert target_list({"targets": alike}) == "- speed, 3 of 3 with this target: 2 to 2, target ≥ 1.5"


@pytest.mark.parametrize(
    ("interval", "holds", "line"),
    [
        ((0.9, 1.04), True, "ratio: 1.02, target ≤ 1.05"),
        ((0.9, 1.06), False, "**ratio: 1.02, target ≤ 1.05: inconclusive, the 95 % interval is 0.9 to 1.06**"),
    ],
)
def test_a_bound_within_the_interval_of_a_figure_is_inconclusive(
    interval: tuple[float, float], holds: bool, line: str
) -> None:
    found = target("ratio", 1.02, Sense.AT_MOST, 1.05, interval)
    assert found["holds"] is holds
    assert target_lines({"targets": [found]}) == [line]


@pytest.mark.parametrize(
    ("commit", "text"),
    [
        ("0123456789abcdef", "`0123456789ab`"),
        ("0123456789abcdef-dirty", "`0123456789ab` with uncommitted changes"),
        (None, "`unknown`"),
    ],
)
def test_the_version_says_whether_files_differed_from_the_commit(commit: str | None, text: str) -> None:
    assert version({"date": "2026-01-02T03:04:05", "commit": commit}) == f"2026-01-02, commit {text}"
