"""Pages and plots in docs/ match the results."""

import pytest

from benchmarks.docs import PAGES, Page, Plot, rewritten

SECTION = "before\n<!-- steps: note -->\nold\n<!-- end of steps -->\nafter\n"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.path.name)
def test_a_page_matches_the_results(page: Page) -> None:
    assert page.path.read_text() == page.written(), "run `make bench-docs`"


@pytest.mark.parametrize("plot", [plot for page in PAGES for plot in page.plots], ids=lambda plot: plot.path.name)
def test_a_plot_shows_what_was_measured(plot: Plot) -> None:
    drawn = plot.drawn()
    assert drawn is None or plot.path.read_text() == drawn, "run `make bench-docs`"


def test_only_the_section_is_rewritten() -> None:
    page = rewritten(SECTION, "steps", r"new \1 text")
    assert page == "before\n<!-- steps: note -->\n\nnew \\1 text\n\n<!-- end of steps -->\nafter\n"
    assert rewritten(page, "steps", r"new \1 text") == page


@pytest.mark.parametrize("page", ["", SECTION * 2])
def test_a_page_must_have_the_section_once(page: str) -> None:
    with pytest.raises(ValueError, match="sections steps"):
        rewritten(page, "steps", "new")
