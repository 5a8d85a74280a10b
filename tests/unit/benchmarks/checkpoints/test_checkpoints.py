"""What is judged of checkpoints of other tools, the table, and what the tool's program scores."""

import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from benchmarks.checkpoints import program
from benchmarks.checkpoints.__main__ import PACKAGES
from benchmarks.checkpoints.report import checkpoints_section, targets
from benchmarks.checkpoints.schemes import CHECKPOINTS
from benchmarks.environments import version_of


def checkpoint(quire: float, activations: float | None = None) -> dict[str, Any]:
    about: dict[str, Any] = {"title": "W8A8", "written_by": "a tool", "computed_by": "kernels"}
    figures: dict[str, Any] = {"quantization": "w8a16", "tool": 20.0, "quire": quire}
    if activations is not None:
        figures["activations_too"] = {"quantization": "w8a8", "tool": 20.0, "quire": activations}
    return about | figures


@pytest.mark.parametrize(("quire", "holds"), [(19.8, False), (19.95, True), (20.05, True), (20.2, False)])
def test_a_perplexity_apart_from_the_tools_misses_the_bound(quire: float, holds: bool) -> None:
    assert [one["holds"] for one in targets({"a": checkpoint(20.0), "b": checkpoint(quire)})] == [holds]


def test_with_rounded_activations_a_lower_perplexity_is_no_fault() -> None:
    for activations, holds in ((19.0, True), (20.05, True), (20.2, False)):
        assert [one["holds"] for one in targets({"a": checkpoint(20.0, activations)})] == [True, holds]


def test_the_section_has_a_row_more_where_activations_are_rounded_too() -> None:
    checkpoints = {"a": checkpoint(20.1, 19.0)}
    section = checkpoints_section(
        {
            "date": "2026-11-26T00:00:00",
            "commit": "c" * 40,
            "machine": {"cores": 2, "processor": "P"},
            "model": "tiny",
            "num_tokens": 1_000,
            "packages": {"a-tool": "1.0"},
            "checkpoints": checkpoints,
            "targets": targets(checkpoints),
        }
    )
    assert "tiny, 1,000 tokens; a-tool 1.0; 2026-11-26" in section
    assert "| W8A8 | a tool | kernels | w8a16 | 20.100 | 20.000 | +0.50% |" in section
    assert "| W8A8, activations too | a tool | kernels | w8a8 | 19.000 | 20.000 | -5.00% |" in section


def test_every_checkpoint_has_a_tool_with_a_pinned_version() -> None:
    for one in CHECKPOINTS.values():
        assert one.tool in program.WRITERS
        assert PACKAGES[one.tool] == PACKAGES[one.kernels] == one.environment
    assert all(version_of(environment, package) for package, environment in PACKAGES.items())


def test_only_tokens_behind_the_given_ones_are_scored() -> None:
    def model(input_ids: Tensor) -> SimpleNamespace:
        """The next number is twice as probable as each of the two others."""
        following = torch.nn.functional.one_hot((input_ids + 1) % 3, 3)
        return SimpleNamespace(logits=following * math.log(2))

    assert program.perplexity(model, [([0, 0, 1], 2)]) == pytest.approx(2)
    assert program.perplexity(model, [([0, 0, 1, 1], 2)]) == pytest.approx(math.sqrt(2 * 4))
