"""Turns, flags, and when the result file is replaced. Deployments and their targets are scripted."""

import sys
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from itertools import count
from pathlib import Path

import pytest

from benchmarks.deployment import Deployment
from benchmarks.record import read_result
from benchmarks.security import __main__ as program
from benchmarks.security.report import FigurePair, StreamFigures
from benchmarks.security.variants import NUM_TENANTS, Part, ProcessorSeconds, Protocol, RunningVariant, make_variants
from paced_target import Paced
from quire_client.bench.targets import BenchTarget
from svc_common.models import ServedModel
from tiny_model import tiny_tokenizer

Prompt = tuple[int, ...]


async def test_both_deployments_get_the_same_new_prompts_and_take_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    runs: list[tuple[str, Protocol, list[Prompt]]] = []
    idle: list[str] = []

    @asynccontextmanager
    async def targets(running: RunningVariant, protocol: Protocol) -> AsyncIterator[list[BenchTarget]]:
        paced = Paced()
        yield [paced] * NUM_TENANTS
        assert not paced.open
        runs.append((running.variant.title, protocol, paced.prompts))

    async def wait_until_idle(running: RunningVariant) -> None:
        idle.append(running.variant.title)

    monkeypatch.setattr(RunningVariant, "targets", targets)
    seconds = (ProcessorSeconds(gateway=float(i), scheduler=float(2 * i)) for i in count())
    monkeypatch.setattr(RunningVariant, "processor_seconds", lambda running: next(seconds))
    monkeypatch.setattr(program, "wait_until_idle", wait_until_idle)
    # Scripted streams do not wait for a model: they must not end while a thread reads the scripted time.
    monkeypatch.setattr(program, "_SPARE_TOKENS", 10**7)
    deployment = Deployment("http", "gateway", "worker", "scheduler", "worker", "gateway", None)
    without, with_parts = (RunningVariant(variant, deployment, None) for variant in make_variants([Part.LIMITS]))
    prompts = program.Prompts(tiny_tokenizer())
    pairs = await program.measure_start(without, with_parts, prompts, range(2, 4), num_tokens=5)

    assert {protocol: len(found) for protocol, found in pairs.items()} == {"gRPC": 2, "HTTP": 2}
    assert all(0 < pair.without.inter_token_p50 <= pair.without.inter_token_p99 for pair in pairs["gRPC"])
    assert all(pair.without.scheduler_cpu == pytest.approx(2 * pair.without.gateway_cpu) for pair in pairs["HTTP"])
    # Three readings from before the requests until after them, and one between those around the measured tokens.
    num_decoded = program.NUM_STREAMS * (program.LEAD_TOKENS + 5)
    for found in pairs["gRPC"]:
        assert found.with_parts.gateway_request_cpu <= 3 / num_decoded
        assert found.with_parts.gateway_cpu > found.with_parts.gateway_request_cpu / 3
    assert idle == [title for title, _, _ in runs]
    warm_ups, measured = runs[:4], runs[4:]
    assert [title for title, _, _ in warm_ups] == ["without limits", "with limits"] * 2
    first, second = ["with limits", "without limits"], ["without limits", "with limits"]
    assert [title for title, _, _ in measured] == [*first, *first, *second, *second]
    assert all(before[1:] == after[1:] for before, after in zip(measured[::2], measured[1::2], strict=True))
    for variant in ("with limits", "without limits"):
        sent = [prompt for title, _, prompts in runs for prompt in prompts if title == variant]
        assert len(set(sent)) == len(sent) == 6 * program.NUM_STREAMS
        assert {len(prompt) for prompt in sent} == {program.PROMPT_TOKENS}


class Measurements:
    """Replaces the measurement on the model."""

    def __init__(self) -> None:
        self.calls: list[tuple[list[Part], int, int, int]] = []

    def measure(
        self, model: ServedModel, parts: Sequence[Part], num_starts: int, num_pairs: int, num_tokens: int
    ) -> dict[str, list[FigurePair]]:
        self.calls.append(([*parts], num_starts, num_pairs, num_tokens))
        figures = StreamFigures(0.02, 0.03, 3000.0, 1e-4, 5e-5, 2e-4)
        return {protocol: [FigurePair(figures, figures)] * num_starts * num_pairs for protocol in Protocol}


@pytest.fixture
def measurements(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Measurements:
    measured = Measurements()
    monkeypatch.setattr(program, "measure", measured.measure)
    monkeypatch.setattr(program, "prepare_model", lambda: ServedModel("tiny", tmp_path))
    monkeypatch.setattr(program, "RESULT", tmp_path / "security.json")
    return measured


def run(monkeypatch: pytest.MonkeyPatch, *flags: str) -> None:
    monkeypatch.setattr(sys, "argv", ["security", *flags])
    program.main()


def test_the_whole_is_kept(
    measurements: Measurements, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run(monkeypatch)
    assert measurements.calls == [([Part.TLS, Part.LIMITS], 4, 3, 256)]
    result = read_result(program.RESULT)
    assert result is not None
    assert {"date", "commit", "machine", "model", "num_streams", "num_tenants"} <= result.keys()
    assert (result["command"], result["num_pairs"]) == ("python -m benchmarks.security", 12)
    assert [target["holds"] for target in result["targets"]] == [True, False, True, False]
    assert "gRPC: inter-token p99, ratio: 1, target ≤ 1.05" in capsys.readouterr().out


@pytest.mark.parametrize("flags", [("--parts", "tls"), ("--pairs", "1"), ("--starts", "1"), ("--tokens", "10")])
def test_less_than_the_whole_is_not_kept(
    measurements: Measurements, monkeypatch: pytest.MonkeyPatch, flags: tuple[str, ...]
) -> None:
    run(monkeypatch, *flags)
    assert len(measurements.calls) == 1
    assert not program.RESULT.exists()


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (("--parts", "tls,beams"), "argument --parts: no part named 'beams'"),
        (("--pairs", "0"), "--starts, --pairs and --tokens are at least 1"),
    ],
)
def test_an_invalid_flag_is_rejected(
    measurements: Measurements,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    flags: tuple[str, ...],
    message: str,
) -> None:
    with pytest.raises(SystemExit):
        run(monkeypatch, *flags)
    assert message in capsys.readouterr().err
    assert measurements.calls == []
