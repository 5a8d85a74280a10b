"""The heap of all policies: after any additions, removals and changes of keys, the smallest key is first."""

from hypothesis import given
from hypothesis import strategies as st

from scheduler_svc.core.lazy_heap import LazyHeap

OPERATIONS = st.lists(
    st.tuples(st.sampled_from(["put", "discard"]), st.integers(0, 7), st.integers(0, 5)), max_size=200
)


@given(OPERATIONS)
def test_first_is_the_smallest_key(operations: list[tuple[str, int, int]]) -> None:
    heap: LazyHeap[int, int] = LazyHeap()
    keys: dict[int, int] = {}
    for operation, item, key in operations:
        if operation == "put":
            heap.put(item, key)
            keys.pop(item, None)
            keys[item] = key  # the last that was added, among equals
        else:
            heap.discard(item)
            keys.pop(item, None)
        first = heap.first()
        assert first == min(((k, i) for i, k in keys.items()), key=lambda entry: entry[0], default=None)
        assert len(heap) == len(keys)
        assert set(heap) == set(keys)
        assert list(heap.ascending()) == sorted(((k, i) for i, k in keys.items()), key=lambda entry: entry[0])


def test_old_entries_do_not_pile_up() -> None:
    heap: LazyHeap[int, int] = LazyHeap()
    for key in range(10_000):
        heap.put(key % 3, key)
        heap.discard(key % 5)
    assert len(heap._heap) <= 2 * len(heap) + 16
