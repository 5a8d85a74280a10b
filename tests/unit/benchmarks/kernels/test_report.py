"""Targets of ops on a GPU, and the section of a result."""

from typing import Any

import pytest

from benchmarks.kernels.report import judge, kernels_section


def measured(asked: str, ms: float, of_device: float | None, **peers: float) -> dict[str, Any]:
    return {
        "op": "op",
        "shape": asked,
        "bound": "GB/s",
        "asked": asked,
        "ms": ms,
        "rate": 1234.5,
        "of_device": of_device,
        "peers": {name.replace("_", " "): {"ms": time} for name, time in peers.items()},
    }


def result(*cases: dict[str, Any], gpu: dict[str, Any] | None) -> dict[str, Any]:
    made: dict[str, Any] = {
        "date": "2026-01-02T03:04:05+00:00",
        "commit": None,
        "machine": {"torch": "2.0", "processor": "A processor"},
        "gpu": gpu,
        "threads": 2,
        "rates": {"memory": 4000.0, "matrix": 700.0, "link": 50.0},
        "cases": list(cases),
    }
    return made | {"targets": judge(made)}


GPU = {"name": "A GPU"}


def test_decode_has_targets_of_bandwidth_and_of_the_best_peer() -> None:
    case = measured("decode", 1.0, 0.9, SDPA=1.2, FlashInfer=0.9, SDPA_with_gather=0.1)
    assert [(v["value"], v["holds"]) for v in result(case, gpu=GPU)["targets"]] == [(0.9, True), (0.9, False)]


@pytest.mark.parametrize(("fastest", "holds"), [(0.71, True), (0.69, False)])
def test_prefill_is_compared_with_the_fastest_peer(fastest: float, holds: bool) -> None:
    case = measured("prefill", 1.0, 0.5, SDPA=1.2, FlexAttention=fastest, SDPA_with_gather=0.1)
    (target,) = result(case, gpu=GPU)["targets"]
    assert (target["what"], target["value"], target["holds"]) == (
        "op, prefill: speed relative to FlexAttention",
        pytest.approx(fastest),
        holds,
    )


def test_attention_has_no_targets_on_a_processor() -> None:
    assert result(measured("decode", 1.0, 0.1, SDPA=0.1), gpu=None)["targets"] == []


@pytest.mark.parametrize(("rate", "holds"), [(1.21, True), (1.19, False)])
def test_integer_products_are_judged_a_thread_by_amx_where_it_was_measured(rate: float, holds: bool) -> None:
    cases = [measured("integer product", ms, 0.5) for ms in (1.0, 2.0)]
    cases[1] |= {"rate": rate, "shape": "integer product by AMX"}
    (target,) = result(*cases, gpu=None)["targets"]
    assert (target["what"], target["value"], target["holds"]) == (
        "op, integer product: GOP/s a thread",
        pytest.approx(1e3 * rate / 2),
        holds,
    )


def test_wide_products_are_compared_with_torchs() -> None:
    cases = [measured("wide product", ms, 0.5, torch=1.9) for ms in (2.0, 3.0)]
    (target,) = result(*cases, gpu=None)["targets"]
    assert (target["value"], target["holds"]) == (pytest.approx(0.95), False)


def test_misses_and_failures_stand_in_the_section() -> None:
    broken = {"op": "broken", "shape": "", "error": "RuntimeError: why", "peers": {}}
    section = kernels_section(result(measured("decode", 2.0, 0.5, SDPA=1.0), broken, gpu=GPU))
    assert "**op, decode: share of the copy rate: 0.5, target ≥ 0.9: missed**" in section
    assert "RuntimeError: why" in section
    assert "SDPA 0.50" in section
