"""The limits of a step."""

from core_bench import BLOCK, SHAPE, CoreBench, prompt
from scheduler_svc.core.kv.prefix_cache import Hit
from scheduler_svc.core.limits import SchedulerLimits
from scheduler_svc.core.planning.new_request_reserve import PromptLimit
from scheduler_svc.core.planning.step_builder import LONG_PROMPT, StepBuilder
from scheduler_svc.core.replica import Replica
from scheduler_svc.core.request import Request, Sequence


def long_prompt(replica: Replica, num_computed: int) -> Sequence:
    tokens = prompt(2 * LONG_PROMPT)
    sequence = Sequence(0, Request("long", tokens, 1, 4), 0, 0, tokens)
    replica.admit(sequence, Hit([]))
    sequence.num_computed = num_computed
    return sequence


def test_long_prompt_gets_at_least_one_token_of_any_time() -> None:
    replica = Replica(SHAPE)
    step = StepBuilder(replica, SchedulerLimits())
    step.limit_long_prompts(1e-9)
    assert replica.costs.prefill_within(1e-9, 1000) == 0
    assert step.num_prefill_tokens(long_prompt(replica, 1000)) == 1


def test_long_prompt_gets_nothing_without_time() -> None:
    replica = Replica(SHAPE)
    step = StepBuilder(replica, SchedulerLimits())
    step.limit_long_prompts(0.0)
    assert step.num_prefill_tokens(long_prompt(replica, 1000)) == 0


def test_prompts_of_tenants_share_a_limited_time() -> None:
    replica = Replica(SHAPE)
    step = StepBuilder(replica, SchedulerLimits())
    step.limit_some_prompts(PromptLimit({"large": 0}), replica.costs.recompute_seconds(10) * 1.001)

    def short_prompt(tenant: str) -> Sequence:
        tokens = prompt(8)
        sequence = Sequence(0, Request(tenant, tokens, 1, 4, tenant=tenant), 0, 0, tokens)
        replica.admit(sequence, Hit([]))
        return sequence

    assert [step.num_prefill_tokens(short_prompt(tenant)) for tenant in ("large", "small", "large")] == [8, 8, 2]


def test_speculated_tokens_fit_into_the_blocks_of_the_step() -> None:
    bench = CoreBench(max_sampled_tokens=8)
    bench.submit("a", prompt(BLOCK + 1), 50)
    bench.step()
    extra = []
    for _ in range(BLOCK):
        [part] = bench.step().scheduled
        end = part.start + part.num_tokens
        assert (end + part.max_extra_tokens) <= len(part.sequence.block_ids) * BLOCK
        extra.append(part.max_extra_tokens)
    assert extra == [2, 1, 0, 3]


def test_speculated_tokens_end_with_the_request() -> None:
    bench = CoreBench(max_sampled_tokens=8, block_size=16)
    bench.submit("a", prompt(2), 4)
    bench.step()
    assert [bench.step().scheduled[0].max_extra_tokens for _ in range(3)] == [2, 1, 0]
