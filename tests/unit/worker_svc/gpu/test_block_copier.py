"""Swaps beside the steps: after the writes that they read, one after another, and cancelled on request."""

import threading
from collections.abc import Callable
from concurrent.futures import Future

import pytest
import torch
from torch import Tensor

from worker_svc.block_copier import RateLimiter
from worker_svc.gpu.block_copier import StreamBlockCopier
from worker_svc.step import Direction, SwapResult

BLOCK_BYTES = 64


class Stream:
    """Counts its events and records the order of its work."""

    def __init__(self) -> None:
        self.num_marks = 0
        self.behind: list[int | None] = []
        self.let_go = threading.Event()
        self.let_go.set()

    def record_event(self) -> int:
        self.num_marks += 1
        return self.num_marks

    def run(self, work: Callable[[], None], after: int | None) -> float:
        assert self.let_go.wait(30)
        self.behind.append(after)
        work()
        return 0.25


@pytest.fixture
def stream() -> Stream:
    return Stream()


def _tiers(device: torch.device) -> tuple[Tensor, Tensor]:
    blocks = torch.arange(6, dtype=torch.uint8, device=device)[:, None].repeat(1, BLOCK_BYTES)
    host_blocks = torch.arange(100, 105, dtype=torch.uint8)[:, None].repeat(1, BLOCK_BYTES)
    return blocks, host_blocks.pin_memory() if device.type == "cuda" else host_blocks


def _first(blocks: Tensor) -> list[int]:
    if blocks.is_cuda:
        torch.cuda.synchronize()
    assert (blocks == blocks[:, :1]).all()
    return blocks[:, 0].tolist()


def test_blocks_go_both_ways_and_within_the_device(stream: Stream, device: torch.device) -> None:
    blocks, host_blocks = _tiers(device)
    block_copier = StreamBlockCopier(blocks, host_blocks, stream, RateLimiter(None))
    # Neighbours on the host and scattered on the device, so that they are gathered first
    reported = block_copier.swap(5, Direction.OUT, [(4, 0), (1, 1), (3, 2)]).result(30)
    assert reported == SwapResult(5, Direction.OUT, 3, 0.25)
    assert _first(host_blocks) == [4, 1, 3, 103, 104]
    assert block_copier.swap(6, Direction.IN, [(4, 0), (3, 5), (2, 2)]).result(30).failure is None
    assert _first(blocks) == [104, 1, 3, 3, 4, 103]
    block_copier.copy([(0, 1), (5, 2)]).result()
    assert _first(blocks) == [104, 104, 103, 3, 4, 103]


def test_a_swap_out_begins_behind_what_was_launched_and_a_swap_in_behind_nothing(
    stream: Stream, device: torch.device
) -> None:
    block_copier = StreamBlockCopier(*_tiers(device), stream, RateLimiter(None))
    for step_id, direction in enumerate((Direction.OUT, Direction.IN, Direction.OUT)):
        block_copier.swap(step_id, direction, [(0, 0)]).result(30)
    assert stream.behind == [1, None, 2]


def test_the_place_that_a_swap_out_waits_for_is_that_of_when_it_was_asked_for(
    stream: Stream, device: torch.device
) -> None:
    stream.let_go.clear()
    block_copier = StreamBlockCopier(*_tiers(device), stream, RateLimiter(None))
    first, second = (block_copier.swap(step_id, Direction.OUT, [(0, step_id)]) for step_id in range(2))
    assert stream.num_marks == 2
    assert not first.done()
    stream.let_go.set()
    second.result(30)
    assert stream.behind == [1, 2]


def test_dropped_transfers_copy_nothing_more_and_later_ones_do(stream: Stream, device: torch.device) -> None:
    blocks, host_blocks = _tiers(device)
    stream.let_go.clear()
    block_copier = StreamBlockCopier(blocks, host_blocks, stream, RateLimiter(None))
    begun: list[Future[SwapResult]] = [block_copier.swap(block, Direction.OUT, [(block, block)]) for block in range(3)]
    dropping = threading.Thread(target=block_copier.cancel_all)
    dropping.start()
    assert not begun[-1].done()
    assert block_copier._cancelling.wait(30)
    stream.let_go.set()
    dropping.join(30)
    assert all(future.done() for future in begun)
    assert _first(host_blocks) == [100, 101, 102, 103, 104]
    assert block_copier.swap(9, Direction.OUT, [(3, 3)]).result(30).failure is None
    assert _first(host_blocks) == [100, 101, 102, 3, 104]


def test_a_swap_that_cannot_be_enqueued_fails_and_the_next_does_not(
    stream: Stream, device: torch.device, caplog: pytest.LogCaptureFixture
) -> None:
    block_copier = StreamBlockCopier(*_tiers(device), stream, RateLimiter(None))
    assert block_copier.swap(1, Direction.OUT, [(0, 9)]).result(30).failure is not None
    assert block_copier.swap(2, Direction.OUT, [(0, 1)]).result(30).failure is None
    assert "swap failed" in caplog.text
