"""Sequences with penalties have their token counts in slots, which are reused."""

import weakref

import numpy as np
import pytest
import torch

from worker_svc.gpu.penalty_slots import PenaltySlots
from worker_svc.sequences import Sequence
from worker_svc.step import NewSequence, SamplingParams

VOCAB = 6
PENALIZED = SamplingParams(presence_penalty=0.5)


def _sequence(tokens: list[int], prompt_length: int = 1, params: SamplingParams = PENALIZED) -> Sequence:
    return Sequence(NewSequence(0, tokens, prompt_length, 0, params))


@pytest.fixture
def slots(device: torch.device) -> PenaltySlots:
    return PenaltySlots(2, VOCAB, device, lambda array: torch.from_numpy(array).to(device))


def _counts(slots: PenaltySlots, slot: np.int64) -> list[int]:
    counts: list[int] = (slots.token_counts[slot] & 0x7FFFFFFF).tolist()
    return counts


def test_only_what_has_penalties_has_a_slot(slots: PenaltySlots) -> None:
    every = [SamplingParams(), SamplingParams(repetition_penalty=1.1), SamplingParams(frequency_penalty=-1.0)]
    plain, first, second = slots.of([_sequence([1], params=params) for params in every])
    assert plain == -1
    assert sorted([first, second]) == [0, 1]


def test_a_slot_begins_with_the_tokens_that_are_known(slots: PenaltySlots) -> None:
    (slot,) = slots.of([_sequence([1, 2, 3, 3], prompt_length=2)])
    assert _counts(slots, slot) == [0, 0, 0, 2, 0, 0]
    assert (slots.token_counts[slot] < 0).tolist() == [False, True, True, False, False, False]


def test_a_sequence_keeps_its_slot_and_what_was_counted_there(slots: PenaltySlots) -> None:
    sequence = _sequence([1, 2])
    (slot,) = slots.of([sequence])
    slots.token_counts[slot, 5] += 1
    sequence.append_placeholder(-1)
    assert slots.of([_sequence([1]), sequence])[1] == slot
    assert _counts(slots, slot) == [0, 0, 1, 0, 0, 1]


def test_the_least_recently_used_slot_is_reused(slots: PenaltySlots) -> None:
    first, second, third = (_sequence([token]) for token in (1, 2, 3))
    (of_first,) = slots.of([first])
    (of_second,) = slots.of([second])
    slots.of([first])
    assert slots.of([third]) == of_second
    assert slots.of([first]) == of_first
    # It comes back, with what it has drawn since
    second.append_placeholder(-1)
    second.fill_placeholder(1, 4)
    assert slots.of([first, second]).tolist() == [of_first, of_second]
    assert _counts(slots, of_second) == [0, 0, 0, 0, 1, 0]


def test_a_sequence_that_has_ended_is_not_kept_and_leaves_its_slot(slots: PenaltySlots) -> None:
    ended, running = _sequence([1]), _sequence([2])
    of_ended, of_running = slots.of([ended, running])
    known = weakref.ref(ended)
    del ended
    assert known() is None
    assert slots.of([_sequence([3])]) == of_ended
    assert slots.of([running]) == of_running
    assert _counts(slots, of_running) == [0] * VOCAB


def test_no_slot_of_the_current_step_is_reused(slots: PenaltySlots) -> None:
    first, second, third = (_sequence([token]) for token in (1, 2, 3))
    slots.of([first, second])
    assert len(set(slots.of([third, first]))) == 2
    assert len(set(slots.of([second, third]))) == 2


def test_counts_are_never_filled_with_a_token_that_is_not_known(slots: PenaltySlots) -> None:
    sequence = _sequence([1])
    sequence.append_placeholder(-1)
    with pytest.raises(RuntimeError, match="promised"):
        slots.of([sequence])
