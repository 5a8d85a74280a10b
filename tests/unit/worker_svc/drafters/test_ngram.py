"""The n-gram drafter returns what followed the last occurrence of the same tokens."""

import numpy as np
import pytest

from worker_svc.drafters.ngram import NgramDrafter


@pytest.mark.parametrize(
    ("tokens", "draft"),
    [
        ([1, 2, 3, 4, 5, 1, 2, 3, 4], [5, 1, 2]),  # four last tokens
        ([9, 2, 3, 4, 5, 6, 7, 1, 2, 3, 4], [5, 6, 7]),  # three
        ([3, 4, 5, 6, 7, 1, 3, 4], [5, 6, 7]),  # two
        ([3, 4, 8, 8, 8, 3, 4, 5, 6, 7, 3, 4], [5, 6, 7]),  # the later of two places
        ([0, 1, 2, 3, 5, 9, 2, 3, 6, 0, 1, 2, 3], [5, 9, 2]),  # a longer match goes before a later one
        ([7, 7, 7], [7, 7, 7]),  # what follows is shorter than what is wanted
        ([1, 2, 5, 1, 2, 5, 1, 2], [5, 1, 2]),
        ([4, 1, 2, 1, 2], [1, 2, 1]),
        ([1, 2, 3, 4], []),
        ([1, 2, 3, 2], []),  # one token alike is too little
        ([1, 1], []),
        ([1], []),
    ],
)
def test_the_draft_follows_the_last_match(tokens: list[int], draft: list[int]) -> None:
    assert NgramDrafter().draft(np.array(tokens, np.int32), 3).tolist() == draft


@pytest.mark.parametrize("max_tokens", [1, 2, 9])
def test_it_is_as_long_as_is_asked_for(max_tokens: int) -> None:
    tokens = np.array([1, 2, 3, 4, 1, 2], np.int32)
    assert NgramDrafter().draft(tokens, max_tokens).tolist() == ([3, 4, 1, 2] * 3)[:max_tokens]
