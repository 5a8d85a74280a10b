"""Blocks: free, cached, used or in flight, and by how many owned."""

import pytest

from scheduler_svc.core.blocks import BlockCounts, BlockPool

ALL = range(100)


def taken(pool: BlockPool, count: int) -> list[int]:
    result = pool.allocate(count)
    assert result is not None
    return result[0]


def test_too_few_blocks_change_nothing() -> None:
    pool = BlockPool(4)
    taken(pool, 3)
    assert pool.allocate(2) is None
    assert pool.counts == BlockCounts(free=1, cached=0, used=3, in_flight=0)


def test_block_with_two_owners_is_used_until_both_are_gone() -> None:
    pool = BlockPool(2)
    blocks = taken(pool, 1)
    pool.share(blocks)
    pool.release(blocks, keep=())
    assert pool.num_owners(blocks[0]) == 1
    assert pool.num_available == 1
    pool.release(blocks, keep=())
    assert pool.counts == BlockCounts(free=2, cached=0, used=0, in_flight=0)


def test_known_contents_are_kept_and_unknown_ones_are_not() -> None:
    pool = BlockPool(4)
    first, second = taken(pool, 2)
    pool.release([first, second], keep={first})
    assert pool.is_cached(first)
    assert pool.is_free(second)
    assert pool.num_available == 4


def test_what_is_free_is_handed_out_before_what_is_cached() -> None:
    pool = BlockPool(4)
    cached = taken(pool, 1)
    pool.release(cached, keep=ALL)
    assert pool.allocate(3) == ([1, 2, 3], [])
    assert pool.allocate(1) == (cached, cached)


def test_tail_of_a_prefix_is_given_up_before_its_head() -> None:
    pool = BlockPool(3)
    pool.release(taken(pool, 3), keep=ALL)
    assert list(pool.eviction_order) == [2, 1, 0]


def test_what_was_shared_outlives_what_was_not() -> None:
    pool = BlockPool(4)
    system, other = taken(pool, 1), taken(pool, 1)
    pool.share(system)
    pool.release(system, keep=ALL)
    pool.release(system, keep=ALL)
    pool.release(other, keep=ALL)
    assert list(pool.eviction_order) == [*other, *system]


def test_block_filled_anew_has_not_been_found_again() -> None:
    pool = BlockPool(2)
    [popular] = taken(pool, 1)
    pool.share([popular])
    pool.release([popular, popular], keep=ALL)
    [other, again] = taken(pool, 2)
    assert again == popular
    pool.release([popular], keep=ALL)
    pool.release([other], keep=ALL)
    assert list(pool.eviction_order) == [popular, other]


def test_released_block_that_a_copy_names_is_in_flight_until_the_copy_is_done() -> None:
    pool = BlockPool(2)
    blocks = taken(pool, 1)
    pool.pin(blocks)
    pool.release(blocks, keep=ALL)
    assert pool.counts == BlockCounts(free=1, cached=0, used=0, in_flight=1)
    assert pool.num_owners(blocks[0]) == 0
    assert pool.num_available == 1
    pool.unpin(blocks, keep=ALL, first_to_go=False)
    assert pool.counts == BlockCounts(free=1, cached=1, used=0, in_flight=0)


def test_cached_block_that_a_copy_names_is_not_handed_out() -> None:
    pool = BlockPool(1)
    blocks = taken(pool, 1)
    pool.release(blocks, keep=ALL)
    pool.pin(blocks)
    assert pool.allocate(1) is None


def test_what_was_backed_up_is_given_up_first_and_of_it_the_tail() -> None:
    pool = BlockPool(4)
    other, head, tail = taken(pool, 3)
    pool.release([other], keep=ALL)
    pool.pin([head, tail])
    pool.release([head, tail], keep=ALL)
    pool.unpin([head, tail], keep=ALL, first_to_go=True)
    assert list(pool.eviction_order) == [tail, head, other]


@pytest.mark.parametrize(
    ("owners", "pins", "message"),
    [({0: 2}, {}, "owners"), ({}, {}, "owners"), ({0: 1}, {0: 1}, "pins")],
)
def test_books_that_do_not_balance_are_found_out(owners: dict[int, int], pins: dict[int, int], message: str) -> None:
    pool = BlockPool(2)
    taken(pool, 1)
    pool.check_integrity({0: 1}, {})
    with pytest.raises(AssertionError, match=message):
        pool.check_integrity(owners, pins)
