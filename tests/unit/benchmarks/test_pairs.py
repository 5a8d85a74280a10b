"""The median of ratios and its interval."""

from benchmarks.pairs import PairedRatio


def test_equal_pairs_leave_no_doubt() -> None:
    ratio = PairedRatio.of([1.25] * 5)
    assert (ratio.median, ratio.low, ratio.high) == (1.25, 1.25, 1.25)


def test_the_interval_holds_the_median_and_no_more_than_there_was() -> None:
    ratios = [0.9, 1.0, 1.1, 1.2, 1.3, 0.95, 1.05, 1.15, 1.25, 0.98]
    ratio = PairedRatio.of(ratios)
    assert min(ratios) <= ratio.low <= ratio.median <= ratio.high <= max(ratios)
    assert ratio == PairedRatio.of(ratios)
    assert str(ratio) == f"1.075 ({ratio.low:.3f} to {ratio.high:.3f})"


def test_one_bad_run_of_many_does_not_move_the_median() -> None:
    assert PairedRatio.of([1.0] * 9 + [5.0]).median == 1.0
