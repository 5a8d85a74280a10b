"""A tier's blocks can be found until they are allocated again."""

import pytest

from scheduler_svc.core.kv.block_tier import BlockTier
from scheduler_svc.core.kv.prefix_index import BlockContent


def content(name: str) -> BlockContent:
    return BlockContent(name.encode(), name.encode())


def with_cached(tier: BlockTier, *names: str) -> list[int]:
    """Fills blocks, publishes their hashes, and frees them."""
    block_ids = tier.allocate(len(names))
    assert block_ids is not None
    for block_id, name in zip(block_ids, names, strict=True):
        tier.index.publish(block_id, content(name))
    tier.release(block_ids)
    return block_ids


def test_released_block_is_found_and_reused() -> None:
    tier = BlockTier(4, block_size=2)
    [block_id] = with_cached(tier, "a")
    assert tier.index.find(content("a")) == block_id
    tier.pool.share([block_id])
    assert tier.pool.counts.used == 1
    tier.check_integrity({block_id: 1}, {})


def test_reallocated_block_is_not_found_any_more() -> None:
    tier = BlockTier(1, block_size=2)
    with_cached(tier, "a")
    assert tier.allocate(1) is not None
    assert tier.index.find(content("a")) is None
    assert len(tier.index) == 0


def test_failed_allocation_changes_nothing() -> None:
    tier = BlockTier(2, block_size=2)
    with_cached(tier, "a")
    assert tier.allocate(3) is None
    assert tier.index.find(content("a")) is not None


def test_freed_cached_blocks_are_not_found_and_blocks_in_use_stay() -> None:
    tier = BlockTier(4, block_size=2)
    used, pinned, *_ = with_cached(tier, "used", "pinned", "a", "b")
    tier.pool.share([used])
    tier.pool.pin([pinned])
    assert tier.free_cached() == 2
    assert [tier.index.find(content(name)) for name in ("used", "pinned", "a", "b")] == [used, pinned, None, None]
    tier.check_integrity({used: 1}, {pinned: 1})
    assert tier.free_cached() == 0
    tier.release([used])
    tier.unpin([pinned])
    assert (tier.free_cached(), tier.pool.num_free) == (2, 4)
    tier.check_integrity({}, {})


def test_forgotten_contents_are_neither_found_nor_reported_and_blocks_in_use_stay() -> None:
    tier = BlockTier(3, block_size=2)
    block_ids = tier.allocate(3)
    assert block_ids is not None
    for block_id, name in zip(block_ids, "abc", strict=True):
        tier.publish(block_id, content(name))
    used, *others = block_ids
    tier.release(others)
    tier.forget([content("a"), content("b"), content("never seen")])
    assert [tier.index.find(content(name)) for name in "abc"] == [None, None, block_ids[2]]
    assert tier.take_new_hashes() == [(block_ids[2], content("c").hash)]
    tier.check_integrity({used: 1}, {})
    tier.release([used])
    assert tier.pool.num_free == 2
    tier.check_integrity({}, {})


def test_block_outside_the_index_becomes_free_when_its_copy_ends() -> None:
    tier = BlockTier(2, block_size=2)
    block_ids = tier.allocate(1)
    assert block_ids is not None
    tier.pool.pin(block_ids)
    tier.release(block_ids)
    tier.unpin(block_ids)
    assert tier.pool.num_free == 2


def test_cached_block_outside_the_index_is_detected() -> None:
    tier = BlockTier(2, block_size=2)
    block_ids = with_cached(tier, "a")
    tier.check_integrity({}, {})
    tier.index.forget(block_ids)
    with pytest.raises(AssertionError, match="not in the index"):
        tier.check_integrity({}, {})


def test_free_block_in_the_index_is_detected() -> None:
    tier = BlockTier(2, block_size=2)
    tier.publish(0, content("a"))
    with pytest.raises(AssertionError, match="a free block is in the index"):
        tier.check_integrity({}, {})
