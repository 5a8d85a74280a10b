"""The panels of a head that bounds of logits leave."""

import torch

from benchmarks.greedy import panels_left
from quire_kernels.cpu.head_bounds import rotation_for


def test_the_panel_of_the_largest_logit_is_left_and_no_other_where_it_is_far_above() -> None:
    torch.manual_seed(0)
    states, head = torch.randn(5, 64), torch.randn(100, 64)
    head[torch.arange(5) * 19] = 10 * states
    assert panels_left(states, head, rotation_for(64)).tolist() == [1] * 5


def test_all_panels_are_left_of_equal_logits() -> None:
    states, head = torch.randn(3, 64), torch.randn(1, 64).expand(100, 64)
    assert panels_left(states, head, rotation_for(64)).tolist() == [4] * 3


def test_rotations_make_bounds_narrower_where_few_numbers_are_large() -> None:
    torch.manual_seed(0)
    states, head = torch.randn(20, 64), torch.randn(3200, 64)
    states[:, 3] = 100
    head[:, 3] /= 100
    as_they_are, rotated = (panels_left(states, head, each).sum() for each in (torch.ones(1, 1), rotation_for(64)))
    assert rotated < 0.5 * as_they_are
