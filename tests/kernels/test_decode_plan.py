"""Plans of decodes: every key is read once, shares are equal, and shapes depend on nothing but the batch size."""

from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from quire_kernels.decode_plan import (
    ITEM_TILES,
    MIN_KEYS_PER_SHARE,
    DecodePlan,
    DecodeSplits,
    PlanArrays,
    decode_splits,
    resident_programs,
)

CONTEXTS = st.lists(
    st.one_of(st.integers(0, 300), st.sampled_from([0, 1, 63, 64, 65, 128, 255, 256, 257]), st.integers(0, 100_000)),
    min_size=1,
    max_size=70,
)
SPLITS = st.builds(
    DecodeSplits,
    num_shares=st.integers(1, 100),
    tile_keys=st.sampled_from([16, 32, 64, 128]),
    window=st.one_of(st.none(), st.integers(1, 5000)),
)
FIXED = st.builds(
    DecodeSplits,
    num_shares=st.integers(1, 100),
    tile_keys=st.sampled_from([16, 32, 64, 128]),
    window=st.one_of(st.none(), st.integers(1, 5000)),
    keys_per_split=st.sampled_from([128, 384, 4096]),
)


def items_of(plan: PlanArrays) -> NDArray[np.int32]:
    return plan.items[: plan.starts[-1]]


def lengths(contexts: list[int]) -> NDArray[np.int32]:
    return np.array(contexts, np.int32)


def tiles_of(splits: DecodeSplits, items: NDArray[Any]) -> NDArray[Any]:
    """The tiles that each item reads."""
    tiles: NDArray[Any] = -(-items[:, 2] // splits.tile_keys) - items[:, 1] // splits.tile_keys
    return tiles


@given(CONTEXTS, st.one_of(SPLITS, FIXED))
def test_each_key_that_a_sequence_sees_is_read_once(contexts: list[int], splits: DecodeSplits) -> None:
    plan = splits.plan(lengths(contexts))
    items = items_of(plan)
    for sequence, context in enumerate(contexts):
        of_sequence = items[items[:, 0] == sequence]
        assert len(of_sequence) >= 1
        begins, ends = of_sequence[:, 1].tolist(), of_sequence[:, 2].tolist()
        first_seen = 0 if splits.window is None else max(0, context - splits.window)
        assert begins[0] == first_seen // splits.tile_keys * splits.tile_keys
        assert begins[1:] == ends[:-1]
        assert ends[-1] == context
        assert all(begin % splits.tile_keys == 0 for begin in begins)
        assert all(begin < end for begin, end in zip(begins, ends, strict=True)) or context == 0
        assert bool((of_sequence[:, 3] == (len(of_sequence) == 1)).all())


@given(CONTEXTS, st.one_of(SPLITS, FIXED))
def test_each_item_is_in_one_share_and_each_part_is_merged(contexts: list[int], splits: DecodeSplits) -> None:
    plan = splits.plan(lengths(contexts))
    items = items_of(plan)
    assert len(plan.starts) == splits.num_shares + 1
    assert plan.starts[0] == 0
    assert bool((np.diff(plan.starts) >= 0).all())
    parts: list[int] = []
    for sequence, first, count in plan.merges[plan.merges[:, 2] > 0].tolist():
        assert count > 1
        assert set(items[first : first + count, 0].tolist()) == {sequence}
        parts += range(first, first + count)
    assert parts == np.flatnonzero(items[:, 3] == 0).tolist()


@given(CONTEXTS, SPLITS)
def test_no_share_reads_more_than_an_equal_one_or_costs_more_by_more_than_the_starts_of_two_items(
    contexts: list[int], splits: DecodeSplits
) -> None:
    plan = splits.plan(lengths(contexts))
    items = items_of(plan)
    costs = tiles_of(splits, items) + ITEM_TILES
    per_share = [int(costs[begin:end].sum()) for begin, end in pairwise(plan.starts)]
    whole = int(tiles_of(splits, items).sum()) + ITEM_TILES * len(contexts)
    equal = max(-(-whole // splits.num_shares), ITEM_TILES - -MIN_KEYS_PER_SHARE // splits.tile_keys)
    # The last share that has any has what is left.
    last = max(place for place, cost in enumerate(per_share) if cost)
    assert all(abs(cost - equal) <= 1 for cost in per_share[:last])
    assert per_share[last] <= equal + 1
    tiles = tiles_of(splits, items)
    assert max(tiles[begin:end].sum() for begin, end in pairwise(plan.starts)) <= equal


@given(CONTEXTS, CONTEXTS, SPLITS)
def test_shapes_depend_on_the_number_of_sequences_only(
    contexts: list[int], others: list[int], splits: DecodeSplits
) -> None:
    """So that a graph may be replayed with another plan."""
    num_seqs = min(len(contexts), len(others))
    plans = [splits.plan(lengths(some[:num_seqs])) for some in (contexts, others)]
    shapes = [[(array.shape, array.dtype) for array in plan] for plan in plans]
    assert shapes[0] == shapes[1]
    assert splits.num_bytes(num_seqs) == sum(array.nbytes for array in plans[0])


@given(CONTEXTS, FIXED, st.integers(1, 100))
def test_with_fixed_splits_nothing_but_itself_decides_the_parts_of_a_sequence(
    contexts: list[int], splits: DecodeSplits, num_shares: int
) -> None:
    items = items_of(splits.plan(lengths(contexts)))
    alone = DecodeSplits(num_shares, splits.tile_keys, splits.window, splits.keys_per_split)
    for sequence in {0, len(contexts) - 1}:
        of_sequence = items_of(alone.plan(lengths(contexts[sequence : sequence + 1])))
        assert of_sequence[:, 1:].tolist() == items[items[:, 0] == sequence, 1:].tolist()
        assert all(end - begin <= (splits.keys_per_split or 0) for _, begin, end, _ in of_sequence.tolist())


def test_sequences_of_few_keys_are_not_split() -> None:
    plan = DecodeSplits(50, 64).plan(lengths([256, 100, 1]))
    assert items_of(plan)[:, 3].tolist() == [1, 1, 1]


def test_one_long_sequence_is_divided_among_all_programs() -> None:
    splits = DecodeSplits(49, 64)
    plan = splits.plan(lengths([131072]))
    assert np.diff(plan.starts).tolist() == [1] * 49
    # 2,048 tiles, and as much as one of them for the start
    assert tiles_of(splits, items_of(plan)).tolist() == [41, *[42] * 47, 33]


@pytest.mark.parametrize(
    ("field", "splits"),
    [
        ("num_shares", {"num_shares": 0}),
        ("window", {"window": 0}),
        ("keys_per_split", {"keys_per_split": 0}),
        ("keys_per_split", {"keys_per_split": 192}),
    ],
)
def test_a_wrong_field_is_named(field: str, splits: dict[str, int]) -> None:
    with pytest.raises(ValueError, match=f"^{field}: "):
        DecodeSplits(**{"num_shares": 4, "tile_keys": 64, **splits})


class TestPrograms:
    """As many programs as fit, by registers and shared memory of an H200, which the interpreter stands for."""

    def test_three_of_a_llama_fit_a_multiprocessor(self) -> None:
        cpu = torch.device("cpu")
        assert resident_programs(16, 64, 128, torch.bfloat16, torch.bfloat16, cpu) == 3

    def test_three_fit_with_codes_of_8_bits_too(self) -> None:
        cpu = torch.device("cpu")
        assert resident_programs(16, 64, 128, torch.bfloat16, torch.int8, cpu) == 3

    @pytest.mark.parametrize(("tile_m", "head_dim", "fit"), [(16, 256, 3), (16, 192, 2), (64, 128, 2)])
    def test_fewer_fit_with_padded_dimensions_or_many_heads_in_a_group(
        self, tile_m: int, head_dim: int, fit: int
    ) -> None:
        tile_n = 32 if head_dim > 128 else 64
        cpu = torch.device("cpu")
        assert resident_programs(tile_m, tile_n, head_dim, torch.bfloat16, torch.bfloat16, cpu) == fit

    def test_fewer_fit_where_codes_become_float32(self) -> None:
        cpu = torch.device("cpu")
        for cache_dtype, fit in ((torch.float32, 3), (torch.int8, 1)):
            assert resident_programs(16, 16, 128, torch.float32, cache_dtype, cpu) == fit

    @pytest.mark.parametrize(("num_kv_heads", "num_shares"), [(1, 8), (3, 2), (8, 1), (32, 1)])
    def test_kv_heads_share_the_programs(self, num_kv_heads: int, num_shares: int) -> None:
        splits = decode_splits(
            4 * num_kv_heads, num_kv_heads, 64, torch.float32, torch.float32, torch.device("cpu"), 100
        )
        assert splits == DecodeSplits(num_shares, 32, 100)


def test_a_plan_on_a_device_is_that_of_the_host() -> None:
    contexts = lengths([5000, 3, 700])
    splits = DecodeSplits(7, 64)
    plan = DecodePlan.make(splits, contexts, torch.device("cpu"))
    for tensor, array in zip((plan.starts, plan.items, plan.merges), splits.plan(contexts), strict=True):
        assert np.array_equal(tensor.numpy(), array)
