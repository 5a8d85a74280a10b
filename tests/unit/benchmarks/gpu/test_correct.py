"""Every op is compared with a reference, and a wrong one is found."""

import importlib
import json
import os
import pkgutil
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor

import quire_kernels
from benchmarks.gpu import correct
from benchmarks.gpu.correct import OP_ERROR, all_checks
from benchmarks.gpu.op_call import Arguments, OpCall
from benchmarks.gpu.tests import PYTHON_PATH, module_path
from benchmarks.record import ROOT

# Attention and its merge are named by their kind of step; copies between device and host are an op each.
OTHER_NAMES = {"paged_decode": "decode", "paged_attention": "prefill"}


def _ops() -> Iterator[str]:
    """The functions that have a reference."""
    for module in pkgutil.iter_modules(quire_kernels.__path__, "quire_kernels."):
        if not module.ispkg:
            names = [name for name in vars(importlib.import_module(module.name)) if name.endswith("_reference")]
            yield from (name.removesuffix("_reference") for name in names if not name.startswith(("_", "attend")))


def test_every_op_is_checked() -> None:
    checks = [check.name for check in all_checks(torch.device("cpu"), small=True)]
    names = {re.split(r"[:, ]", check)[0] for check in checks}
    assert {name for name in _ops() if OTHER_NAMES.get(name, name) not in names} == set()


def test_processes_share_the_checks(tmp_path: Path) -> None:
    output = tmp_path / "correct.json"
    command = [sys.executable, "-m", "benchmarks.gpu.correct", "--dry-run", "--only", "logits", "--processes", "2"]
    environment = {**os.environ, "PYTHONPATH": module_path(PYTHON_PATH)}
    subprocess.run([*command, "--output", output], cwd=ROOT, env=environment, check=True)
    checks = json.loads(output.read_text())["checks"]
    assert [check["name"] for check in checks] == ["adjust_logits", "mask_logits", "logits_epilogue"]


def test_a_process_that_ends_leaves_no_check_without_a_row(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(correct, "_run_check", _die)
    rows = dict(correct._rows(True, "logits", 2))
    assert sorted(rows) == [0, 1, 2]
    assert all(not row["holds"] and "BrokenProcessPool" in row["failure"] for row in rows.values())


def _die(number: int, small: bool, only: str) -> dict[str, object]:
    os._exit(1)


def _doubled(factor: float) -> Callable[[Tensor], Tensor]:
    return lambda numbers: numbers * (2.0 * factor)


def _double_in_place(factor: float) -> Callable[[Tensor], None]:
    def double(numbers: Tensor) -> None:
        numbers *= 2.0 * factor

    return double


@pytest.mark.parametrize("make_op", [_doubled, _double_in_place])
@pytest.mark.parametrize("factor", [1.0, 1.02])
def test_a_difference_in_a_result_or_an_argument_is_found(
    factor: float, make_op: Callable[[float], Callable[[Tensor], object]]
) -> None:
    numbers = torch.cat([torch.randn(9), torch.tensor([float("-inf"), float("nan")])])
    call = OpCall("op", make_op(factor), make_op(1.0), lambda: ((numbers.clone(),), {}))
    assert (call.error() > OP_ERROR) == (factor != 1.0)


@pytest.mark.parametrize("number", [float("inf"), float("nan"), 0.0])
def test_a_number_that_is_not_finite_must_be_the_same(number: float) -> None:
    def with_number(numbers: Tensor) -> Tensor:
        return torch.cat([numbers, torch.tensor([number])])

    call = OpCall("op", with_number, lambda numbers: torch.cat([numbers, torch.tensor([float("-inf")])]), _numbers)
    with pytest.raises(ValueError, match="numbers that are not finite"):
        call.error()


def _numbers() -> Arguments:
    return (torch.randn(9),), {}
