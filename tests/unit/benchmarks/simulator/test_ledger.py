"""The ledger finds plans that read or write what they should not."""

from dataclasses import replace

import pytest

from benchmarks.simulator.ledger import Ledger, WrongPlan
from benchmarks.simulator.prompts import Token
from scheduler_svc.core.plan import (
    BlockCopy,
    BlockPair,
    Direction,
    Introduction,
    Scheduled,
    StepPlan,
    TableChange,
    TransferDone,
)
from scheduler_svc.core.sequence import Request, Sequence

SIZE = 4
PROMPT = [11, 12, 13, 14, 15, 16]


def sequence(number: int, tokens: list[int]) -> Sequence:
    return Sequence(number, Request(str(number), tokens, 1, 9), 0, number, tokens)


ONE, TWO = sequence(1, PROMPT), sequence(2, [*PROMPT[:4], 99])
NEXT = Token((17,))


def introduced(one: Sequence, block_ids: list[int], start: int = 0) -> StepPlan:
    """A first step that computes all of a prompt from `start` on, and draws."""
    num_tokens = len(one.tokens)
    part = Scheduled(one, start, num_tokens - start, block_ids, start, draws=True)
    return StepPlan(1, [], [Introduction(one, list(one.tokens))], [part])


def following(one: Sequence, start: int, block_ids: list[int] | None = None) -> StepPlan:
    """A step that computes one more token."""
    return StepPlan(2, [], [], [Scheduled(one, start, 1, block_ids or [], start, draws=True)])


@pytest.fixture
def ledger() -> Ledger:
    """Sequence ONE stands in blocks 7 and 8, and has drawn a token."""
    ledger = Ledger(SIZE)
    ledger.take(introduced(ONE, [7, 8]), [NEXT])
    return ledger


def test_a_sequence_goes_on_in_its_blocks(ledger: Ledger) -> None:
    ledger.take(following(ONE, 6), [NEXT])
    ledger.take(following(ONE, 7), [NEXT])
    ledger.take(following(ONE, 8, [3]), [NEXT])


def test_a_shared_block_holds_the_same_beginning(ledger: Ledger) -> None:
    ledger.take(introduced(TWO, [7, 9], start=4), [NEXT])


def test_a_block_of_other_tokens_is_not_a_prefix(ledger: Ledger) -> None:
    other = sequence(3, [21, 22, 23, 24, 25])
    with pytest.raises(WrongPlan, match="block 7 is not what sequence 3 has from token 0 on"):
        ledger.take(introduced(other, [7, 9], start=4), [NEXT])


def test_a_block_that_was_written_over_is_missed(ledger: Ledger) -> None:
    ledger.take(introduced(sequence(3, [21, 22]), [7]), [NEXT])
    with pytest.raises(WrongPlan, match="block 7 is not what sequence 1 has"):
        ledger.take(following(ONE, 6), [NEXT])


def test_a_token_that_is_not_known_cannot_be_computed(ledger: Ledger) -> None:
    with pytest.raises(WrongPlan, match="sequence 1 has 7 tokens, not 8"):
        ledger.take(following(ONE, 7), [NEXT])


def test_a_skipped_token_is_missed(ledger: Ledger) -> None:
    skipping = Scheduled(ONE, 6, 1, [], store_start=7, draws=True)
    with pytest.raises(WrongPlan, match="block 8 is not what sequence 1 has from token 4 on"):
        ledger.take(StepPlan(2, [], [], [skipping]), [NEXT])


OUT = StepPlan(2, [1], [], [], swap_out=[BlockPair(7, 0), BlockPair(8, 1)])
IN = StepPlan(3, [], [], [], swap_in=[BlockPair(5, 0), BlockPair(6, 1)])
BACK = StepPlan(4, [], [Introduction(ONE, [*PROMPT, 17])], [Scheduled(ONE, 6, 1, [5, 6], 6, draws=True)])


def test_what_went_to_the_host_comes_back_as_it_was(ledger: Ledger) -> None:
    ledger.take(OUT, [])
    ledger.confirm([TransferDone(2, Direction.OUT, 1.0)])
    ledger.take(introduced(sequence(3, [21, 22, 23, 24, 25]), [7, 8]), [NEXT])
    ledger.take(IN, [])
    ledger.confirm([TransferDone(3, Direction.IN, 1.0)])
    ledger.take(BACK, [NEXT])


def test_what_a_copy_reads_is_not_written_before_it_is_done(ledger: Ledger) -> None:
    ledger.take(OUT, [])
    with pytest.raises(WrongPlan, match="writes block 7, which a copy of step 2 is not done with"):
        ledger.take(introduced(sequence(3, [21, 22]), [7]), [NEXT])


def test_what_a_copy_writes_is_not_read_before_it_is_done(ledger: Ledger) -> None:
    ledger.take(OUT, [])
    ledger.take(IN, [])
    with pytest.raises(WrongPlan, match=r"block \d, which a copy of step 3 is not done with"):
        ledger.take(BACK, [NEXT])


def test_nothing_comes_from_a_host_block_that_holds_nothing(ledger: Ledger) -> None:
    with pytest.raises(WrongPlan, match="host block 0 holds nothing"):
        ledger.take(IN, [])


def test_a_table_changes_only_to_a_block_that_holds_the_same(ledger: Ledger) -> None:
    ledger.take(introduced(TWO, [2, 3]), [NEXT])
    ledger.take(StepPlan(2, [], [], [], table_changes=[TableChange(2, 0, 7)]), [])
    with pytest.raises(WrongPlan, match="block 8 does not hold what block 3 does"):
        ledger.take(StepPlan(3, [], [], [], table_changes=[TableChange(2, 1, 8)]), [])


def test_a_copy_within_the_device_can_be_gone_on_in(ledger: Ledger) -> None:
    sibling = sequence(4, [*PROMPT, 30])
    plan = replace(introduced(sibling, [7, 4], start=6), copies=[BlockCopy(8, 4)])
    ledger.take(plan, [NEXT])
