"""Blocks are copied to the host and back bit for bit, in the longest possible runs."""

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from quire_kernels.block_swap import host_runs, swap_in, swap_in_reference, swap_out, swap_out_reference

Swap = Callable[..., None]
SHAPE = (2, 2, 1, 8, 64)
# (device block, host block): a run on both sides, scattered on the device alone, on the host alone, and on both
PAIRS = {
    "none": [],
    "one": [(3, 5)],
    "run": [(2, 4), (3, 5), (4, 6)],
    "backwards": [(4, 6), (3, 5), (2, 4)],
    "scattered on the device": [(9, 0), (2, 1), (3, 2), (11, 3), (0, 4)],
    "scattered on the host": [(4, 9), (5, 2), (6, 7)],
    "scattered": [(9, 0), (2, 1), (7, 5), (3, 6), (4, 7), (0, 11)],
}


def make_tiers(device: str) -> tuple[Tensor, Tensor]:
    torch.manual_seed(0)
    cache = torch.randn(12, *SHAPE, device=device)
    host_cache = torch.randn(13, *SHAPE)
    return cache, host_cache.pin_memory() if device == "cuda" else host_cache


@pytest.mark.parametrize(("swap", "reference"), [(swap_out, swap_out_reference), (swap_in, swap_in_reference)])
@pytest.mark.parametrize("pairs", PAIRS.values(), ids=PAIRS)
@pytest.mark.parametrize("num_staged", [None, 2, 20])
def test_swap(swap: Swap, reference: Swap, pairs: list[tuple[int, int]], num_staged: int | None, device: str) -> None:
    actual, expected = make_tiers(device), make_tiers(device)
    staging = None if num_staged is None else torch.zeros(num_staged, *SHAPE, device=device)
    swap(*actual, pairs, staging)
    if device == "cuda":
        torch.cuda.synchronize()
    reference(*expected, pairs)
    assert torch.equal(actual[0], expected[0])
    assert torch.equal(actual[1], expected[1])


@pytest.mark.skipif(not torch.cuda.is_available(), reason="there are no streams without a GPU")
def test_swaps_run_in_the_given_stream(device: str) -> None:
    (cache, host_cache), stream = make_tiers(device), torch.cuda.Stream()  # type: ignore[no-untyped-call]
    expected = cache[[9, 2]].cpu()
    torch.cuda.synchronize()
    swap_out(cache, host_cache, [(9, 0), (2, 1)], torch.zeros(2, *SHAPE, device=device), stream)
    stream.synchronize()
    assert torch.equal(host_cache[:2], expected)


def test_neighbours_on_both_sides_are_one_copy() -> None:
    runs = host_runs([(4, 8), (2, 6), (3, 7), (7, 9), (1, 3)])
    assert [(run.host_start, run.device_blocks) for run in runs] == [(3, (1,)), (6, (2, 3, 4, 7))]
    assert [part.device_blocks for part in runs[1].device_runs()] == [(2, 3, 4), (7,)]
    assert [part.host for part in runs[1].device_runs()] == [slice(6, 9), slice(9, 10)]
    assert [(part.host_start, part.device_blocks) for part in runs[1].pieces(3)] == [(6, (2, 3, 4)), (9, (7,))]


def test_one_block_may_go_to_several(device: str) -> None:
    cache, host_cache = make_tiers(device)
    swap_out(cache, host_cache, [(5, 2), (5, 3), (5, 9)])
    swap_in(cache, host_cache, [(1, 2), (7, 2)])
    if device == "cuda":
        torch.cuda.synchronize()
    source = cache[5].cpu()
    for tier, block in ((host_cache, 2), (host_cache, 3), (host_cache, 9), (cache, 1), (cache, 7)):
        assert torch.equal(tier[block].cpu(), source)


@pytest.mark.parametrize(
    ("swap", "pairs"),
    [
        *itertools.product((swap_out, swap_in), ([(12, 0)], [(0, 13)], [(-1, 0)], [(0, -1)])),
        (swap_out, [(1, 2), (3, 2)]),
        (swap_in, [(1, 2), (1, 3)]),
    ],
)
def test_pairs_that_make_no_sense_are_refused(swap: Swap, pairs: list[tuple[int, int]], device: str) -> None:
    tiers = make_tiers(device)
    before = [tier.clone() for tier in tiers]
    with pytest.raises(ValueError, match=r"^pairs: "):
        swap(*tiers, pairs)
    assert all(torch.equal(tier, was) for tier, was in zip(tiers, before, strict=True))


@pytest.mark.parametrize("swap", [swap_out, swap_in])
def test_a_wrong_argument_is_named(swap: Swap, device: str) -> None:
    cache, host_cache = make_tiers(device)
    wrong: dict[str, list[tuple[Any, ...]]] = {
        "cache": [(cache[:, 0], host_cache, [])],
        "host_cache": [(cache, host_cache.half(), []), (cache, host_cache[:, :1].contiguous(), [])],
        "staging": [(cache, host_cache, [], cache[:0]), (cache, host_cache, [], cache.half())],
    }
    for argument, calls in wrong.items():
        for call in calls:
            with pytest.raises(ValueError, match=f"^{argument}: "):
                swap(*call)
