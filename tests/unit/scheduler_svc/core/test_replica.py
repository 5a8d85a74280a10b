"""What a replica finds on its two tiers, brings from one to the other, and shares."""

from typing import Any

from core_bench import BLOCK, CopyMode, CoreBench, prompt, tokens_of
from scheduler_svc.core.plan import BlockCopy, BlockTableUpdate
from scheduler_svc.core.preemption import PreemptionMode
from scheduler_svc.core.replica import Hit
from scheduler_svc.core.sequence import Phase, Request, Sequence

PROMPT = prompt(4 * BLOCK)


def backed_up(**shape: Any) -> CoreBench:
    """Eight blocks: the first two of PROMPT's are on the device, and all four on the host."""
    bench = CoreBench(preemption=PreemptionMode.RECOMPUTE, num_blocks=8, **shape)
    bench.submit("first", PROMPT, 1)
    bench.run()
    bench.replica.back_up()
    bench.step()
    bench.submit("other", prompt(6 * BLOCK, 5000), 1)
    bench.run()
    return bench


def queued(bench: CoreBench) -> Sequence:
    return bench.submit("again", PROMPT, 1)[0]


def running(bench: CoreBench, num_output: int, num_prompt: int = 2 * BLOCK, n: int = 1) -> list[Sequence]:
    """Sequences that have drawn so many tokens; none but the last has to be computed."""
    sequences = bench.submit("running", prompt(num_prompt), 50, n=n)
    while sequences[-1].num_output < num_output:
        bench.step()
    return sequences


def give_way(bench: CoreBench, sequence: Sequence) -> None:
    """Swap a sequence out, as the planner does."""
    assert bench.replica.swap_out(sequence)
    bench.replica.leave(sequence, Phase.PREEMPTED)
    bench.replica.keep_swapped(sequence)


# Both tiers.


def test_beginning_is_found_on_the_device_and_what_follows_on_the_host() -> None:
    bench = backed_up()
    hit = bench.replica.match(queued(bench))
    assert (len(hit.device_ids), len(hit.host_ids)) == (2, 2)


def test_blocks_are_not_brought_where_computing_them_costs_less() -> None:
    bench = backed_up(swap_bytes_per_second=1000.0)
    hit = bench.replica.match(queued(bench))
    assert (len(hit.device_ids), hit.host_ids) == (2, [])


def test_nobody_runs_before_its_blocks_are_there() -> None:
    bench = backed_up()
    sequence = queued(bench)
    plan = bench.step(CopyMode.LATE)
    assert len(plan.swap_in) == 2
    assert plan.scheduled == []
    assert bench.step(CopyMode.LATE).scheduled == []
    assert sequence.phase is Phase.SWAPPING_IN
    assert bench.step(CopyMode.DONE).scheduled == []
    assert tokens_of(bench.step()) == {"again": 1}, "all but the last token came from the cache"


def test_blocks_that_did_not_arrive_are_computed_and_not_found_there_again() -> None:
    bench = backed_up()
    sequence = queued(bench)
    bench.step(CopyMode.FAILED)
    assert sequence.phase is Phase.QUEUED
    assert bench.replica.match(sequence).host_ids == []
    assert tokens_of(bench.step()) == {"again": 2 * BLOCK}


def test_blocks_on_their_way_for_one_who_left_are_let_go_when_they_are_there() -> None:
    bench = backed_up()
    queued(bench)
    bench.plan()
    bench.scheduler.cancel("again")
    assert bench.replica.device.pool.counts.in_flight == 2
    bench.commit()
    assert bench.replica.device.pool.counts.in_flight == 0
    assert bench.num_used == 0


def test_cached_blocks_are_backed_up_before_they_are_given_up() -> None:
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
    assert len(bench.replica.match(queued(bench)).host_ids) > 0


def test_nothing_is_backed_up_where_computing_it_costs_less() -> None:
    bench = CoreBench(num_blocks=16, swap_bytes_per_second=1000.0)
    bench.submit("first", prompt(15 * BLOCK), 1)
    bench.run()
    assert bench.step().swap_out == []


def test_what_is_on_the_host_is_not_backed_up_again() -> None:
    bench = CoreBench()
    bench.submit("first", PROMPT, 1)
    bench.run()
    bench.replica.back_up()
    assert len(bench.step().swap_out) == 4
    bench.replica.back_up()
    assert not bench.replica.has_pending_updates


# Images.


def test_image_holds_the_private_tail_and_keeps_what_is_shared() -> None:
    bench = CoreBench()
    first, second = running(bench, 2, n=2)
    give_way(bench, second)
    assert second.swapped_kv is not None
    assert second.swapped_kv.kept_block_ids == first.block_ids[:2]
    assert len(second.swapped_kv.host_ids) == 1
    assert [pair.host for pair in bench.step().swap_out] == second.swapped_kv.host_ids


def test_sequence_comes_back_to_where_it_was_and_moves_what_is_gone_only() -> None:
    bench = CoreBench()
    [sequence] = running(bench, 2)
    num_computed = sequence.num_computed
    give_way(bench, sequence)
    assert len(bench.step().swap_out) == 3
    assert sequence.block_ids == []
    plan = bench.step(CopyMode.LATE)
    assert sequence.phase is Phase.SWAPPING_IN
    assert len(plan.swap_in) == 1, "both full blocks are still cached on the device"
    bench.step()
    [part] = bench.step().scheduled
    assert (part.start, part.num_tokens) == (num_computed, 1)
    assert bench.replica.host.pool.counts.used == 0


def test_image_that_did_not_get_to_the_host_is_computed_again() -> None:
    bench = CoreBench()
    [sequence] = running(bench, 2)
    give_way(bench, sequence)
    bench.step(CopyMode.FAILED)
    assert sequence.phase is Phase.QUEUED
    assert sequence.swapped_kv is None
    assert bench.replica.host.pool.counts.free == bench.replica.shape.num_host_blocks
    assert tokens_of(bench.step()) == {"running": 2}, "both full blocks are still cached on the device"


def test_sequence_does_not_come_back_before_its_image_is_there() -> None:
    bench = CoreBench()
    [sequence] = running(bench, 2)
    give_way(bench, sequence)
    for _ in range(3):
        bench.step(CopyMode.LATE)
        assert sequence.phase is Phase.SWAPPED
    bench.step(CopyMode.DONE)
    bench.step(CopyMode.LATE)
    assert sequence.phase is Phase.SWAPPING_IN


def test_host_without_room_takes_no_image_and_changes_nothing() -> None:
    bench = CoreBench(num_host_blocks=2)
    [sequence] = running(bench, 2)
    assert not bench.replica.swap_out(sequence)
    assert sequence.swapped_kv is None
    assert bench.replica.host.pool.num_free == 2
    bench.replica.check_integrity()


def test_backups_serve_as_the_image_of_whoever_holds_the_same() -> None:
    bench = backed_up()
    [sequence] = bench.submit("again", PROMPT, 2)
    while not sequence.num_output:
        bench.step()
    assert bench.replica.swap_out(sequence)
    assert sequence.swapped_kv is not None
    assert len(sequence.swapped_kv.host_ids) == 4
    assert not bench.replica.swaps.has_waiting, "all four are on the host already"


# Sharing.


def test_blocks_that_turn_out_to_hold_the_same_become_one() -> None:
    bench = CoreBench()
    [first] = bench.submit("a", prompt(BLOCK - 1), 20)
    [second] = bench.submit("b", prompt(BLOCK - 1), 20)
    bench.step()
    assert first.block_ids != second.block_ids
    bench.step()
    assert first.block_ids[0] == second.block_ids[0]
    assert BlockTableUpdate(second.id, 0, first.block_ids[0]) in bench.step().block_table_updates


def test_block_that_became_another_is_held_until_the_steps_under_way_are_done() -> None:
    bench = CoreBench()
    bench.submit("a", prompt(BLOCK - 1), 20)
    [second] = bench.submit("b", prompt(BLOCK - 1), 20)
    bench.step()
    own = second.block_ids[0]
    bench.plan()
    bench.plan()
    bench.commit()
    assert own not in second.block_ids
    assert not bench.replica.device.pool.is_free(own)
    bench.commit()
    assert bench.replica.device.pool.is_free(own)


def test_fork_shares_full_blocks_and_copies_the_last_one() -> None:
    bench = CoreBench()
    [parent] = running(bench, 2)
    child = Sequence(1000, parent.request, 1, parent.arrival, list(parent.tokens))
    bench.replica.fork(parent, child)
    assert child.block_ids[:2] == parent.block_ids[:2]
    assert child.num_computed == parent.num_committed
    plan = bench.plan()
    assert plan is not None
    assert plan.copies == [BlockCopy(parent.block_ids[2], child.block_ids[2])]
    assert bench.replica.device.pool.num_owners(parent.block_ids[2]) == 2, "the step holds what it copies"
    bench.commit()
    assert bench.replica.device.pool.num_owners(parent.block_ids[2]) == 1


def test_copy_for_one_who_left_before_it_was_sent_is_not_made() -> None:
    bench = CoreBench()
    [parent] = running(bench, 2)
    child = Sequence(1000, parent.request, 1, parent.arrival, list(parent.tokens))
    bench.replica.fork(parent, child)
    bench.replica.leave(child, Phase.ENDED)
    assert bench.step().copies == []
    assert bench.replica.device.pool.num_owners(parent.block_ids[2]) == 1


def test_blocks_that_a_sequence_is_about_to_compute_have_a_leader() -> None:
    bench = CoreBench()
    [leader] = bench.submit("leader", PROMPT, 4)
    bench.plan()
    tokens = [*PROMPT[: 2 * BLOCK], *prompt(2 * BLOCK, 5000)]
    other = Sequence(1000, Request("other", tokens, 1, 4), 0, 1, tokens)
    hit = bench.replica.match(other)
    assert hit == Hit([], [])
    assert bench.replica.leader_of(other, hit) == (leader, 2 * BLOCK)
    bench.commit()
    hit = bench.replica.match(other)
    assert hit.num_full == 2
    assert bench.replica.leader_of(other, hit) is None
