"""Tables of modelled workers: straight lines between points, and what a file may change."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks.simulator.machine import CopyMode, MachineError, machine_to_json, read_machine
from benchmarks.simulator.presets import GPU_8B, MACHINES

MACHINE = replace(GPU_8B, step_seconds=((1, 1.0), (11, 2.0), (31, 6.0)))


@pytest.mark.parametrize(("num_tokens", "seconds"), [(0, 0.0), (1, 1.0), (6, 1.5), (11, 2.0), (21, 4.0), (41, 8.0)])
def test_a_step_takes_what_the_lines_between_points_say(num_tokens: int, seconds: float) -> None:
    assert MACHINE.compute_seconds(num_tokens) == pytest.approx(seconds)


def test_a_copy_takes_its_bytes_and_something_for_itself() -> None:
    machine = replace(MACHINE, block_bytes=10, bytes_per_second=5.0, transfer_seconds=0.5)
    assert machine.copy_seconds(3) == 6.5
    assert machine.copy_seconds(0) == 0.0


def test_the_rate_of_prompts_is_that_of_a_full_step_or_of_one_of_the_usual_size() -> None:
    machine = replace(MACHINE, max_step_tokens=31, pair_seconds=0.01)
    assert machine.prefill_tokens_per_second == pytest.approx(31 / (6.0 + 0.01 * 31 * 31 / 2))
    usual = replace(machine, usual_step_tokens=11)
    assert usual.prefill_tokens_per_second == pytest.approx(11 / (2.0 + 0.01 * 11 * 11 / 2))


@pytest.mark.parametrize("points", [((1, 1.0),), ((5, 1.0), (2, 2.0)), ((2, 1.0), (2, 2.0))])
def test_points_must_rise(points: tuple[tuple[int, float], ...]) -> None:
    with pytest.raises(MachineError, match="step_seconds"):
        replace(MACHINE, step_seconds=points)


def test_a_file_has_the_differences_from_a_preset(tmp_path: Path) -> None:
    path = tmp_path / "mine.json"
    path.write_text(json.dumps({"like": "gpu-8b", "name": "mine", "num_blocks": 7, "copies": "before the step"}))
    assert read_machine(str(path), MACHINES) == replace(
        GPU_8B, name="mine", num_blocks=7, copies=CopyMode.BEFORE_THE_STEP
    )


@pytest.mark.parametrize("name", MACHINES)
def test_a_preset_that_is_written_can_be_read(name: str, tmp_path: Path) -> None:
    path = tmp_path / "written.json"
    path.write_text(json.dumps({"like": "gpu-8b", **machine_to_json(MACHINES[name])}))
    assert read_machine(str(path), MACHINES) == MACHINES[name] == read_machine(name, MACHINES)


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("[]", "not a table"),
        ("{}", "not a table"),
        ('{"like": "gpu-8b", "blocks": 3}', "does not know blocks"),
        ('{"like": "gpu-8b", "copies": "never"}', "not a table"),
    ],
)
def test_a_file_that_is_no_table_is_refused(text: str, reason: str, tmp_path: Path) -> None:
    path = tmp_path / "wrong.json"
    path.write_text(text)
    with pytest.raises(MachineError, match=reason):
        read_machine(str(path), MACHINES)


def test_the_error_of_an_unknown_name_lists_the_known_ones() -> None:
    with pytest.raises(MachineError, match="neither a file nor one of cpu-smollm, gpu-8b, slow-bus"):
        read_machine("gpu-9b", MACHINES)
