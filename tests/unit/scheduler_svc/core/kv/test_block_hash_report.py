"""Workers receive the hashes of their blocks, and a new scheduler restores the cached ones."""

from collections import UserList
from dataclasses import replace
from typing import Any

from core_bench import BLOCK, SHAPE, CoreBench, prompt
from scheduler_svc.core.kv.block_hash_report import BlockHashReport, TokenChain
from scheduler_svc.core.replica import Replica
from scheduler_svc.core.request import Request, Sequence
from scheduler_svc.core.step import StepPlan

PROMPT = prompt(4 * BLOCK)


def kept(bench: CoreBench, *plans: StepPlan) -> BlockHashReport:
    """What a worker that was sent these plans has labels for."""
    return BlockHashReport(
        dict(label for plan in plans for label in plan.block_hashes),
        dict(label for plan in plans for label in plan.host_block_hashes),
    )


def report(salt: bytes = b"") -> BlockHashReport:
    """The labels of a worker that has computed PROMPT, in blocks 0 to 3."""
    bench = CoreBench()
    bench.submit("a", PROMPT, 2, salt=salt)
    return kept(bench, *bench.steps(2), bench.step())


def found(replica: Replica, tokens: list[int], salt: bytes = b"") -> tuple[list[int], list[int]]:
    request = Request("again", tokens, 1, 4, salt=salt)
    hit = replica.kv.match(Sequence(0, request, 0, 0, tokens))
    return hit.device_ids, hit.host_ids


# Labels.


def test_block_hashes_are_sent_once_with_the_next_step() -> None:
    bench = CoreBench()
    [sequence] = bench.submit("a", PROMPT, 9)
    first, second = bench.step(), bench.step()
    assert first.block_hashes == []
    assert second.block_hashes == list(zip(sequence.block_ids, sequence.block_hashes, strict=False))[:4]
    assert bench.step().block_hashes == []


def test_block_hashes_alone_cause_no_step() -> None:
    bench = CoreBench(num_blocks=16)
    bench.submit("a", PROMPT, 1)
    bench.step()
    assert bench.plan() is not None, "the worker is to forget the sequence"
    bench.commit()
    assert bench.plan() is None


def test_hash_of_a_reallocated_block_is_not_sent_later() -> None:
    bench = CoreBench(num_blocks=4, num_host_blocks=0)
    bench.submit("a", PROMPT[:-1], 1)
    bench.step()
    bench.submit("b", prompt(4 * BLOCK - 1, 5000), 1)
    plan = bench.step()
    labelled = {block_id for block_id, _ in plan.block_hashes}
    assert labelled <= set(plan.scheduled[0].new_block_ids), "they are labelled before they are written"
    assert labelled


def test_hashes_of_host_blocks_are_sent_once_they_are_copied() -> None:
    bench = CoreBench()
    bench.submit("a", PROMPT, 1)
    bench.run()
    bench.replica.kv.back_up()
    copying = bench.step()
    bench.submit("b", prompt(4, 5000), 1)
    plan = bench.step()
    assert copying.host_block_hashes == []
    assert {block_id for block_id, _ in plan.host_block_hashes} == {pair.host for pair in copying.swap_out}


# Blocks that were kept.


def test_blocks_are_restored_by_the_tokens_of_their_sequence() -> None:
    replica = Replica(SHAPE)
    assert replica.kv.restore_cached_blocks(report(), [TokenChain(b"", [*PROMPT, 5, 6])]) == 4
    replica.check_integrity()
    assert found(replica, PROMPT) == ([0, 1, 2, 3], [])
    counts = replica.kv.device.counts
    assert (counts.cached, counts.free) == (4, SHAPE.num_blocks - 4)


def test_host_blocks_are_restored_behind_device_blocks() -> None:
    hashes = report().device
    inventory = BlockHashReport({7: hashes[0], 9: hashes[1]}, {3: hashes[2], 5: hashes[3]})
    replica = Replica(SHAPE)
    assert replica.kv.restore_cached_blocks(inventory, [TokenChain(b"", PROMPT)]) == 4
    replica.check_integrity()
    assert found(replica, PROMPT) == ([7, 9], [3, 5])


def test_blocks_of_no_known_sequence_stay_free() -> None:
    replica = Replica(SHAPE)
    assert (
        replica.kv.restore_cached_blocks(report(), [TokenChain(b"", [*PROMPT[:BLOCK], *prompt(3 * BLOCK, 5000)])]) == 1
    )
    assert replica.kv.restore_cached_blocks(report(), []) == 0
    assert replica.kv.device.counts.cached == 1
    replica.check_integrity()


def test_blocks_of_outputs_are_restored_behind_their_prompt() -> None:
    bench = CoreBench()
    request, outputs = prompt(BLOCK + 2), [prompt(2 + BLOCK, 5000), prompt(2, 6000), prompt(1, 7000)]
    for number, output in enumerate(outputs):
        bench.submit(f"{number}", [*request, *output], 2)
    inventory = kept(bench, *bench.steps(2), bench.step())
    replica = Replica(SHAPE)
    assert replica.kv.restore_cached_blocks(inventory, [TokenChain(b"", request, outputs)]) == 4
    assert [len(found(replica, [*request, *output])[0]) for output in outputs] == [3, 2, 1]


def test_only_as_many_tokens_are_read_as_the_worker_kept() -> None:
    class Counted(UserList[int]):
        num_read = 0

        def __getitem__(self, place: Any) -> Any:
            tokens = super().__getitem__(place)
            Counted.num_read += len(tokens) if isinstance(place, slice) else 1
            return tokens

    replica = Replica(SHAPE)
    chains = [TokenChain(b"", Counted(PROMPT[:BLOCK] + prompt(8000, 10_000 * number))) for number in range(1, 11)]
    assert replica.kv.restore_cached_blocks(report(), chains) == 1
    assert Counted.num_read < 10 * 500


def test_another_model_restores_nothing() -> None:
    assert (
        Replica(replace(SHAPE, fingerprint=b"other")).kv.restore_cached_blocks(report(), [TokenChain(b"", PROMPT)]) == 0
    )


def test_another_tenants_salt_restores_nothing() -> None:
    replica = Replica(SHAPE)
    assert replica.kv.restore_cached_blocks(report(b"x"), [TokenChain(b"y", PROMPT)]) == 0
    assert replica.kv.restore_cached_blocks(report(b"x"), [TokenChain(b"x", PROMPT)]) == 4
    assert found(replica, PROMPT, b"y") == ([], [])


def test_unknown_blocks_and_second_blocks_of_a_hash_are_ignored() -> None:
    hashes = report().device
    replica = Replica(replace(SHAPE, num_blocks=8))
    inventory = BlockHashReport({0: hashes[0], 1: hashes[0], 8: hashes[1], 2**31: hashes[2]}, {})
    assert replica.kv.restore_cached_blocks(inventory, [TokenChain(b"", PROMPT), TokenChain(b"", PROMPT)]) == 1
    replica.check_integrity()


def test_restored_tails_are_evicted_before_heads() -> None:
    replica = Replica(replace(SHAPE, num_blocks=4))
    replica.kv.restore_cached_blocks(report(), [TokenChain(b"", PROMPT)])
    assert list(replica.kv.device.pool.eviction_order) == [3, 2, 1, 0]


def test_restored_blocks_are_not_computed_again() -> None:
    bench = CoreBench()
    fresh = Replica(SHAPE)
    fresh.kv.restore_cached_blocks(report(), [TokenChain(b"", PROMPT)])
    bench.lose(bench.replica)
    bench.scheduler.add_replica(fresh)
    bench.submit("a", PROMPT, 4)
    plan = bench.scheduler.schedule(fresh, 0.0)
    assert plan is not None
    assert plan.num_tokens == 1
    assert plan.block_hashes == [], "the worker has these labels"
