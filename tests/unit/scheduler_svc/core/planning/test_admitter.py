"""What admission to a replica charges and counts."""

import pytest

from core_bench import BLOCK, CoreBench, prompt


@pytest.mark.parametrize("num_cached", [0, 4])
def test_tenant_is_charged_for_the_prompt_tokens_that_are_not_cached(num_cached: int) -> None:
    bench = CoreBench(policy="fair", max_sequences=1)
    tokens = prompt(10 * BLOCK)
    if num_cached:
        bench.submit("before", tokens[: num_cached * BLOCK], 1, tenant="y")
        bench.run()
    bench.submit("a", tokens, 4, tenant="x")
    bench.submit("waits", prompt(4, 5000), 4, tenant="z")
    debt = bench.scheduler.waiting.policy.debt("x")
    bench.plan()
    assert bench.scheduler.waiting.policy.debt("x") - debt == (10 - num_cached) * BLOCK


def test_cache_counters_have_the_tokens_looked_up_and_found() -> None:
    bench = CoreBench()
    bench.submit("first", prompt(4 * BLOCK), 1)
    bench.run()
    bench.submit("second", prompt(6 * BLOCK), 1)
    bench.run()
    totals = bench.scheduler.totals
    assert (totals.cache_queries, totals.cache_hits, totals.host_hits) == (10 * BLOCK, 4 * BLOCK, 0)
