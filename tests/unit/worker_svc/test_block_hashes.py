"""A block's hash is deleted when the block is written, and only then."""

import hashlib
import random
from pathlib import Path

import pytest
import torch

from runner_driver import GREEDY, make_runner
from worker_svc.block_copier import BlockCopier, RateLimiter
from worker_svc.block_copier_factory import make_block_copier
from worker_svc.cache import KVCache
from worker_svc.executor import Executor
from worker_svc.runner import Runner
from worker_svc.step import BlockHashes, BlockOps, BlockTableUpdate, NewSequence, ScheduledSequence, Step

DEVICE = [(block, b"device %d" % block) for block in range(12)]
HOST = [(block, b"host %d" % block) for block in range(8)]


@pytest.fixture(scope="module")
def runner(tiny_llama: Path) -> Runner:
    return make_runner(tiny_llama, num_blocks=12, num_host_blocks=8)


def labelled(runner: Runner) -> Runner:
    """The runner, knowing no sequence and with a label for every block."""
    runner.reset()
    runner.step(Step([], [], [], block_hashes=DEVICE, host_block_hashes=HOST))
    return runner


def new(sequence_id: int, num_tokens: int) -> NewSequence:
    tokens = [(sequence_id + place) % 90 for place in range(num_tokens)]
    return NewSequence(sequence_id, tokens, num_tokens, 0, GREEDY)


def without(block_hashes: BlockHashes, *blocks: int) -> set[tuple[int, bytes]]:
    return {(block, label) for block, label in block_hashes if block not in blocks}


def check(runner: Runner, device: set[tuple[int, bytes]], host: set[tuple[int, bytes]]) -> None:
    report = runner.block_hashes.report()
    assert (set(report.device), set(report.host)) == (device, host)


@pytest.mark.parametrize(
    ("step", "device", "host"),
    [
        (Step([], [new(1, 20)], [ScheduledSequence(1, 0, 20, [3, 5])]), (3, 5), ()),
        (Step([], [new(1, 20)], [ScheduledSequence(1, 0, 4, [3, 5])]), (3, 5), ()),
        (Step([], [], [], BlockOps(swap_in=[(2, 7), (3, 8)])), (7, 8), ()),
        (Step([], [], [], BlockOps(copies=[(2, 7)])), (7,), ()),
        (Step([], [], [], BlockOps(swap_out=[(2, 7), (4, 0)])), (), (0, 7)),
        (Step([], [], [], BlockOps(swap_in=[(99, 7)])), (7,), ()),
        (Step([], [], [], BlockOps(swap_out=[(99, 7)])), (), (7,)),
    ],
    ids=["computed", "to be computed", "swapped in", "copied", "swapped out", "not swapped in", "not swapped out"],
)
def test_a_block_that_is_written_loses_its_hash(
    step: Step, device: tuple[int, ...], host: tuple[int, ...], runner: Runner
) -> None:
    labelled(runner).step(step)
    check(runner, without(DEVICE, *device), without(HOST, *host))


def test_a_block_that_a_decode_begins_loses_its_hash(runner: Runner) -> None:
    labelled(runner).step(Step([], [new(1, 16)], [ScheduledSequence(1, 0, 16, [3])]))
    runner.step(Step([], [], [ScheduledSequence(1, 16, 1, [5])]))
    check(runner, without(DEVICE, 3, 5), without(HOST))


def test_blocks_that_are_only_read_keep_their_hashes(runner: Runner) -> None:
    scheduled = [
        ScheduledSequence(1, 32, 8, [1, 2, 3]),  # behind a prefix of two blocks
        ScheduledSequence(2, 31, 1, [1, 2], num_cached_tokens=32),  # a whole prompt that is there
        ScheduledSequence(3, 0, 200, [4]),  # refused: its block does not hold it
    ]
    changes = [BlockTableUpdate(1, 0, 6)]
    labelled(runner).step(Step([], [new(1, 40), new(2, 32), new(3, 200)], scheduled))
    runner.step(Step([], [], [ScheduledSequence(1, 40, 1, [])], BlockOps(copies=[(1, 9)]), changes))
    check(runner, without(DEVICE, 3, 9), without(HOST))


def test_a_step_updates_its_hashes_before_it_writes(runner: Runner) -> None:
    labelled(runner)
    block_ops = BlockOps(swap_out=[(2, 0)], swap_in=[(4, 7)], copies=[(1, 9)])
    block_hashes, host_block_hashes = (
        [(7, b"late"), (9, b"late"), (3, b"late"), (1, b"kept")],
        [(0, b"late"), (4, b"kept")],
    )
    parts = [ScheduledSequence(1, 0, 5, [3])]
    runner.step(Step([], [new(1, 5)], parts, block_ops, block_hashes=block_hashes, host_block_hashes=host_block_hashes))
    check(runner, without(DEVICE, 1, 3, 7, 9) | {(1, b"kept")}, without(HOST, 0, 4) | {(4, b"kept")})


def test_hashes_outlive_the_sequences_and_the_generation(runner: Runner) -> None:
    labelled(runner).reset()
    check(runner, set(DEVICE), set(HOST))


def test_a_step_that_raises_leaves_no_hash_of_blocks_that_it_was_to_write(
    runner: Runner, monkeypatch: pytest.MonkeyPatch
) -> None:
    labelled(runner)

    def broken(*_: object) -> None:
        raise RuntimeError("broken")

    step = Step([], [new(1, 5)], [ScheduledSequence(1, 0, 5, [3])], BlockOps(copies=[(1, 9)]))
    with monkeypatch.context() as patch:
        patch.setattr("worker_svc.runner.make_batch", broken)
        with pytest.raises(RuntimeError, match="broken"):
            runner.step(step)
    check(runner, without(DEVICE, 3, 9), without(HOST))


class _Tiers:
    """The memory behind a runner, with the real contents of its blocks."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.tensors: list[torch.Tensor] = []

        def noting(
            executor: Executor, cache: KVCache, host_blocks: torch.Tensor, rate_limiter: RateLimiter
        ) -> BlockCopier:
            self.tensors = [cache.blocks, host_blocks]
            return make_block_copier(executor, cache, host_blocks, rate_limiter)

        monkeypatch.setattr("runner_driver.make_block_copier", noting)

    def label(self, tier: int, block: int) -> bytes:
        return hashlib.sha256(self.tensors[tier][block].numpy().tobytes()).digest()


@pytest.mark.parametrize("seed", range(4))
def test_a_block_always_holds_what_its_hash_says(seed: int, tiny_llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rng, tiers = random.Random(seed), _Tiers(monkeypatch)
    num_blocks = (12, 8)
    runner = make_runner(tiny_llama, num_blocks=num_blocks[0], num_host_blocks=num_blocks[1])
    length, tables = dict[int, int](), dict[int, list[int]]()
    num_kept = 0
    for step_id in range(1, 120):
        finished = [sequence_id for sequence_id in tables if rng.random() < 0.15]
        for sequence_id in finished:
            del tables[sequence_id], length[sequence_id]
        owned = {block for table in tables.values() for block in table}
        # Blocks that the steps so far filled, and none that is being filled.
        given = [
            [
                (block, tiers.label(tier, block))
                for block in rng.sample(range(num_blocks[tier]), 3)
                if block not in owned
            ]
            for tier in (0, 1)
        ]
        free = [block for block in range(num_blocks[0]) if block not in owned]
        rng.shuffle(free)
        take = free.pop
        outs = [(rng.randrange(num_blocks[0]), rng.randrange(num_blocks[1]))] if rng.random() < 0.3 else []
        ins = [(rng.randrange(num_blocks[1]), take())] if len(free) > 5 and rng.random() < 0.3 else []
        copies = [(take(), take())] if len(free) > 5 and rng.random() < 0.3 else []
        introduced, parts = [], []
        for sequence_id, table in tables.items():
            more = [take()] if length[sequence_id] % 16 == 0 and free else []
            if len(table) + len(more) > length[sequence_id] // 16:
                table += more
                parts.append(ScheduledSequence(sequence_id, length[sequence_id], 1, more))
                length[sequence_id] += 1
        if len(free) > 3 and len(tables) < 3:
            num_tokens = rng.randrange(1, 40)
            num_shared = rng.randrange(num_tokens // 16 + 1)
            start, stored = min(16 * num_shared, num_tokens - 1), 16 * num_shared
            table = [take() for _ in range(-(-num_tokens // 16))]
            introduced.append(new(step_id, num_tokens))
            parts.append(ScheduledSequence(step_id, start, num_tokens - start, list(table), num_cached_tokens=stored))
            tables[step_id], length[step_id] = table, num_tokens
        step = Step(finished, introduced, parts, BlockOps(outs, ins, copies), [], step_id, given[0], given[1])
        assert all(result.failure is None for result in runner.step(step).sequences)
        report = runner.block_hashes.report()
        for tier, block_hashes in enumerate((report.device, report.host)):
            num_kept += len(block_hashes)
            assert all(tiers.label(tier, block) == label for block, label in block_hashes)
        if rng.random() < 0.05:
            runner.reset()
            tables.clear()
            length.clear()
    assert num_kept > 500
