"""docs/performance.md says what the results say."""

import pytest

from benchmarks.docs import PAGE, PLOT, plot, rewritten, written

SECTION = "before\n<!-- steps: note -->\nold\n<!-- end of steps -->\nafter\n"


def test_the_page_says_what_the_results_say() -> None:
    page = PAGE.read_text()
    assert page == written(page), "run `make bench-docs`"


def test_the_plot_shows_what_the_sweep_measured() -> None:
    drawn = plot()
    assert drawn is None or PLOT.read_text() == drawn, "run `make bench-docs`"


def test_only_the_section_is_rewritten() -> None:
    page = rewritten(SECTION, "steps", r"new \1 text")
    assert page == "before\n<!-- steps: note -->\n\nnew \\1 text\n\n<!-- end of steps -->\nafter\n"
    assert rewritten(page, "steps", r"new \1 text") == page


@pytest.mark.parametrize("page", ["", SECTION * 2])
def test_a_page_must_have_the_section_once(page: str) -> None:
    with pytest.raises(ValueError, match="sections steps"):
        rewritten(page, "steps", "new")
