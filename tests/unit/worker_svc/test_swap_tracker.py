"""Swaps and copies of a step: swapped blocks come back unchanged, and an invalid copy fails alone."""

import threading
from collections.abc import Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest
import torch

import llama_models
from llama_models import VOCAB
from runner_driver import GREEDY, make_runner
from worker_svc.description import WorkerLimits
from worker_svc.errors import DeviceLost
from worker_svc.executor import HostExecutor
from worker_svc.runner import Runner
from worker_svc.step import (
    BlockOps,
    BlockPairs,
    BlockTableUpdate,
    Direction,
    NewSequence,
    ScheduledSequence,
    Step,
    StepOutcome,
    SwapResult,
)

PROMPT, OTHER = llama_models.prompts(20, 32)


def _new(sequence_id: int, tokens: list[int]) -> NewSequence:
    return NewSequence(sequence_id, tokens, len(tokens), 0, GREEDY)


def _run(runner: Runner, *scheduled: ScheduledSequence, step_id: int = 0, **fields: Any) -> StepOutcome:
    given = {"finished_ids": [], "new_sequences": [], "block_ops": BlockOps(), "block_table_updates": [], **fields}
    return runner.step(Step(scheduled=list(scheduled), step_id=step_id, **given))


def _draw(runner: Runner, scheduled: ScheduledSequence, **fields: Any) -> int:
    (result,) = _run(runner, scheduled, **fields).sequences
    assert result.failure is None, result.failure
    (token,) = result.token_ids
    return token


@pytest.fixture(params=["torch", "compiled"])
def runner(request: pytest.FixtureRequest, tiny_llama: Path) -> Runner:
    """With 16 tokens per block: steps on the caller's thread, and on a thread of their own."""
    return make_runner(tiny_llama, request.param, num_blocks=6, num_host_blocks=5)


@pytest.fixture
def expected(tiny_llama: Path) -> list[int]:
    (tokens,) = llama_models.generate(tiny_llama, [PROMPT], 3)
    return tokens


def test_a_sequence_continues_from_blocks_that_were_swapped_out_and_in(runner: Runner, expected: list[int]) -> None:
    sampled = [_draw(runner, ScheduledSequence(1, 0, 20, [0, 1]), new_sequences=[_new(1, PROMPT)])]
    out = _run(runner, finished_ids=[1], block_ops=BlockOps(swap_out=[(0, 4), (1, 2)]), step_id=2).swap_results
    assert [(swap.step_id, swap.direction, swap.failure) for swap in out] == [(2, Direction.OUT, None)]
    _draw(runner, ScheduledSequence(2, 0, 32, [1, 0]), new_sequences=[_new(2, OTHER)])
    back = _run(runner, block_ops=BlockOps(swap_in=[(4, 5), (2, 3)]), step_id=4).swap_results
    assert [(swap.step_id, swap.direction, swap.num_blocks) for swap in back] == [(4, Direction.IN, 2)]
    again = _new(3, PROMPT + sampled)
    sampled.append(_draw(runner, ScheduledSequence(3, 20, 1, [5, 3]), new_sequences=[again]))
    sampled.append(_draw(runner, ScheduledSequence(3, 21, 1, [])))
    assert sampled == expected


def test_a_swap_out_reads_what_the_step_before_it_wrote_though_both_are_in_flight(
    runner: Runner, expected: list[int]
) -> None:
    first = runner.launch(Step([], [_new(1, PROMPT)], [ScheduledSequence(1, 0, 20, [0, 1])], step_id=1))
    second = runner.launch(Step([], [], [], BlockOps(swap_out=[(0, 0), (1, 1)]), step_id=2))
    assert runner.finish(first).swap_results == []
    (swap,) = runner.finish(second).swap_results
    assert swap.failure is None
    block_ops = BlockOps(swap_in=[(0, 2), (1, 3)])
    sampled = _draw(
        runner,
        ScheduledSequence(2, 20, 1, [2, 3]),
        new_sequences=[_new(2, [*PROMPT, expected[0]])],
        block_ops=block_ops,
    )
    assert sampled == expected[1]


def test_the_transfers_of_a_step_that_computes_are_in_its_result(runner: Runner) -> None:
    block_ops = BlockOps(swap_out=[(4, 0)], swap_in=[(1, 5)])
    outcome = _run(
        runner, ScheduledSequence(1, 0, 20, [0, 1]), new_sequences=[_new(1, PROMPT)], block_ops=block_ops, step_id=7
    )
    assert [(swap.step_id, swap.direction) for swap in outcome.swap_results] == [(7, Direction.OUT), (7, Direction.IN)]
    assert all(swap.seconds > 0 for swap in outcome.swap_results)
    # They took their time of the step's.
    assert outcome.stall_seconds == sum(swap.seconds for swap in outcome.swap_results) < outcome.busy_seconds
    assert _run(runner, step_id=8).swap_results == []


def test_a_fork_writes_a_copy_of_the_block_that_it_shared(runner: Runner, expected: list[int]) -> None:
    sampled = _draw(runner, ScheduledSequence(1, 0, 20, [0, 1]), new_sequences=[_new(1, PROMPT)])
    # Both continue with a token of their own, in copies of the second block.
    other = (sampled + 1) % VOCAB
    forks = [_new(2, [*PROMPT, sampled]), _new(3, [*PROMPT, other])]
    scheduled = [ScheduledSequence(2, 20, 1, [0, 4]), ScheduledSequence(3, 20, 1, [0, 5])]
    block_ops = BlockOps(copies=[(1, 4), (1, 5)])
    first, second = _run(runner, *scheduled, new_sequences=forks, block_ops=block_ops).sequences
    assert first.token_ids == [expected[1]]
    assert [second.token_ids] == _alone(runner, [*PROMPT, other])
    assert _draw(runner, ScheduledSequence(1, 20, 1, [])) == expected[1]


def test_a_place_of_a_table_may_change(runner: Runner, expected: list[int]) -> None:
    sampled = [_draw(runner, ScheduledSequence(1, 0, 20, [0, 1]), new_sequences=[_new(1, PROMPT)])]
    update = BlockTableUpdate(sequence_id=1, index=1, block_id=3)
    decode = ScheduledSequence(1, 20, 1, [])
    sampled.append(_draw(runner, decode, block_ops=BlockOps(copies=[(1, 3)]), block_table_updates=[update]))
    # What stands in the old block matters no more.
    _draw(runner, ScheduledSequence(2, 0, 16, [1]), new_sequences=[_new(2, OTHER[:16])])
    sampled.append(_draw(runner, ScheduledSequence(1, 21, 1, [])))
    assert sampled == expected


@pytest.mark.parametrize(
    ("block_ops", "reason"),
    [
        (BlockOps(swap_out=[(0, 0), (6, 1)]), "beyond the 6"),
        (BlockOps(swap_out=[(0, 5)]), "the 5 of the host"),
        (BlockOps(swap_in=[(5, 0)]), "beyond"),
        (BlockOps(swap_in=[(0, 6)]), "beyond"),
        (BlockOps(swap_out=[(0, 1), (2, 1)]), "twice"),
        (BlockOps(swap_in=[(0, 1), (2, 1)]), "twice"),
    ],
)
def test_a_swap_of_a_wrong_block_fails_as_a_whole_and_nothing_else_does(
    block_ops: BlockOps, reason: str, runner: Runner, expected: list[int]
) -> None:
    new, scheduled = _new(1, PROMPT), ScheduledSequence(1, 0, 20, [0, 1])
    outcome = _run(runner, scheduled, new_sequences=[new], block_ops=block_ops)
    (swap,) = outcome.swap_results
    assert reason in (swap.failure or "")
    assert outcome.sequences[0].token_ids == expected[:1]


def test_without_host_blocks_every_swap_fails(tiny_llama: Path) -> None:
    (swap,) = _run(make_runner(tiny_llama), block_ops=BlockOps(swap_out=[(0, 0)])).swap_results
    assert "the 0 of the host" in (swap.failure or "")


@pytest.mark.parametrize("copies", [[(6, 4)], [(0, 4), (1, 4)], [(4, 3), (0, 4)]])
def test_a_copy_that_makes_no_sense_fails_the_sequence_that_stands_on_it(
    copies: BlockPairs, runner: Runner, expected: list[int]
) -> None:
    new = [_new(1, PROMPT), _new(2, PROMPT)]
    scheduled = [ScheduledSequence(1, 0, 20, [4, 5]), ScheduledSequence(2, 0, 20, [0, 1])]
    bad, good = _run(runner, *scheduled, new_sequences=new, block_ops=BlockOps(copies=copies)).sequences
    assert "copy" in (bad.failure or "")
    assert good.token_ids == expected[:1]
    # The block is given out again, and computed anew.
    assert _draw(runner, ScheduledSequence(3, 0, 20, [4, 5]), new_sequences=[_new(3, PROMPT)]) == expected[0]


@pytest.mark.parametrize(("index", "block"), [(2, 3), (0, 6)])
def test_a_wrong_change_of_a_table_fails_its_sequence_alone(index: int, block: int, runner: Runner) -> None:
    new = [_new(1, PROMPT), _new(2, PROMPT)]
    scheduled = [ScheduledSequence(1, 0, 20, [0, 1]), ScheduledSequence(2, 0, 20, [2, 3])]
    _run(runner, *scheduled, new_sequences=new)
    changes = [BlockTableUpdate(1, index, block), BlockTableUpdate(9, 0, 0)]
    decodes = [ScheduledSequence(1, 20, 1, []), ScheduledSequence(2, 20, 1, [])]
    bad, good = _run(runner, *decodes, block_table_updates=changes).sequences
    assert "block" in (bad.failure or "")
    assert len(good.token_ids) == 1


class HeldBlockCopier:
    """Swaps that are done when released, as on a stream of their own."""

    is_synchronous = False

    def __init__(self) -> None:
        self.futures: dict[int, Future[SwapResult]] = {}
        self.copied: list[BlockPairs] = []

    def swap(self, step_id: int, direction: Direction, pairs: BlockPairs) -> "Future[SwapResult]":
        self.futures[step_id] = Future()
        return self.futures[step_id]

    def copy(self, pairs: BlockPairs) -> "Future[None]":
        self.copied.append(pairs)
        done: Future[None] = Future()
        done.set_result(None)
        return done

    def discard(self, block_ids: Sequence[int], host_block_ids: Sequence[int]) -> None:
        """Its memory cannot be returned."""

    def cancel_all(self) -> None:
        self.futures.clear()

    def let_go(self, step_id: int) -> None:
        self.futures[step_id].set_result(SwapResult(step_id, Direction.OUT, 1, 0.5))


@pytest.fixture
def held() -> tuple[Runner, HeldBlockCopier]:
    block_copier = HeldBlockCopier()

    def forward(batch: object) -> torch.Tensor:
        return torch.nn.functional.one_hot(torch.tensor([3]), VOCAB).float()

    return Runner(
        HostExecutor(forward), WorkerLimits(VOCAB, 64, 16, 8, 64, 8, num_host_blocks=8), block_copier
    ), block_copier


Held = tuple[Runner, HeldBlockCopier]
SWAP = BlockOps(swap_out=[(0, 0)])


def test_a_step_does_not_wait_for_its_swap_which_a_later_result_reports(held: Held) -> None:
    runner, block_copier = held
    first = runner.launch(Step([], [_new(1, [5])], [ScheduledSequence(1, 0, 1, [1])], SWAP, step_id=1))
    assert first.is_done()
    assert runner.finish(first).swap_results == []
    block_copier.let_go(1)
    outcome = _run(runner, ScheduledSequence(1, 1, 1, []), step_id=2)
    (swap,) = outcome.swap_results
    assert (swap.step_id, swap.seconds, outcome.stall_seconds) == (1, 0.5, 0)
    assert _run(runner, ScheduledSequence(1, 2, 1, []), step_id=3).swap_results == []


def test_a_step_that_computes_nothing_waits_for_every_transfer_before_it(held: Held) -> None:
    runner, block_copier = held
    _run(runner, ScheduledSequence(1, 0, 1, [1]), new_sequences=[_new(1, [5])], block_ops=SWAP, step_id=1)
    empty = runner.launch(Step([], [], [], BlockOps(swap_out=[(1, 1)]), step_id=2))
    waiter = threading.Thread(target=empty.wait)
    waiter.start()
    block_copier.let_go(2)
    assert not empty.is_done()
    block_copier.let_go(1)
    waiter.join(30)
    assert not waiter.is_alive()
    assert empty.is_done()
    assert [swap.step_id for swap in runner.finish(empty).swap_results] == [1, 2]


def test_no_result_reports_the_swap_of_a_later_step(held: Held) -> None:
    runner, block_copier = held
    first = runner.launch(Step([], [], [], step_id=1))
    second = runner.launch(Step([], [], [], SWAP, step_id=2))
    block_copier.let_go(2)
    assert runner.finish(first).swap_results == []
    assert [swap.step_id for swap in runner.finish(second).swap_results] == [2]


def test_a_reset_forgets_transfers(held: Held) -> None:
    runner, block_copier = held
    _run(runner, ScheduledSequence(1, 0, 1, [1]), new_sequences=[_new(1, [5])], block_ops=SWAP, step_id=1)
    pending = block_copier.futures[1]
    runner.reset()
    pending.set_result(SwapResult(1, Direction.OUT, 1, 0.5))
    assert _run(runner, step_id=2).swap_results == []


def test_a_device_that_is_lost_while_it_swaps_ends_the_step(held: Held) -> None:
    runner, block_copier = held
    empty = runner.launch(Step([], [], [], SWAP, step_id=1))
    block_copier.futures[1].set_exception(torch.AcceleratorError("lost"))
    with pytest.raises(DeviceLost):
        runner.finish(empty)


def _alone(runner: Runner, tokens: list[int]) -> list[list[int]]:
    """What follows tokens, computed without a cache, in two blocks that nothing else uses."""
    return [[_draw(runner, ScheduledSequence(9, 0, len(tokens), [2, 3]), new_sequences=[_new(9, tokens)])]]
