"""Regimes: blocks for a quarter of the load, and prompts that are not cached."""

from itertools import combinations

import pytest

from benchmarks.pressure.loads import BLOCK_SIZE, REGIMES, Regime

SHARING = Regime("sharing", "", 6, (5, 5), (11, 11), num_prefixes=2, prefix_tokens=32)


def starts(regime: Regime, repetition: int) -> set[tuple[int, ...]]:
    return {request.prompt_token_ids[:BLOCK_SIZE] for request in regime.requests(repetition)}


@pytest.mark.parametrize("regime", REGIMES, ids=lambda regime: regime.name)
def test_repetitions_are_of_the_same_lengths_and_share_no_block(regime: Regime) -> None:
    first, second = regime.requests(1), regime.requests(2)
    assert [(len(r.prompt_token_ids), r.output_tokens) for r in first] == [
        (len(r.prompt_token_ids), r.output_tokens) for r in second
    ]
    assert all(a.isdisjoint(b) for a, b in combinations([starts(regime, i) for i in range(4)], 2))


@pytest.mark.parametrize("regime", REGIMES, ids=lambda regime: regime.name)
def test_a_regime_is_short_of_blocks_and_each_of_its_requests_fits(regime: Regime) -> None:
    longest = max(len(r.prompt_token_ids) + r.output_tokens for r in regime.requests(0))
    assert regime.num_blocks <= 0.25 * regime.num_blocks_at_once + 1
    assert regime.num_blocks * BLOCK_SIZE >= 2 * longest
    assert regime.describe()["num_requests"] == regime.num_requests


def test_prefixes_are_counted_once() -> None:
    # Two prefixes of two blocks, each followed by 5 + 11 tokens: one block for each request.
    assert SHARING.num_blocks_at_once == 2 * 2 + 6
    assert SHARING.num_blocks == 3
    assert len(starts(SHARING, 0)) == 2
    assert len({request.prompt_token_ids for request in SHARING.requests(0)}) == 6


def test_only_one_regime_holds_copies_back() -> None:
    assert [regime.name for regime in REGIMES if regime.swap_rate is not None] == ["short"]
