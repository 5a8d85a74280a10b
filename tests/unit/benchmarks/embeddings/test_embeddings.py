"""The benchmark of embeddings: loads, the closed loop over HTTP, medians, targets and the table."""

import json
import random
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

from benchmarks.embeddings.__main__ import LOADS, Load, measure, summarize
from benchmarks.embeddings.report import embeddings_section, targets
from benchmarks.embeddings.systems import QUIRE_LIBRARY, SYSTEMS, RunningServer
from benchmarks.processes import BenchmarkFailed


@dataclass
class EmbeddingServer:
    """Answers with one vector for each text, `missing` fewer, and counts what it got."""

    batches: list[list[str]] = field(default_factory=list)
    most_at_once: int = 0
    missing: int = 0
    url: str = ""


@pytest.fixture
def server() -> Iterator[EmbeddingServer]:
    state, running, lock = EmbeddingServer(), [0], threading.Lock()
    gate = threading.Barrier(4)

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            with lock:
                state.batches.append(body["input"])
                running[0] += 1
                state.most_at_once = max(state.most_at_once, running[0])
            if body["model"] == "together":
                gate.wait(60)
            answer = json.dumps({"data": [{}] * (len(body["input"]) - state.missing)}).encode()
            with lock:
                running[0] -= 1
            self.send_response(200)
            self.send_header("Content-Length", str(len(answer)))
            self.end_headers()
            self.wfile.write(answer)

        def log_message(self, *_: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as http:
        thread = threading.Thread(target=http.serve_forever)
        thread.start()
        state.url = f"http://127.0.0.1:{http.server_port}"
        yield state
        http.shutdown()
        thread.join()


def test_each_batch_is_sent_once_as_many_at_a_time_as_wanted(server: EmbeddingServer) -> None:
    batches = [[f"text {number}"] for number in range(8)]
    assert RunningServer(server.url, {"model": "together"}).seconds(batches, 4) > 0
    assert sorted(server.batches) == batches
    assert server.most_at_once == 4


def test_an_answer_with_fewer_vectors_is_a_failure(server: EmbeddingServer) -> None:
    server.missing = 1
    with pytest.raises(BenchmarkFailed, match="fewer vectors"):
        RunningServer(server.url, {"model": "model"}).seconds([["a", "b"]], 1)


def test_texts_of_a_load_differ_and_are_the_same_for_each_system() -> None:
    load = Load("short", 8, 10)
    batches = load.batches(random.Random(1), 0.5)
    assert [len(batch) for batch in batches] == [8] * 5
    assert len({text for batch in batches for text in batch}) == 40
    assert load.batches(random.Random(1), 0.5) == batches


def test_a_library_has_no_loads_of_many_clients() -> None:
    @dataclass
    class Clock:
        """Needs a second for each batch."""

        def seconds(self, batches: list[Any], concurrency: int) -> float:
            assert concurrency == 1
            return float(len(batches))

    rates = {load.name: rate for load, rate in measure(QUIRE_LIBRARY, Clock(), 0, 0.01)}  # type: ignore[arg-type]
    assert rates == {load.name: load.batch_size for load in LOADS if load.concurrency == 1}


def test_medians_targets_and_table() -> None:
    one = LOADS[0].name
    rates = {
        (one, "quire-library"): [30.0, 10.0, 20.0],
        (one, "sentence-transformers"): [10.0],
        (one, "quire-float32"): [14.0],
        (one, "infinity"): [10.0],
    }
    result: dict[str, Any] = {
        "date": "2026-01-02T03:04:05+00:00",
        "commit": None,
        "machine": {"processor": "A processor", "cores": 2},
        "runs": 3,
        "scale": 1.0,
        "versions": {"sentence-transformers": "6.0"},
        "systems": {system.name: system.title for system in SYSTEMS},
        "cases": summarize(rates, SYSTEMS),
    }
    assert result["cases"][0]["load"] == one
    assert result["cases"][0]["texts_per_second"]["quire-library"] == 20
    result["targets"] = targets(result)
    assert [(each["value"], each["holds"]) for each in result["targets"]] == [(2.0, True), (1.4, False)]
    section = embeddings_section(result)
    assert f"| {one} | 20 | 10 | 14 | – | – | 10 | 2.00 | 1.40 |" in section
    assert "sentence-transformers 6.0" in section
