"""Rows and states of the tokens that values need."""

import pytest
import torch

from worker_svc.wanted_states import Places, wanted_rows, wanted_states


@pytest.mark.parametrize(
    ("places", "rows", "counts"),
    [
        (None, [0, 1, 2, 3, 4, 5], [3, 1, 2]),
        ([None, None, None], [0, 1, 2, 3, 4, 5], [3, 1, 2]),
        ([2, 0, 0], [2, 3, 4], [1, 1, 1]),
        ([None, 0, 1], [0, 1, 2, 3, 5], [3, 1, 1]),
    ],
)
def test_wanted(places: Places, rows: list[int], counts: list[int]) -> None:
    found, found_counts = wanted_rows([3, 1, 2], places)
    assert (found.tolist(), found_counts) == (rows, counts)
    states = torch.arange(6.0)[:, None]
    wanted = wanted_states(torch.split(states, [3, 1, 2]), places)
    assert list(map(len, wanted)) == counts
    assert torch.cat(wanted)[:, 0].tolist() == rows
