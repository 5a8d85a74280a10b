"""Blocks: free, cached, used or copying, and by how many owned."""

import pytest

from scheduler_svc.core.kv.block_pool import BlockCounts, BlockPool

ALL = range(100)


def taken(pool: BlockPool, count: int) -> list[int]:
    result = pool.allocate(count)
    assert result is not None
    return result[0]


def test_too_few_blocks_change_nothing() -> None:
    pool = BlockPool(4)
    taken(pool, 3)
    assert pool.allocate(2) is None
    assert pool.counts == BlockCounts(free=1, cached=0, used=3, copying=0)


def test_block_with_two_owners_is_used_until_both_release_it() -> None:
    pool = BlockPool(2)
    blocks = taken(pool, 1)
    pool.share(blocks)
    pool.release(blocks, keep=())
    assert pool.num_owners(blocks[0]) == 1
    assert pool.num_available == 1
    pool.release(blocks, keep=())
    assert pool.counts == BlockCounts(free=2, cached=0, used=0, copying=0)


def test_released_block_is_cached_only_if_it_is_in_the_index() -> None:
    pool = BlockPool(4)
    first, second = taken(pool, 2)
    pool.release([first, second], keep={first})
    assert pool.is_cached(first)
    assert pool.is_free(second)
    assert pool.num_available == 4


def test_free_blocks_are_allocated_before_cached_ones() -> None:
    pool = BlockPool(4)
    cached = taken(pool, 1)
    pool.release(cached, keep=ALL)
    assert pool.allocate(3) == ([1, 2, 3], [])
    assert pool.allocate(1) == (cached, cached)


def test_tail_of_a_prefix_is_evicted_before_its_head() -> None:
    pool = BlockPool(3)
    pool.release(taken(pool, 3), keep=ALL)
    assert list(pool.eviction_order) == [2, 1, 0]


def test_reused_blocks_are_evicted_last() -> None:
    pool = BlockPool(4)
    system, other = taken(pool, 1), taken(pool, 1)
    pool.share(system)
    pool.release(system, keep=ALL)
    pool.release(system, keep=ALL)
    pool.release(other, keep=ALL)
    assert list(pool.eviction_order) == [*other, *system]


def test_newly_allocated_block_does_not_count_as_reused() -> None:
    pool = BlockPool(2)
    [popular] = taken(pool, 1)
    pool.share([popular])
    pool.release([popular, popular], keep=ALL)
    [other, again] = taken(pool, 2)
    assert again == popular
    pool.release([popular], keep=ALL)
    pool.release([other], keep=ALL)
    assert list(pool.eviction_order) == [popular, other]


def test_released_block_that_a_copy_names_is_copying_until_the_copy_is_done() -> None:
    pool = BlockPool(2)
    blocks = taken(pool, 1)
    pool.pin(blocks)
    pool.release(blocks, keep=ALL)
    assert pool.counts == BlockCounts(free=1, cached=0, used=0, copying=1)
    assert pool.num_owners(blocks[0]) == 0
    assert pool.num_available == 1
    pool.unpin(blocks, keep=ALL, evict_first=False)
    assert pool.counts == BlockCounts(free=1, cached=1, used=0, copying=0)


def test_cached_block_that_a_copy_names_is_not_allocated() -> None:
    pool = BlockPool(1)
    blocks = taken(pool, 1)
    pool.release(blocks, keep=ALL)
    pool.pin(blocks)
    assert pool.allocate(1) is None


def test_backed_up_blocks_are_evicted_first_tail_before_head() -> None:
    pool = BlockPool(4)
    other, head, tail = taken(pool, 3)
    pool.release([other], keep=ALL)
    pool.pin([head, tail])
    pool.release([head, tail], keep=ALL)
    pool.unpin([head, tail], keep=ALL, evict_first=True)
    assert list(pool.eviction_order) == [tail, head, other]


@pytest.mark.parametrize(
    ("owners", "pins", "message"),
    [({0: 2}, {}, "owners"), ({}, {}, "owners"), ({0: 1}, {0: 1}, "pins")],
)
def test_wrong_owners_are_detected(owners: dict[int, int], pins: dict[int, int], message: str) -> None:
    pool = BlockPool(2)
    taken(pool, 1)
    pool.check_integrity({0: 1}, {})
    with pytest.raises(AssertionError, match=message):
        pool.check_integrity(owners, pins)
