"""The order in which cached blocks are evicted."""

from scheduler_svc.core.kv.eviction import EvictionOrder


def test_oldest_block_is_evicted_first() -> None:
    order = EvictionOrder(protected=4)
    for block_id in (3, 1, 2):
        order.add(block_id, found_again=False)
    assert [order.pop() for _ in range(3)] == [3, 1, 2]


def test_long_scan_does_not_evict_reused_blocks() -> None:
    order = EvictionOrder(protected=4)
    order.add(0, found_again=True)
    for block_id in range(1, 50):
        order.add(block_id, found_again=False)
    assert [order.pop() for _ in range(49)] == list(range(1, 50))
    assert order.pop() == 0


def test_oldest_of_too_many_reused_blocks_joins_the_others() -> None:
    order = EvictionOrder(protected=2)
    order.add(9, found_again=False)
    for block_id in (1, 2, 3):
        order.add(block_id, found_again=True)
    assert list(order) == [9, 1, 2, 3]
    order.add(8, found_again=False)
    assert [order.pop() for _ in range(5)] == [9, 1, 8, 2, 3]


def test_block_with_a_copy_elsewhere_is_evicted_first() -> None:
    order = EvictionOrder(protected=2)
    order.add(1, found_again=False)
    order.add_oldest(2, found_again=False)
    order.add_oldest(3, found_again=False)
    assert list(order) == [3, 2, 1]


def test_block_with_an_owner_is_not_evicted() -> None:
    order = EvictionOrder(protected=2)
    order.add(1, found_again=False)
    order.add(2, found_again=True)
    order.remove(1)
    order.remove(2)
    assert len(order) == 0
    assert 1 not in order
    assert 2 not in order
