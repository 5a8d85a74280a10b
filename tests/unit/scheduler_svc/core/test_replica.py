"""Prefix hits on both tiers, swaps, merged blocks and forks."""

from typing import Any

from core_bench import BLOCK, EMBEDDING, CopyMode, CoreBench, keys, prompt, tokens_of
from scheduler_svc.core.kv.prefix_cache import Hit, PendingPrefix
from scheduler_svc.core.policy.preemption import PreemptionMode
from scheduler_svc.core.request import Phase, Request, Sequence
from scheduler_svc.core.results import TOKENS, PromptComputation
from scheduler_svc.core.step import BlockCopy, BlockTableUpdate, MemoryPressure

PROMPT = prompt(4 * BLOCK)


def backed_up(**shape: Any) -> CoreBench:
    """Eight blocks: the first two of PROMPT's are on the device, and all four on the host."""
    bench = CoreBench(preemption=PreemptionMode.RECOMPUTE, num_blocks=8, **shape)
    bench.submit("first", PROMPT, 1)
    bench.run()
    bench.replica.kv.back_up()
    bench.step()
    bench.submit("other", prompt(6 * BLOCK, 5000), 1)
    bench.run()
    return bench


def queued(bench: CoreBench) -> Sequence:
    return bench.submit("again", PROMPT, 1)[0]


def running(bench: CoreBench, num_output: int, num_prompt: int = 2 * BLOCK, n: int = 1) -> list[Sequence]:
    """Sequences that have sampled so many tokens, of which only the last is uncomputed."""
    sequences = bench.submit("running", prompt(num_prompt), 50, n=n)
    while sequences[-1].num_output < num_output:
        bench.step()
    return sequences


def preempt(bench: CoreBench, sequence: Sequence) -> None:
    """Swap a sequence out, as the planner does."""
    assert bench.replica.kv.swap_out(sequence)
    bench.replica.leave(sequence, Phase.PREEMPTED)
    bench.replica.keep_swapped(sequence)


# What there is to do.


def test_replica_has_work_while_a_step_may_be_planned_for_what_is_there() -> None:
    bench = CoreBench(results=dict.fromkeys((TOKENS.name, EMBEDDING.name), PromptComputation.INDIVISIBLE))
    has_work = [bench.replica.has_work]
    bench.submit("tokens", prompt(9), 1)
    for _ in range(2):
        bench.step()
        has_work.append(bench.replica.has_work)
    assert has_work == [False, True, False], "the id of a sequence that has ended is sent"
    bench.replica.note_pressure(MemoryPressure.HIGH)
    assert bench.replica.has_work
    assert bench.plan() is None
    assert not bench.replica.has_work


def test_indivisible_prompts_need_no_other_step() -> None:
    bench = CoreBench(max_sequences=1, results={EMBEDDING.name: PromptComputation.INDIVISIBLE_WITHOUT_KV})
    for key in "ab":
        bench.submit_for_value(key, prompt(5))
    bench.plan()
    assert not bench.replica.has_work
    bench.commit()
    assert keys(bench.step()) == ["b"], "what is queued needs one"


def test_replica_has_work_while_a_copy_is_in_progress() -> None:
    bench = backed_up()
    bench.step()
    assert not bench.replica.has_work
    bench.replica.kv.back_up()
    bench.step(CopyMode.LATE)
    assert bench.replica.has_work
    bench.step()
    assert not bench.replica.has_work


# Both tiers.


def test_prefix_is_found_on_the_device_and_what_follows_on_the_host() -> None:
    bench = backed_up()
    hit = bench.replica.kv.match(queued(bench))
    assert (len(hit.device_ids), len(hit.host_ids)) == (2, 2)


def test_host_blocks_are_not_used_if_computing_them_costs_less() -> None:
    bench = backed_up(swap_bytes_per_second=1000.0)
    hit = bench.replica.kv.match(queued(bench))
    assert (len(hit.device_ids), hit.host_ids) == (2, [])


def test_sequence_does_not_run_before_its_blocks_are_copied_in() -> None:
    bench = backed_up()
    sequence = queued(bench)
    plan = bench.step(CopyMode.LATE)
    assert len(plan.swap_in) == 2
    assert plan.scheduled == []
    assert bench.step(CopyMode.LATE).scheduled == []
    assert sequence.phase is Phase.SWAPPING_IN
    assert bench.step(CopyMode.DONE).scheduled == []
    assert tokens_of(bench.step()) == {"again": 1}, "all but the last token came from the cache"


def test_blocks_of_a_failed_swap_are_computed_and_not_found_again() -> None:
    bench = backed_up()
    sequence = queued(bench)
    bench.step(CopyMode.FAILED)
    assert sequence.phase is Phase.QUEUED
    assert bench.replica.kv.match(sequence).host_ids == []
    assert tokens_of(bench.step()) == {"again": 2 * BLOCK}


def test_blocks_of_a_cancelled_swap_in_are_freed_when_it_is_done() -> None:
    bench = backed_up()
    queued(bench)
    bench.plan()
    bench.scheduler.cancel("again")
    assert bench.replica.kv.device.counts.copying == 2
    bench.commit()
    assert bench.replica.kv.device.counts.copying == 0
    assert bench.num_used == 0


def test_cached_blocks_are_backed_up_before_they_are_evicted() -> None:
    bench = CoreBench(num_blocks=16)
    bench.submit("first", PROMPT, 1)
    bench.run()
    bench.submit("second", prompt(11 * BLOCK, 5000), 1)
    plans = []
    while (plan := bench.plan()) is not None:
        plans.append(plan)
        bench.commit()
    assert sum(len(plan.swap_out) for plan in plans) >= 4
    assert bench.scheduler.totals.preemptions == 0
    bench.submit("third", prompt(13 * BLOCK, 9000), 1)
    bench.run()
    assert len(bench.replica.kv.match(queued(bench)).host_ids) > 0


def test_nothing_is_backed_up_if_computing_it_costs_less() -> None:
    bench = CoreBench(num_blocks=16, swap_bytes_per_second=1000.0)
    bench.submit("first", prompt(15 * BLOCK), 1)
    bench.run()
    assert bench.step().swap_out == []


def test_what_is_on_the_host_is_not_backed_up_again() -> None:
    bench = CoreBench()
    bench.submit("first", PROMPT, 1)
    bench.run()
    bench.replica.kv.back_up()
    assert len(bench.step().swap_out) == 4
    bench.replica.kv.back_up()
    assert not bench.replica.has_pending_updates


# Swapped sequences.


def test_swapped_kv_has_the_unshared_tail_and_keeps_shared_blocks() -> None:
    bench = CoreBench()
    first, second = running(bench, 2, n=2)
    preempt(bench, second)
    assert second.swapped_kv is not None
    assert second.swapped_kv.kept_block_ids == first.block_ids[:2]
    assert len(second.swapped_kv.host_ids) == 1
    assert [pair.host for pair in bench.step().swap_out] == second.swapped_kv.host_ids


def test_swap_in_copies_only_blocks_that_left_the_device() -> None:
    bench = CoreBench()
    [sequence] = running(bench, 2)
    num_computed = sequence.num_computed
    preempt(bench, sequence)
    assert len(bench.step().swap_out) == 3
    assert sequence.block_ids == []
    plan = bench.step(CopyMode.LATE)
    assert sequence.phase is Phase.SWAPPING_IN
    assert len(plan.swap_in) == 1, "both full blocks are still cached on the device"
    bench.step()
    [part] = bench.step().scheduled
    assert (part.start, part.num_tokens) == (num_computed, 1)
    assert bench.replica.kv.host.counts.used == 0


def test_sequence_whose_swap_out_failed_is_recomputed() -> None:
    bench = CoreBench()
    [sequence] = running(bench, 2)
    preempt(bench, sequence)
    bench.step(CopyMode.FAILED)
    assert sequence.phase is Phase.QUEUED
    assert sequence.swapped_kv is None
    assert bench.replica.kv.host.counts.free == bench.replica.shape.num_host_blocks
    assert tokens_of(bench.step()) == {"running": 2}, "both full blocks are still cached on the device"


def test_sequence_is_not_resumed_before_its_swap_out_is_done() -> None:
    bench = CoreBench()
    [sequence] = running(bench, 2)
    preempt(bench, sequence)
    for _ in range(3):
        bench.step(CopyMode.LATE)
        assert sequence.phase is Phase.SWAPPED
    bench.step(CopyMode.DONE)
    bench.step(CopyMode.LATE)
    assert sequence.phase is Phase.SWAPPING_IN


def test_swap_out_without_room_on_the_host_changes_nothing() -> None:
    bench = CoreBench(num_host_blocks=2)
    [sequence] = running(bench, 2)
    assert not bench.replica.kv.swap_out(sequence)
    assert sequence.swapped_kv is None
    assert bench.replica.kv.host.pool.num_free == 2
    bench.replica.check_integrity()


def test_backups_are_reused_by_a_swap_out() -> None:
    bench = backed_up()
    [sequence] = bench.submit("again", PROMPT, 2)
    while not sequence.num_output:
        bench.step()
    assert bench.replica.kv.swap_out(sequence)
    assert sequence.swapped_kv is not None
    assert len(sequence.swapped_kv.host_ids) == 4
    assert not bench.replica.kv.swaps.has_waiting, "all four are on the host already"


# Sharing.


def test_blocks_with_the_same_contents_are_merged() -> None:
    bench = CoreBench()
    [first] = bench.submit("a", prompt(BLOCK - 1), 20)
    [second] = bench.submit("b", prompt(BLOCK - 1), 20)
    bench.step()
    assert first.block_ids != second.block_ids
    bench.step()
    assert first.block_ids[0] == second.block_ids[0]
    assert BlockTableUpdate(second.id, 0, first.block_ids[0]) in bench.step().block_table_updates


def test_merged_block_is_held_until_the_steps_in_flight_are_done() -> None:
    bench = CoreBench()
    bench.submit("a", prompt(BLOCK - 1), 20)
    [second] = bench.submit("b", prompt(BLOCK - 1), 20)
    bench.step()
    own = second.block_ids[0]
    bench.plan()
    bench.plan()
    bench.commit()
    assert own not in second.block_ids
    assert not bench.replica.kv.device.pool.is_free(own)
    bench.commit()
    assert bench.replica.kv.device.pool.is_free(own)


def test_fork_shares_full_blocks_and_copies_the_last_one() -> None:
    bench = CoreBench()
    [parent] = running(bench, 2)
    child = Sequence(1000, parent.request, 1, parent.arrival, list(parent.tokens))
    bench.replica.fork(parent, child, parent.num_committed)
    assert child.block_ids[:2] == parent.block_ids[:2]
    assert child.num_computed == parent.num_committed
    plan = bench.plan()
    assert plan is not None
    assert plan.copies == [BlockCopy(parent.block_ids[2], child.block_ids[2])]
    assert bench.replica.kv.device.pool.num_owners(parent.block_ids[2]) == 2, "the step holds what it copies"
    bench.commit()
    assert bench.replica.kv.device.pool.num_owners(parent.block_ids[2]) == 1


def test_copy_for_a_sequence_that_left_is_cancelled() -> None:
    bench = CoreBench()
    [parent] = running(bench, 2)
    child = Sequence(1000, parent.request, 1, parent.arrival, list(parent.tokens))
    bench.replica.fork(parent, child, parent.num_committed)
    bench.replica.leave(child, Phase.ENDED)
    assert bench.step().copies == []
    assert bench.replica.kv.device.pool.num_owners(parent.block_ids[2]) == 1


def test_blocks_that_a_sequence_is_about_to_compute_have_a_producer() -> None:
    bench = CoreBench()
    [producer] = bench.submit("producer", PROMPT, 4)
    bench.plan()
    tokens = [*PROMPT[: 2 * BLOCK], *prompt(2 * BLOCK, 5000)]
    other = Sequence(1000, Request("other", tokens, 1, 4), 0, 1, tokens)
    hit = bench.replica.kv.match(other)
    assert hit == Hit([], [], pending_prefix=PendingPrefix(producer, 2 * BLOCK))
    bench.commit()
    hit = bench.replica.kv.match(other)
    assert hit.num_full == 2
    assert hit.pending_prefix is None
