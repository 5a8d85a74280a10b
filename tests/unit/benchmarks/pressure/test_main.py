"""Flags, and when the result file is replaced."""

import sys
from pathlib import Path

import pytest

from benchmarks.pressure import __main__ as program
from benchmarks.pressure.loads import REGIMES, Regime
from benchmarks.pressure.report import LoadRun, LongPromptFigures, LongPromptRun, RegimeFigures, SwapRates
from benchmarks.record import read_result
from svc_common.models import ServedModel


class Measurements:
    """Replaces the measurements on the model."""

    def __init__(self) -> None:
        self.regimes: list[tuple[Regime, int]] = []
        self.prompts: list[tuple[int, int]] = []

    def regime(self, regime: Regime, num_runs: int) -> RegimeFigures:
        self.regimes.append((regime, num_runs))
        runs = {mode: [LoadRun(1.0, 9, 8, 7)] * num_runs for mode in ("auto", "swap", "recompute")}
        return RegimeFigures(runs, SwapRates(1e9, 1e9, 0.001, 0.004, 4000.0))

    def long_prompt(self, prompt_tokens: int, num_runs: int) -> LongPromptFigures:
        self.prompts.append((prompt_tokens, num_runs))
        return LongPromptFigures([LongPromptRun(0.01, 0.02, 0.02, 0.03, 1.0, 2.0)] * num_runs)


@pytest.fixture
def measurements(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Measurements:
    measured = Measurements()
    monkeypatch.setattr(program, "measure_regime", measured.regime)
    monkeypatch.setattr(program, "measure_long_prompt", measured.long_prompt)
    monkeypatch.setattr(program, "prepare_model", lambda: ServedModel("tiny", tmp_path))
    monkeypatch.setattr(program, "RESULT", tmp_path / "pressure.json")
    return measured


def run(monkeypatch: pytest.MonkeyPatch, *flags: str) -> None:
    monkeypatch.setattr(sys, "argv", ["pressure", *flags])
    program.main()


def test_the_whole_is_kept(
    measurements: Measurements, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run(monkeypatch)
    result = read_result(program.RESULT)
    assert result is not None
    assert measurements.regimes == [(regime, 5) for regime in REGIMES]
    assert measurements.prompts == [(6000, 5)]
    assert list(result["regimes"]) == ["short", "long", "shared"]
    assert [target["holds"] for target in result["targets"]] == [True] * 6
    assert {"date", "commit", "machine", "model", "num_runs", "long_prompt"} <= result.keys()
    assert "target ≥ 20" in capsys.readouterr().out


@pytest.mark.parametrize("flags", [("--quick",), ("--parts", "choice"), ("--parts", "long-prompt")])
def test_less_than_the_whole_is_not_kept(
    measurements: Measurements, monkeypatch: pytest.MonkeyPatch, flags: tuple[str, ...]
) -> None:
    run(monkeypatch, *flags)
    assert not program.RESULT.exists()


def test_a_quick_pass_is_smaller_and_runs_once(measurements: Measurements, monkeypatch: pytest.MonkeyPatch) -> None:
    run(monkeypatch, "--quick")
    assert all(
        small.num_requests < regime.num_requests and count == 1
        for (small, count), regime in zip(measurements.regimes, REGIMES, strict=True)
    )
    assert measurements.prompts == [(program.QUICK_PROMPT_TOKENS, 1)]


def test_an_unknown_part_is_rejected(
    measurements: Measurements, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        run(monkeypatch, "--parts", "choice,beams")
    assert "no such part: beams" in capsys.readouterr().err
    assert measurements.regimes == []
