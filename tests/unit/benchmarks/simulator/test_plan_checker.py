"""The checker rejects plans that read or write wrong blocks."""

from dataclasses import replace

import pytest

from benchmarks.simulator.plan_checker import InvalidPlan, PlanChecker
from benchmarks.simulator.prompts import Token
from scheduler_svc.core.request import Request, Sequence
from scheduler_svc.core.step import (
    BlockCopy,
    BlockPair,
    BlockTableUpdate,
    Direction,
    NewSequence,
    ScheduledSequence,
    StepPlan,
    SwapDone,
)

SIZE = 4
PROMPT = [11, 12, 13, 14, 15, 16]


def sequence(number: int, tokens: list[int]) -> Sequence:
    return Sequence(number, Request(str(number), tokens, 1, 9), 0, number, tokens)


ONE, TWO = sequence(1, PROMPT), sequence(2, [*PROMPT[:4], 99])
NEXT = Token((17,))


def introduced(one: Sequence, block_ids: list[int], start: int = 0) -> StepPlan:
    """A first step that computes all of a prompt from `start` on, and samples."""
    num_tokens = len(one.tokens)
    part = ScheduledSequence(one, start, num_tokens - start, block_ids, start, samples=True)
    return StepPlan(1, [], [NewSequence(one, list(one.tokens))], [part])


def following(one: Sequence, start: int, block_ids: list[int] | None = None) -> StepPlan:
    """A step that computes one more token."""
    return StepPlan(2, [], [], [ScheduledSequence(one, start, 1, block_ids or [], start, samples=True)])


@pytest.fixture
def ledger() -> PlanChecker:
    """Sequence ONE has blocks 7 and 8, and has sampled a token."""
    ledger = PlanChecker(SIZE)
    ledger.apply(introduced(ONE, [7, 8]), [NEXT])
    return ledger


def test_a_sequence_goes_on_in_its_blocks(ledger: PlanChecker) -> None:
    ledger.apply(following(ONE, 6), [NEXT])
    ledger.apply(following(ONE, 7), [NEXT])
    ledger.apply(following(ONE, 8, [3]), [NEXT])


def test_a_shared_block_holds_the_same_beginning(ledger: PlanChecker) -> None:
    ledger.apply(introduced(TWO, [7, 9], start=4), [NEXT])


def test_a_block_of_other_tokens_is_not_a_prefix(ledger: PlanChecker) -> None:
    other = sequence(3, [21, 22, 23, 24, 25])
    with pytest.raises(InvalidPlan, match="block 7 is not what sequence 3 has from token 0 on"):
        ledger.apply(introduced(other, [7, 9], start=4), [NEXT])


def test_a_block_that_was_written_over_is_missed(ledger: PlanChecker) -> None:
    ledger.apply(introduced(sequence(3, [21, 22]), [7]), [NEXT])
    with pytest.raises(InvalidPlan, match="block 7 is not what sequence 1 has"):
        ledger.apply(following(ONE, 6), [NEXT])


def test_a_token_that_is_not_known_cannot_be_computed(ledger: PlanChecker) -> None:
    with pytest.raises(InvalidPlan, match="sequence 1 has 7 tokens, not 8"):
        ledger.apply(following(ONE, 7), [NEXT])


def test_a_skipped_token_is_missed(ledger: PlanChecker) -> None:
    skipping = ScheduledSequence(ONE, 6, 1, [], num_cached_tokens=7, samples=True)
    with pytest.raises(InvalidPlan, match="block 8 is not what sequence 1 has from token 4 on"):
        ledger.apply(StepPlan(2, [], [], [skipping]), [NEXT])


OUT = StepPlan(2, [1], [], [], swap_out=[BlockPair(7, 0), BlockPair(8, 1)])
IN = StepPlan(3, [], [], [], swap_in=[BlockPair(5, 0), BlockPair(6, 1)])
BACK = StepPlan(4, [], [NewSequence(ONE, [*PROMPT, 17])], [ScheduledSequence(ONE, 6, 1, [5, 6], 6, samples=True)])


def test_what_went_to_the_host_comes_back_as_it_was(ledger: PlanChecker) -> None:
    ledger.apply(OUT, [])
    ledger.confirm([SwapDone(2, Direction.OUT, 1.0)])
    ledger.apply(introduced(sequence(3, [21, 22, 23, 24, 25]), [7, 8]), [NEXT])
    ledger.apply(IN, [])
    ledger.confirm([SwapDone(3, Direction.IN, 1.0)])
    ledger.apply(BACK, [NEXT])


def test_what_a_copy_reads_is_not_written_before_it_is_done(ledger: PlanChecker) -> None:
    ledger.apply(OUT, [])
    with pytest.raises(InvalidPlan, match="writes block 7, which a copy of step 2 is not done with"):
        ledger.apply(introduced(sequence(3, [21, 22]), [7]), [NEXT])


def test_what_a_copy_writes_is_not_read_before_it_is_done(ledger: PlanChecker) -> None:
    ledger.apply(OUT, [])
    ledger.apply(IN, [])
    with pytest.raises(InvalidPlan, match=r"block \d, which a copy of step 3 is not done with"):
        ledger.apply(BACK, [NEXT])


def test_nothing_comes_from_a_host_block_that_holds_nothing(ledger: PlanChecker) -> None:
    with pytest.raises(InvalidPlan, match="host block 0 holds nothing"):
        ledger.apply(IN, [])


def test_a_table_changes_only_to_a_block_that_holds_the_same(ledger: PlanChecker) -> None:
    ledger.apply(introduced(TWO, [2, 3]), [NEXT])
    ledger.apply(StepPlan(2, [], [], [], block_table_updates=[BlockTableUpdate(2, 0, 7)]), [])
    with pytest.raises(InvalidPlan, match="block 8 does not hold what block 3 does"):
        ledger.apply(StepPlan(3, [], [], [], block_table_updates=[BlockTableUpdate(2, 1, 8)]), [])


def test_a_copy_within_the_device_can_be_gone_on_in(ledger: PlanChecker) -> None:
    sibling = sequence(4, [*PROMPT, 30])
    plan = replace(introduced(sibling, [7, 4], start=6), copies=[BlockCopy(8, 4)])
    ledger.apply(plan, [NEXT])
