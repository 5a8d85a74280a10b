"""The command that simulates one load."""

import json
import sys
from pathlib import Path
from xml.etree import ElementTree

import pytest

from benchmarks.simulator import run
from benchmarks.simulator.arrivals import Arrival, OpenLoop
from benchmarks.simulator.driver import Setup
from benchmarks.simulator.figures import run_figures
from benchmarks.simulator.presets import GPU_8B
from benchmarks.simulator.run import class_table, run_lines, tenant_table
from benchmarks.simulator.simulation import Simulation


def command(monkeypatch: pytest.MonkeyPatch, *flags: str) -> None:
    monkeypatch.setattr(sys, "argv", ["run", *flags])
    run.main()


FLAGS = ("--rate", "50", "--prompt", "16-64", "--generate", "8", "--requests", "30")


def test_a_run_is_printed_written_and_plotted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    command(monkeypatch, *FLAGS, "--result", str(tmp_path / "r.json"), "--plot", str(tmp_path / "r.svg"))
    result = json.loads((tmp_path / "r.json").read_bytes())
    assert (result["num_finished"], result["generated_tokens"], result["policy"]) == (30, 240, "fair")
    assert "30 of 30 requests finished" in capsys.readouterr().out
    ElementTree.parse(tmp_path / "r.svg")


def test_what_is_recorded_replays_as_it_ran(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    recording = tmp_path / "recording.jsonl"
    command(monkeypatch, *FLAGS, "--record", str(recording))
    command(monkeypatch, *FLAGS, "--result", str(tmp_path / "drawn.json"))
    command(monkeypatch, "--recording", str(recording), "--result", str(tmp_path / "replayed.json"))
    drawn, replayed = (json.loads((tmp_path / name).read_bytes()) for name in ("drawn.json", "replayed.json"))
    assert {**drawn, "date": None} == {**replayed, "date": None}


def test_clients_send_one_after_the_other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    command(monkeypatch, *FLAGS, "--clients", "1", "--result", str(tmp_path / "r.json"))
    result = json.loads((tmp_path / "r.json").read_bytes())
    assert result["classes"][0]["queued"]["p99"] == 0.0


def test_streams_come_from_a_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    streams = tmp_path / "streams.json"
    entries = [{"tenant": name, "rate": 10, "prompt": [16, 16], "output": [4, 4]} for name in ("a", "b")]
    streams.write_text(json.dumps(entries))
    command(monkeypatch, "--streams", str(streams), "--requests", "40", "--result", str(tmp_path / "r.json"))
    result = json.loads((tmp_path / "r.json").read_bytes())
    assert set(result["tenants"]) == {"a", "b"}
    assert sum(result["tenants"].values()) == 40 * 20


def test_what_cannot_be_used_ends_it_with_a_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(SystemExit, match="neither a file nor one of"):
        command(monkeypatch, "--machine", "abacus")


def test_tenants_are_counted_in_a_window_and_plans_checked(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    command(monkeypatch, *FLAGS, "--check", "--window", "0-100")
    out = capsys.readouterr().out
    assert "Tenants, from 0 to 100 s" in out
    assert "100.0%" in out


def test_a_run_is_shown_by_class_and_tenant() -> None:
    simulation = Simulation(
        Setup(GPU_8B),
        OpenLoop([Arrival(0.0, 16, 4, 4, "a"), Arrival(0.0, 50_000, 4, 4, "b"), Arrival(0.0, 16, 44, 44, "b", 1.0, 1)]),
    )
    simulation.run()
    figures = run_figures(simulation)
    assert [row[:2] for row in class_table(figures).rows] == [["1", "1"], ["0", "2"]]
    assert tenant_table(figures.tenants).rows == [["a", "20", "25.0%"], ["b", "60", "75.0%"]]
    first, *_ = run_lines(figures)
    assert first.startswith("2 of 3 requests finished")
    assert first.endswith("failed: 1 CONTEXT_LENGTH_EXCEEDED")
