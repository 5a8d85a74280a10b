"""Sampling inputs: columns for all rows, entries for the logits that a request changes."""

import numpy as np

from worker_svc.gpu.sampling import LogitEntryLists, sampling_columns
from worker_svc.sequences import Sequence
from worker_svc.step import NewSequence, SamplingParams

INF = float("inf")


def _sequence(params: SamplingParams, num_generated: int = 0, index: int = 0) -> Sequence:
    return Sequence(NewSequence(0, [0] * (2 + num_generated), 2, index, params))


def _entries(lists: LogitEntryLists, *sequences: Sequence) -> set[tuple[int, int, float]]:
    rows, tokens, values = lists.of(list(sequences), [len(sequence.tokens) for sequence in sequences])
    assert [column.dtype.name for column in (rows, tokens, values)] == ["int32", "int32", "float32"]
    entries = list(zip(rows.tolist(), tokens.tolist(), values.tolist(), strict=True))
    assert len(set(entries)) == len(entries)
    return set(entries)


def test_columns_hold_the_sampling_inputs_of_each_row_and_are_padded() -> None:
    params = SamplingParams(temperature=0.5, top_p=0.9, top_k=2**40, min_p=0.25, presence_penalty=-1.0,
                            frequency_penalty=0.75, repetition_penalty=1.5, seed=-2)  # fmt: skip
    columns = sampling_columns([_sequence(params, num_generated=3, index=7)], [5], np.array([4]), 3)
    assert [column[0].item() for column in columns] == [
        0.5, 2**31 - 1, 0.9, 0.25, -2, 7, 5, 4, 1.5, 0.75, -1.0,
    ]  # fmt: skip
    assert all(len(column) == 3 for column in columns)
    assert [column[2].item() for column in columns] == [0.0, 0, 1.0, 0.0, 0, 0, 0, -1, 1.0, 0.0, 0.0]


def test_bias_is_entered_for_its_row() -> None:
    biased = SamplingParams(logit_bias={3: 1.5, 4: -2.0})
    assert _entries(LogitEntryLists(), _sequence(SamplingParams()), _sequence(biased)) == {(1, 3, 1.5), (1, 4, -2.0)}


def test_tokens_are_suppressed_until_there_are_enough_and_named_once() -> None:
    params = SamplingParams(logit_bias={3: 1.5, 4: -2.0}, min_tokens=2, suppressed_token_ids=(9, 3, 9))
    lists, sequence = LogitEntryLists(), _sequence(params, num_generated=1)
    assert _entries(lists, sequence) == {(0, 4, -2.0), (0, 3, -INF), (0, 9, -INF)}
    sequence.append_placeholder(-1)
    assert _entries(lists, sequence) == {(0, 3, 1.5), (0, 4, -2.0)}


def test_rows_of_a_draft_have_the_entries_of_their_positions() -> None:
    params = SamplingParams(logit_bias={4: -2.0}, min_tokens=2, suppressed_token_ids=(9,))
    sequence = _sequence(params, num_generated=1)
    rows, tokens, _ = LogitEntryLists().of([sequence] * 3, [3, 4, 5])
    assert list(zip(rows.tolist(), tokens.tolist(), strict=True)) == [(0, 4), (0, 9), (1, 4), (2, 4)]


def test_there_may_be_nothing_to_enter() -> None:
    assert _entries(LogitEntryLists()) == set()
    assert _entries(LogitEntryLists(), _sequence(SamplingParams(min_tokens=3))) == set()
