"""Decodes of ragged contexts keep a GPU busy, by a model of its waves."""

import numpy as np
import pytest

from benchmarks.aot.targets import TARGETS
from benchmarks.decode_balance.__main__ import RESULT
from benchmarks.decode_balance.waves import (
    CONTEXTS,
    LEAST_BUSY,
    busy,
    choose_num_splits,
    even_programs,
    makespan,
    measure,
    measure_all,
    planned_programs,
    resident_programs,
    splits_on,
)
from benchmarks.record import read_result
from quire_kernels.decode_plan import DecodeSplits


def test_a_program_starts_where_one_ends_first() -> None:
    assert makespan([3, 1, 1, 1], 2) == 3
    assert makespan([1, 1, 1, 3], 2) == 4
    assert makespan([2], 4) == 2


def test_slots_without_a_program_are_not_busy() -> None:
    assert busy([4], 4, 4, merges=False) == 0.25
    assert busy([4, 4, 4, 4], 4, 12, merges=True) == 12 / 20


def test_the_time_of_programs_is_that_of_their_tiles_and_starts() -> None:
    contexts = np.array([64, 640, 1], np.int32)
    # 12 tiles and 3 starts: 15 for one program. Of two, the second one starts the second context again.
    assert planned_programs(DecodeSplits(1, 64), contexts, 2) == [15, 15]
    assert planned_programs(DecodeSplits(2, 64), contexts, 1) == [8, 8]
    assert even_programs(contexts, 2, 64, 1) == [2, 6, 2, 0, 6, 0]


def test_even_splits_follow_the_number_of_sequences_and_the_models_context() -> None:
    assert choose_num_splits(8, 131_072, 264) * 8 > 0.8 * 264
    assert choose_num_splits(512, 8192, 264) == 1
    assert choose_num_splits(1, 256, 264) == 1
    # 265 programs where 264 run at a time would take twice as long as 264.
    assert choose_num_splits(265, 8192, 264) > 1


@pytest.mark.parametrize("name", TARGETS)
def test_all_programs_run_at_the_same_time(name: str) -> None:
    """So that none waits for another; and nearly as many as fit."""
    gpu = TARGETS[name]
    programs = splits_on(gpu).num_shares * 8
    slots = gpu.multiprocessors * resident_programs(gpu)
    assert 0.95 * slots <= programs <= slots


@pytest.mark.parametrize("contexts", CONTEXTS)
@pytest.mark.parametrize("name", TARGETS)
def test_a_gpu_is_busy_whatever_the_contexts(name: str, contexts: str) -> None:
    measured = measure(TARGETS[name], CONTEXTS[contexts])
    assert measured["planned"] >= LEAST_BUSY
    assert measured["planned"] > measured["even_splits"] or contexts == "64 of 8,192"


def test_even_splits_leave_it_idle_beside_a_long_context() -> None:
    assert measure(TARGETS["sm_90"], CONTEXTS["63 of 1,024 and one of 32,768"])["even_splits"] < 0.2


def test_the_committed_figures_are_those_of_this_code() -> None:
    result = read_result(RESULT)
    assert result is not None
    computed = measure_all()
    assert {name: result[name] for name in computed} == computed, "run python -m benchmarks.decode_balance"
