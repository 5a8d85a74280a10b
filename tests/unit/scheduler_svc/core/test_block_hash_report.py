"""Workers are told what their blocks hold, and a new scheduler finds what they kept."""

from collections import UserList
from dataclasses import replace
from typing import Any

from core_bench import BLOCK, SHAPE, CoreBench, prompt
from scheduler_svc.core.block_hash_report import BlockHashReport, TokenChain
from scheduler_svc.core.plan import StepPlan
from scheduler_svc.core.replica import Replica
from scheduler_svc.core.sequence import Request, Sequence

PROMPT = prompt(4 * BLOCK)


def kept(bench: CoreBench, *plans: StepPlan) -> BlockHashReport:
    """What a worker that was sent these plans has labels for."""
    return BlockHashReport(
        dict(label for plan in plans for label in plan.block_hashes),
        dict(label for plan in plans for label in plan.host_block_hashes),
    )


def told(salt: bytes = b"") -> BlockHashReport:
    """The labels of a worker that has computed PROMPT, in blocks 0 to 3."""
    bench = CoreBench()
    bench.submit("a", PROMPT, 2, salt=salt)
    return kept(bench, *bench.steps(2), bench.step())


def found(replica: Replica, tokens: list[int], salt: bytes = b"") -> tuple[list[int], list[int]]:
    request = Request("again", tokens, 1, 4, salt=salt)
    hit = replica.match(Sequence(0, request, 0, 0, tokens))
    return hit.device_ids, hit.host_ids


# Labels.


def test_blocks_are_labelled_once_with_the_step_after_they_are_published() -> None:
    bench = CoreBench()
    [sequence] = bench.submit("a", PROMPT, 9)
    first, second = bench.step(), bench.step()
    assert first.block_hashes == []
    assert second.block_hashes == list(zip(sequence.block_ids, sequence.block_hashes, strict=False))[:4]
    assert bench.step().block_hashes == []


def test_labels_alone_are_no_reason_for_a_step() -> None:
    bench = CoreBench(num_blocks=16)
    bench.submit("a", PROMPT, 1)
    bench.step()
    assert bench.plan() is not None, "the worker is to forget the sequence"
    bench.commit()
    assert bench.plan() is None


def test_block_that_is_given_to_another_is_labelled_in_no_later_step() -> None:
    bench = CoreBench(num_blocks=4, num_host_blocks=0)
    bench.submit("a", PROMPT[:-1], 1)
    bench.step()
    bench.submit("b", prompt(4 * BLOCK - 1, 5000), 1)
    plan = bench.step()
    labelled = {block_id for block_id, _ in plan.block_hashes}
    assert labelled <= set(plan.scheduled[0].new_block_ids), "they are labelled before they are written"
    assert labelled


def test_blocks_on_the_host_are_labelled_once_they_are_there() -> None:
    bench = CoreBench()
    bench.submit("a", PROMPT, 1)
    bench.run()
    bench.replica.back_up()
    copying = bench.step()
    bench.submit("b", prompt(4, 5000), 1)
    plan = bench.step()
    assert copying.host_block_hashes == []
    assert {block_id for block_id, _ in plan.host_block_hashes} == {pair.host for pair in copying.swap_out}


# Blocks that were kept.


def test_blocks_are_found_again_by_the_tokens_of_their_sequence() -> None:
    replica = Replica(SHAPE)
    assert replica.restore_cached_blocks(told(), [TokenChain(b"", [*PROMPT, 5, 6])]) == 4
    replica.check_integrity()
    assert found(replica, PROMPT) == ([0, 1, 2, 3], [])
    counts = replica.device.pool.counts
    assert (counts.cached, counts.free) == (4, SHAPE.num_blocks - 4)


def test_blocks_of_the_host_are_found_behind_those_of_the_device() -> None:
    hashes = told().device
    inventory = BlockHashReport({7: hashes[0], 9: hashes[1]}, {3: hashes[2], 5: hashes[3]})
    replica = Replica(SHAPE)
    assert replica.restore_cached_blocks(inventory, [TokenChain(b"", PROMPT)]) == 4
    replica.check_integrity()
    assert found(replica, PROMPT) == ([7, 9], [3, 5])


def test_what_no_sequence_leads_to_stays_free() -> None:
    replica = Replica(SHAPE)
    assert replica.restore_cached_blocks(told(), [TokenChain(b"", [*PROMPT[:BLOCK], *prompt(3 * BLOCK, 5000)])]) == 1
    assert replica.restore_cached_blocks(told(), []) == 0
    assert replica.device.pool.counts.cached == 1
    replica.check_integrity()


def test_what_sequences_of_a_request_went_on_with_is_found_behind_their_prompt() -> None:
    bench = CoreBench()
    request, outputs = prompt(BLOCK + 2), [prompt(2 + BLOCK, 5000), prompt(2, 6000), prompt(1, 7000)]
    for number, output in enumerate(outputs):
        bench.submit(f"{number}", [*request, *output], 2)
    inventory = kept(bench, *bench.steps(2), bench.step())
    replica = Replica(SHAPE)
    assert replica.restore_cached_blocks(inventory, [TokenChain(b"", request, outputs)]) == 4
    assert [len(found(replica, [*request, *output])[0]) for output in outputs] == [3, 2, 1]


def test_no_more_of_a_request_is_read_than_its_worker_kept() -> None:
    class Counted(UserList[int]):
        num_read = 0

        def __getitem__(self, place: Any) -> Any:
            tokens = super().__getitem__(place)
            Counted.num_read += len(tokens) if isinstance(place, slice) else 1
            return tokens

    replica = Replica(SHAPE)
    chains = [TokenChain(b"", Counted(PROMPT[:BLOCK] + prompt(8000, 10_000 * number))) for number in range(1, 11)]
    assert replica.restore_cached_blocks(told(), chains) == 1
    assert Counted.num_read < 10 * 500


def test_another_model_adopts_nothing() -> None:
    assert Replica(replace(SHAPE, fingerprint=b"other")).restore_cached_blocks(told(), [TokenChain(b"", PROMPT)]) == 0


def test_another_tenants_salt_leads_to_nothing() -> None:
    replica = Replica(SHAPE)
    assert replica.restore_cached_blocks(told(b"x"), [TokenChain(b"y", PROMPT)]) == 0
    assert replica.restore_cached_blocks(told(b"x"), [TokenChain(b"x", PROMPT)]) == 4
    assert found(replica, PROMPT, b"y") == ([], [])


def test_blocks_that_are_not_there_and_second_ones_of_a_hash_are_ignored() -> None:
    hashes = told().device
    replica = Replica(replace(SHAPE, num_blocks=8))
    inventory = BlockHashReport({0: hashes[0], 1: hashes[0], 8: hashes[1], 2**31: hashes[2]}, {})
    assert replica.restore_cached_blocks(inventory, [TokenChain(b"", PROMPT), TokenChain(b"", PROMPT)]) == 1
    replica.check_integrity()


def test_tails_of_what_was_kept_are_given_up_before_heads() -> None:
    replica = Replica(replace(SHAPE, num_blocks=4))
    replica.restore_cached_blocks(told(), [TokenChain(b"", PROMPT)])
    assert list(replica.device.pool.eviction_order) == [3, 2, 1, 0]


def test_sequence_goes_on_without_computing_what_was_kept() -> None:
    bench = CoreBench()
    fresh = Replica(SHAPE)
    fresh.restore_cached_blocks(told(), [TokenChain(b"", PROMPT)])
    bench.lose(bench.replica)
    bench.scheduler.add_replica(fresh)
    bench.submit("a", PROMPT, 4)
    plan = bench.scheduler.schedule(fresh, 0.0)
    assert plan is not None
    assert plan.num_tokens == 1
    assert plan.block_hashes == [], "the worker has these labels"
