"""Counters and costs from metrics, and rates computed from them."""

import threading
from collections.abc import Iterator
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from benchmarks.deployment import Deployment
from benchmarks.pressure.choice import CostEstimates, Counts, swap_rates
from benchmarks.processes import BenchmarkFailed

PAGE = """\
quire_preemptions_total{method="swap"} 7.0
quire_preemptions_total{method="recompute"} 5.0
quire_tokens_computed_total 1200.0
quire_cost_seconds{method="swap",worker="0"} 0.001
quire_cost_seconds{method="recompute",worker="0"} 0.004
quire_worker_swapped_blocks_total{direction="out"} 40.0
quire_worker_swap_seconds_total{direction="out"} 0.25
"""


@pytest.fixture
def page() -> Iterator[list[str]]:
    """The text of /metrics, which a test may change, and the address that serves it."""
    served = [PAGE]

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.end_headers()
            self.wfile.write(served[0].encode())

        def log_message(self, format: str, *args: object) -> None:  # noqa: A002
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as http:
        thread = threading.Thread(target=http.serve_forever, args=(0.01,))
        thread.start()
        served.append(f"127.0.0.1:{http.server_address[1]}")
        try:
            yield served
        finally:
            http.shutdown()
            thread.join()


def deployment(page: list[str]) -> Deployment:
    return Deployment("", "", "", page[1], page[1], None, None)


def test_counts_are_those_since_an_earlier_reading(page: list[str]) -> None:
    before = Counts.read(deployment(page))
    assert before == Counts(7, 5, 1200, blocks_out=40, blocks_in=0, seconds_out=0.25, seconds_in=0.0)
    page[0] = PAGE.replace("7.0", "9.0").replace("1200.0", "1500.0")
    since = Counts.read(deployment(page)).since(before)
    assert since == replace(since, swaps=2, recomputes=0, computed_tokens=300, blocks_out=0)


def test_costs_are_the_schedulers_estimates(page: list[str]) -> None:
    assert CostEstimates.read(deployment(page)) == CostEstimates(swap_seconds=0.001, recompute_seconds=0.004)


def test_a_missing_metric_is_a_failure(page: list[str]) -> None:
    page[0] = "quire_tokens_computed_total 1.0\n"
    with pytest.raises(BenchmarkFailed, match="quire_preemptions_total"):
        Counts.read(deployment(page))
    with pytest.raises(BenchmarkFailed, match="quire_cost_seconds"):
        CostEstimates.read(deployment(page))


def test_rates_are_of_the_time_in_which_blocks_moved() -> None:
    counts = Counts(1, 0, 10, blocks_out=10, blocks_in=0, seconds_out=0.5, seconds_in=0.0)
    moved = swap_rates(counts, CostEstimates(0.001, 0.004), block_bytes=1000, block_size=16)
    assert moved.out_bytes_per_second == pytest.approx(20_000)
    assert moved.in_bytes_per_second is None
    assert moved.recompute_tokens_per_second == pytest.approx(4000)
