"""Copies between two host memories: in both directions, within the rate limit, with errors."""

import time
from typing import Any

import pytest
import torch
from torch import Tensor

from worker_svc.block_copier import HostBlockCopier, RateLimiter
from worker_svc.executor import run_inline
from worker_svc.step import Direction

BLOCK_BYTES = 100


def _blocks(count: int, start: int) -> Tensor:
    """Each block filled with a number of its own."""
    return torch.arange(start, start + count, dtype=torch.uint8)[:, None].repeat(1, BLOCK_BYTES)


def _first(blocks: Tensor) -> list[int]:
    assert (blocks == blocks[:, :1]).all()
    return blocks[:, 0].tolist()


def test_blocks_go_from_their_sources_to_their_destinations() -> None:
    blocks, host_blocks = _blocks(5, 0), _blocks(4, 100)
    block_copier = HostBlockCopier(blocks, host_blocks, run_inline, RateLimiter(None))
    out = block_copier.swap(3, Direction.OUT, [(4, 0), (1, 3)]).result()
    assert (out.step_id, out.direction, out.num_blocks, out.failure) == (3, Direction.OUT, 2, None)
    assert _first(host_blocks) == [4, 101, 102, 1]
    back = block_copier.swap(4, Direction.IN, [(3, 0), (2, 2)]).result()
    assert (back.direction, back.failure) == (Direction.IN, None)
    assert _first(blocks) == [1, 1, 102, 3, 4]
    block_copier.copy([(4, 3), (4, 1)]).result()
    assert _first(blocks) == [1, 4, 102, 4, 4]


def test_an_error_is_the_failure_of_the_swap(caplog: pytest.LogCaptureFixture) -> None:
    block_copier = HostBlockCopier(_blocks(2, 0), _blocks(2, 0)[:, :50], run_inline, RateLimiter(None))
    reported = block_copier.swap(1, Direction.OUT, [(0, 0)]).result()
    assert reported.failure is not None
    assert "swap failed" in caplog.text


def test_a_lost_device_is_raised() -> None:
    class Lost:
        def chunks(self, *_: Any) -> Any:
            raise torch.AcceleratorError("lost")

    block_copier = HostBlockCopier(_blocks(2, 0), _blocks(2, 0), run_inline, Lost())  # type: ignore[arg-type]
    assert isinstance(block_copier.swap(1, Direction.OUT, [(0, 0)]).exception(), torch.AcceleratorError)


class Clock:
    """A clock that advances only by sleep."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 0.0
        monkeypatch.setattr(time, "perf_counter", lambda: self.now)

    def sleep(self, seconds: float) -> None:
        self.now += seconds


@pytest.mark.parametrize("rate", [50.0, 1e4, 1e6])
def test_a_held_back_copy_takes_its_bytes_over_the_rate(rate: float, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock(monkeypatch)
    blocks, host_blocks = _blocks(250, 0), torch.zeros(250, BLOCK_BYTES, dtype=torch.uint8)
    block_copier = HostBlockCopier(blocks, host_blocks, run_inline, RateLimiter(rate, clock.sleep))
    reported = block_copier.swap(1, Direction.OUT, [(block, block) for block in range(250)]).result()
    assert torch.equal(blocks, host_blocks)
    assert reported.seconds == pytest.approx(250 * BLOCK_BYTES / rate)


def test_the_copying_itself_counts_towards_its_time(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock(monkeypatch)
    chunks = RateLimiter(1e4, clock.sleep).chunks([(0, 0), (1, 1)], BLOCK_BYTES)  # a block takes 10 ms
    next(chunks)
    clock.now += 0.004
    next(chunks)
    assert clock.now == pytest.approx(0.010)
    clock.now += 0.1
    assert list(chunks) == []
    assert clock.now == pytest.approx(0.110)
