"""On a GPU: swaps run concurrently with the steps, after the writes that they read, and delay no computation."""

from pathlib import Path
from typing import Any

import pytest
import torch

import llama_models
from runner_driver import Driver, make_runner
from worker_svc.block_copier import RateLimiter
from worker_svc.cache import CacheShape
from worker_svc.gpu.block_copier import CudaCopyStream, StreamBlockCopier
from worker_svc.gpu.staging import pin
from worker_svc.runner import Runner
from worker_svc.step import BlockOps, Direction, NewSequence, SamplingParams, ScheduledSequence, Step

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")

DTYPES = [torch.float32, torch.int8, torch.float8_e4m3fn]
# Some seconds at the clock of any GPU
LONG = 4_000_000_000


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    return llama_models.save_model(tmp_path, llama_models.VARIANTS["llama"]())


def _runner(directory: Path, cache_dtype: torch.dtype = torch.float32) -> Runner:
    return make_runner(
        directory, "triton", device="cuda", num_blocks=16, num_host_blocks=8, max_sequences=4, cache_dtype=cache_dtype
    )


def _new(sequence_id: int, tokens: list[int]) -> NewSequence:
    return NewSequence(sequence_id, tokens, len(tokens), 0, SamplingParams())


@pytest.mark.parametrize("cache_dtype", DTYPES)
def test_a_sequence_goes_on_from_blocks_that_were_elsewhere(cache_dtype: torch.dtype, directory: Path) -> None:
    (prompt,) = llama_models.prompts(40)
    ((*expected,),) = Driver(_runner(directory, cache_dtype)).generate([prompt], 4)
    runner = _runner(directory, cache_dtype)
    # Both are in flight: the swap starts after the forward pass that writes the blocks.
    prefill = runner.launch(Step([], [_new(1, prompt)], [ScheduledSequence(1, 0, 40, [3, 9, 4])], step_id=1))
    out = runner.launch(Step([1], [], [], BlockOps(swap_out=[(3, 0), (9, 1), (4, 2)]), step_id=2))
    (first,) = runner.finish(prefill).sequences
    (swap,) = runner.finish(out).swap_results
    assert swap.failure is None
    assert swap.seconds > 0
    runner.step(Step([], [_new(2, prompt[::-1])], [ScheduledSequence(2, 0, 40, [3, 9, 4])]))
    (back,) = runner.step(Step([2], [], [], BlockOps(swap_in=[(0, 7), (1, 11), (2, 5)]), step_id=3)).swap_results
    assert back.failure is None
    # The last block, which is written on, is a copy.
    tokens = [*prompt, *first.token_ids]
    step = Step([], [_new(3, tokens)], [ScheduledSequence(3, 40, 1, [7, 11, 0])], BlockOps(copies=[(5, 0)]))
    sampled = [*first.token_ids, *runner.step(step).sequences[0].token_ids]
    for start in (41, 42):
        sampled += runner.step(Step([], [], [ScheduledSequence(3, start, 1, [])])).sequences[0].token_ids
    assert sampled == expected


def test_neither_a_launch_nor_the_stream_that_computes_waits_for_a_swap(directory: Path) -> None:
    runner = _runner(directory)
    (prompt,) = llama_models.prompts(20)
    runner.step(Step([], [_new(1, prompt)], [ScheduledSequence(1, 0, 20, [0, 1])]))
    runner.step(Step([], [], [], BlockOps(swap_out=[(0, 7), (5, 6)])))  # compiles what is compiled late
    torch.cuda._sleep(LONG)  # type: ignore[no-untyped-call]
    block_ops = BlockOps(swap_out=[(0, 0), (1, 1)])
    first = runner.launch(Step([], [], [ScheduledSequence(1, 20, 1, [])], block_ops, step_id=1))
    assert not first.is_done()
    second = runner.launch(Step([], [], [ScheduledSequence(1, 21, 1, [])], step_id=2))
    results = [runner.finish(step) for step in (first, second)]
    swaps = [swap for result in results for swap in result.swap_results]
    swaps += runner.step(Step([], [], [], step_id=3)).swap_results
    assert [(swap_result.step_id, swap_result.failure) for swap_result in swaps] == [(1, None)]
    # The measured time does not include the time that it waited.
    assert swaps[0].seconds < 0.5


def test_a_swap_out_waits_for_the_writes_before_it_and_none_behind() -> None:
    device = torch.device("cuda")
    blocks = torch.zeros(4, 1 << 20, dtype=torch.uint8, device=device)
    host_blocks = torch.zeros(4, 1 << 20, dtype=torch.uint8).pin_memory()
    block_copier = StreamBlockCopier(blocks, host_blocks, CudaCopyStream(device), RateLimiter(None))
    # Blocks that are scattered, as below: compiles what gathers them
    block_copier.swap(0, Direction.OUT, [(1, 2), (3, 3)]).result(60)
    torch.cuda._sleep(LONG // 4)  # type: ignore[no-untyped-call]
    blocks.fill_(5)
    swapped = block_copier.swap(1, Direction.OUT, [(0, 0), (2, 1)])
    torch.cuda._sleep(LONG)  # type: ignore[no-untyped-call]
    behind: Any = torch.cuda.Event()  # type: ignore[no-untyped-call]
    behind.record()
    assert swapped.result(60).failure is None
    assert not behind.query()
    assert (host_blocks[:2] == 5).all()
    torch.cuda.synchronize()


def test_memory_that_is_there_can_be_pinned() -> None:
    for _ in range(2):  # at the same address, as a rule
        host_blocks = CacheShape.of_equal_layers(2, 2, 16, 64, torch.float16).allocate_host(64)
        assert not host_blocks.is_pinned()
        pin(host_blocks)
        assert host_blocks.is_pinned()
        del host_blocks
