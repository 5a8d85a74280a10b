"""The clock of a modelled worker: steps one after another; copies before the steps or concurrent with them."""

from dataclasses import replace

import pytest

from benchmarks.simulator.device import Device, StepWork
from benchmarks.simulator.machine import CopyMode
from benchmarks.simulator.presets import GPU_8B
from scheduler_svc.core.step import Direction, SwapDone

# A step of n tokens takes n seconds, a block two, and a message half of one.
BESIDE = replace(
    GPU_8B,
    step_seconds=((1, 1.0), (2, 2.0)),
    context_seconds=0.0,
    pair_seconds=0.0,
    block_bytes=2,
    bytes_per_second=1.0,
    transfer_seconds=0.0,
    dispatch_seconds=0.5,
)
BEFORE = replace(BESIDE, copies=CopyMode.BEFORE_THE_STEP)


def test_a_step_waits_for_the_one_before() -> None:
    device = Device(BESIDE)
    assert device.run(1, StepWork(num_prefill_tokens=4), 0.0).at == 0.5 + 4 + 0.5
    assert device.run(2, StepWork(num_decodes=3), 1.0).at == 0.5 + 4 + 3 + 0.5
    assert device.run(3, StepWork(num_decodes=1), 20.0).at == 20.5 + 1 + 0.5
    assert device.busy_seconds == 8


def test_attention_costs_by_what_it_looks_back_on() -> None:
    device = Device(replace(BESIDE, context_seconds=0.1, pair_seconds=0.01))
    done = device.run(1, StepWork(num_prefill_tokens=1, num_decodes=1, num_context=7, num_pairs=30), 0.0)
    assert done.seconds == pytest.approx(2 + 0.7 + 0.3)


def test_copies_before_the_step_delay_it_and_are_confirmed_with_it() -> None:
    device = Device(BEFORE)
    done = device.run(1, StepWork(num_decodes=1, num_blocks_out=2, num_blocks_in=1), 0.0)
    assert done.at == 0.5 + 4 + 2 + 1 + 0.5
    assert done.seconds == 1
    assert done.swaps == (SwapDone(1, Direction.OUT, 4.0), SwapDone(1, Direction.IN, 2.0))


def test_copies_beside_the_steps_delay_none_and_are_confirmed_by_the_first_that_ends_after_them() -> None:
    device = Device(BESIDE)
    assert device.run(1, StepWork(num_decodes=3, num_blocks_in=3), 0.0).swaps == ()  # copies until 6.5
    assert device.run(2, StepWork(num_decodes=2), 0.0).swaps == ()  # ends at 5.5
    done = device.run(3, StepWork(num_decodes=2), 0.0)
    assert done.at == 0.5 + 3 + 2 + 2 + 0.5
    assert done.swaps == (SwapDone(1, Direction.IN, 6.0),)
    assert device.run(4, StepWork(num_decodes=1), 0.0).swaps == ()


def test_a_transfer_out_reads_what_the_steps_before_it_wrote() -> None:
    device = Device(BESIDE)
    device.run(1, StepWork(num_decodes=5), 0.0)  # until 5.5
    assert device.run(2, StepWork(num_decodes=1, num_blocks_out=1), 0.0).swaps == ()  # 6.5; copies 5.5 to 7.5
    assert device.run(3, StepWork(num_decodes=1), 0.0).swaps == (SwapDone(2, Direction.OUT, 2.0),)


def test_transfers_wait_for_each_other() -> None:
    device = Device(BESIDE)
    device.run(1, StepWork(num_decodes=1, num_blocks_in=2), 0.0)  # copies 0.5 to 4.5
    device.run(2, StepWork(num_decodes=1, num_blocks_in=1), 0.0)  # 4.5 to 6.5
    assert device.run(3, StepWork(num_decodes=3), 0.0).swaps == (SwapDone(1, Direction.IN, 4.0),)  # 5.5
    assert device.run(4, StepWork(num_decodes=1), 0.0).swaps == (SwapDone(2, Direction.IN, 2.0),)  # 6.5


def test_a_step_that_computes_nothing_waits_for_all_transfers() -> None:
    device = Device(BESIDE)
    device.run(1, StepWork(num_decodes=1, num_blocks_in=4), 0.0)  # copies until 8.5
    done = device.run(2, StepWork(), 0.0)
    assert (done.at, done.seconds) == (9.0, 0)
    assert done.swaps == (SwapDone(1, Direction.IN, 8.0),)
    assert device.run(3, StepWork(), 10.0).at == 11.0
