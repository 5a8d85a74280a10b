"""Moves hold the blocks at both their ends until their transfer is over."""

from scheduler_svc.core.kv.block_pool import BlockCounts
from scheduler_svc.core.kv.block_tier import BlockTier
from scheduler_svc.core.kv.prefix_index import BlockContent
from scheduler_svc.core.kv.swap import Swap, SwapManager
from scheduler_svc.core.step import BlockPair, Direction


class Bench:
    """Two tiers of four blocks, the first two of which have an owner, and the swaps between them."""

    def __init__(self) -> None:
        self.device, self.host = BlockTier(4, 2), BlockTier(4, 2)
        self.swaps = SwapManager(self.device, self.host)
        for tier in (self.device, self.host):
            assert tier.allocate(2) == [0, 1]

    def add(self, direction: Direction, *pairs: tuple[int, int]) -> Swap:
        move = Swap([BlockPair(*pair) for pair in pairs], [None] * len(pairs))
        self.swaps.add(direction, move)
        return move

    def copying(self) -> tuple[int, int]:
        """Blocks of device and host that only copies hold."""
        return self.device.pool.counts.copying, self.host.pool.counts.copying


def test_blocks_are_pinned_from_the_plan_to_the_confirmation() -> None:
    bench = Bench()
    move = bench.add(Direction.OUT, (0, 0), (1, 1))
    for tier in (bench.device, bench.host):
        tier.release([0, 1])
    assert bench.copying() == (2, 2)
    bench.swaps.send(1, Direction.OUT)
    assert bench.copying() == (2, 2)
    assert bench.swaps.finish(1, Direction.OUT) == [move]
    bench.swaps.unpin(Direction.OUT, move)
    assert bench.copying() == (0, 0)
    assert bench.device.pool.counts == BlockCounts(free=4, cached=0, used=0, copying=0)


def test_swaps_of_a_step_and_direction_are_one_transfer() -> None:
    bench = Bench()
    moves = [bench.add(Direction.OUT, (0, 0)), bench.add(Direction.OUT, (1, 1))]
    assert bench.swaps.send(7, Direction.OUT) == [BlockPair(0, 0), BlockPair(1, 1)]
    assert len(bench.swaps) == 1
    assert bench.swaps.finish(7, Direction.OUT) == moves


def test_forgotten_contents_are_not_published_by_swaps_that_wait_or_are_in_progress() -> None:
    bench = Bench()
    good, bad = BlockContent(b"good", b"good"), BlockContent(b"bad", b"bad")
    moves = []
    for pair in ((0, 0), (1, 1)):
        move = Swap([BlockPair(*pair)] * 2, [good, bad])
        bench.swaps.add(Direction.OUT, move)
        moves.append(move)
        if pair == (0, 0):
            bench.swaps.send(7, Direction.OUT)
    bench.swaps.forget({bad})
    assert [move.contents for move in moves] == [[good, None]] * 2


def test_each_direction_is_sent_separately() -> None:
    bench = Bench()
    bench.add(Direction.OUT, (0, 0))
    bench.add(Direction.IN, (1, 1))
    bench.swaps.send(7, Direction.IN)
    assert bench.swaps.is_in_progress(7, Direction.IN)
    assert not bench.swaps.is_in_progress(7, Direction.OUT)
    assert bench.swaps.has_waiting
    bench.swaps.send(8, Direction.OUT)
    assert bench.swaps.is_in_progress(8, Direction.OUT)
    assert not bench.swaps.has_waiting


def test_sent_swaps_are_not_sent_again() -> None:
    bench = Bench()
    bench.add(Direction.OUT, (0, 0))
    bench.swaps.send(1, Direction.OUT)
    assert bench.swaps.send(2, Direction.OUT) == []
    assert not bench.swaps.is_in_progress(2, Direction.OUT)


def test_block_of_two_swaps_is_pinned_until_both_are_done() -> None:
    bench = Bench()
    moves = [bench.add(Direction.IN, (0, 0)), bench.add(Direction.IN, (1, 0))]
    bench.host.release([0])
    assert bench.swaps.pins()[1] == {0: 2}
    bench.swaps.unpin(Direction.IN, moves[0])
    assert bench.copying() == (0, 1)
    bench.swaps.unpin(Direction.IN, moves[1])
    assert bench.copying() == (0, 0)


def test_device_blocks_with_a_copy_on_the_host_are_evicted_first() -> None:
    bench = Bench()
    for block_id in (0, 1):
        bench.device.index.publish(block_id, BlockContent(bytes([block_id]), b""))
    bench.device.release([0])
    move = bench.add(Direction.OUT, (1, 1))
    bench.device.release([1])
    bench.swaps.unpin(Direction.OUT, move)
    assert list(bench.device.pool.eviction_order) == [1, 0]
