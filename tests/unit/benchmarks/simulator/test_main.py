"""The command that runs experiments."""

import json
import sys
from pathlib import Path

import pytest

from benchmarks.report import Cells, Sense
from benchmarks.simulator import __main__ as command
from benchmarks.simulator.scenarios import SCENARIOS
from benchmarks.simulator.scenarios.scenario import Scenario, Target, outcome


def test_the_named_experiments_are_run_and_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    made_up = Scenario(
        "made-up",
        "Made up",
        lambda report: outcome([{"speed": 3}], [Target("speed", 3, Sense.AT_LEAST, 4, ".0f")]),
        lambda result: Cells(("speed",), [[str(row["speed"]) for row in result["rows"]]]),
    )
    monkeypatch.setitem(SCENARIOS, "made-up", made_up)
    monkeypatch.setattr(sys, "argv", ["simulator", "made-up", "--output", str(tmp_path)])
    command.main()
    assert [path.name for path in tmp_path.iterdir()] == ["simulator_made-up.json"]
    result = json.loads((tmp_path / "simulator_made-up.json").read_bytes())
    assert result["rows"] == [{"speed": 3}]
    assert {"date", "commit", "machine"} <= result.keys()
    assert "**speed: 3, target ≥ 4: missed**" in capsys.readouterr().out


def test_an_unknown_experiment_is_named(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(sys, "argv", ["simulator", "luck"])
    with pytest.raises(SystemExit):
        command.main()
    assert "no such experiment: luck" in capsys.readouterr().err
