"""Shared blocks are stored once, except for a few."""

from math import ceil

import pytest

from core_bench import CoreBench, prompt

BLOCK = 16
PREFIX = 930
OWN = 40
OUTPUTS = [64 + round(place * 136 / 47) for place in range(48)]


def bench() -> CoreBench:
    return CoreBench(
        policy="fair", block_size=BLOCK, num_blocks=2000, num_host_blocks=0, max_step_tokens=2048, max_sequences=64
    )


def peak_of(bench: CoreBench) -> int:
    """Serves all waiting requests; returns the maximum number of blocks in use."""
    peak = 0
    while list(bench.scheduler.keys):
        while bench.plan() is not None:
            peak = max(peak, bench.num_used)
        bench.commit()
    return peak


def test_48_that_arrive_at_once_compute_and_keep_their_common_prefix_once() -> None:
    assert (OUTPUTS[0], OUTPUTS[-1]) == (64, 200)
    crowd = bench()
    prefix = prompt(PREFIX)
    for place, output in enumerate(OUTPUTS):
        crowd.submit(str(place), [*prefix, *prompt(OWN, 10_000 * (place + 1))], output)
    peak = peak_of(crowd)
    # Whole blocks of the prefix are shared. Each sequence computes the rest, and what it samples but its last token.
    whole = PREFIX // BLOCK * BLOCK
    assert crowd.num_computed == whole + sum(PREFIX - whole + OWN + output - 1 for output in OUTPUTS)
    target = ceil(PREFIX / BLOCK) + sum(ceil((OWN + output) / BLOCK) for output in OUTPUTS)
    assert peak <= 1.05 * target
    assert crowd.scheduler.totals.preemptions == 0


@pytest.mark.parametrize("length", [930, 928, 17, 16, 15])
def test_siblings_keep_one_prompt_and_four_tails(length: int) -> None:
    four = bench()
    output = 150
    four.submit("a", prompt(length), output, n=4)
    peak = peak_of(four)
    assert four.num_computed <= length + 4 * output
    assert peak <= 1.05 * (ceil(length / BLOCK) + 4 * ceil(output / BLOCK))


def test_siblings_fork_the_last_block_of_the_prompt_instead_of_computing_it() -> None:
    four = bench()
    four.submit("a", prompt(PREFIX), 2, n=4)
    copies = []
    while list(four.scheduler.keys):
        plan = four.plan()
        assert plan is not None
        copies += plan.copies
        four.commit()
    last, own = 3, 4  # three compute the last token of the prompt again, and each computes one of its own
    assert four.num_computed == PREFIX + last + own
    assert len(copies) == 3
