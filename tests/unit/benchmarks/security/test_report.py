"""The cost of TLS and limits, from pairs of runs."""

import pytest

from benchmarks.security.report import FigurePair, StreamFigures, judge, security_section, summarize

HEAD = {
    "date": "2026-11-21",
    "commit": None,
    "machine": {"cores": 2, "processor": "a processor"},
    "model": "tiny",
    "measured": "TLS and limits",
    "num_streams": 64,
    "num_tenants": 8,
    "num_pairs": 3,
    "measured_tokens": 100,
}


def pair(without_p99: float, with_p99: float) -> FigurePair:
    without = StreamFigures(0.02, without_p99, 3000.0, 100e-6, 50e-6, 120e-6)
    return FigurePair(without, StreamFigures(0.021, with_p99, 2000.0, 110e-6, 60e-6, 180e-6))


def test_above_1_is_worse_for_every_figure() -> None:
    measured = pair(0.04, 0.05)
    assert measured.with_parts.ratios_to(measured.without) == pytest.approx(
        {
            "inter_token_p50": 1.05,
            "inter_token_p99": 1.25,
            "tokens_per_second": 1.5,
            "gateway_cpu": 1.1,
            "scheduler_cpu": 1.2,
            "gateway_request_cpu": 1.5,
        }
    )


def test_the_targets_are_on_medians_of_the_pairs() -> None:
    # The ratio of the medians is 1: the machine was slower in the third pair.
    pairs = {"gRPC": [pair(0.04, 0.0416), pair(0.04, 0.0412), pair(0.1, 0.04)], "HTTP": [pair(0.04, 0.044)] * 3}
    protocols = summarize(pairs)
    grpc, grpc_cpu, http, http_cpu = judge(protocols)
    assert (grpc_cpu["value"], grpc_cpu["holds"]) == (pytest.approx(100), False)
    protocols["HTTP"]["without"]["gateway_cpu"] = 59e-6
    assert judge(protocols)[3]["holds"]
    protocols["HTTP"]["without"]["gateway_cpu"] = 100e-6
    assert (grpc["value"], grpc["holds"]) == (pytest.approx(1.03), True)
    assert (http["value"], http["holds"]) == (pytest.approx(1.1), False)
    assert protocols["gRPC"]["without"]["inter_token_p99"] == 0.04
    assert [found["with"]["inter_token_p99"] for found in protocols["gRPC"]["pairs"]] == [0.0416, 0.0412, 0.04]
    section = security_section({**HEAD, "protocols": protocols, "targets": [grpc, http, http_cpu]})
    assert "| gRPC | without | 20.0 | 40.0 | 3,000 | 100 | 120 | 50 |" in section
    assert "| gRPC | with TLS and limits | 21.0 | 41.2 | 2,000 | 110 | 180 | 60 |" in section
    assert "| HTTP | with TLS and limits | 21.0 | 44.0 | 2,000 | 110 | 180 | 60 |" in section
    assert "- **HTTP: inter-token p99, ratio: 1.1, target ≤ 1.05: missed**" in section
    assert "- **HTTP: gateway's CPU for a token, µs: 100, target ≤ 60: missed**" in section
