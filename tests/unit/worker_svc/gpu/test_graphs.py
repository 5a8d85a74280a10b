"""Capture sizes are so close to each other that padding costs little."""

import pytest

from worker_svc.gpu.graphs import capture_sizes


@pytest.mark.parametrize(
    ("max_rows", "sizes"),
    [
        (1, [1]),
        (2, [1, 2]),
        (3, [1, 2, 3]),
        (8, [1, 2, 4, 8]),
        (9, [1, 2, 4, 8, 9]),
        (32, [1, 2, 4, 8, 16, 24, 32]),
        (37, [1, 2, 4, 8, 16, 24, 32, 37]),
    ],
)
def test_the_ladder_ends_with_the_largest_batch(max_rows: int, sizes: list[int]) -> None:
    assert capture_sizes(max_rows) == sizes
