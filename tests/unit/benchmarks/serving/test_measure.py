"""A system under load: a scripted HTTP server that counts like a scheduler."""

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from benchmarks.processes import BenchmarkFailed
from benchmarks.serving.loads import NUM_WARM_UPS, ServingLoad
from benchmarks.serving.measure import KvUse, run_system
from benchmarks.serving.systems import Endpoint
from quire_client.bench.mix import MixRequest

LOADS = [
    ServingLoad("one", "one at a time", (MixRequest((5, 6), 3), MixRequest((7,), 4)), 1),
    ServingLoad("two", "two at a time", (MixRequest((8, 9), 2),), 2),
]


@dataclass
class Server:
    """Streams as many tokens as are asked for, less `missing`."""

    name: str = "fake"
    title: str = "A server"
    missing: int = 0
    prompts: list[list[int]] = field(default_factory=list)

    @contextmanager
    def running(self) -> Iterator[Endpoint]:
        server = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                if self.path == "/metrics":
                    count = 100 * len(server.prompts)
                    self._answer(f"quire_kv_tokens_used_total {0.9 * count}\nquire_kv_slots_used_total {count}\n")
                else:
                    self._answer('{"data": [{"id": "tiny"}]}')

            def do_POST(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers["content-length"])))
                server.prompts.append(body["prompt"])
                count = body["max_tokens"] - server.missing
                events = [json.dumps({"choices": [{"text": "a"}]})] * count
                usage = json.dumps({"choices": [], "usage": {"completion_tokens": count}})
                self._answer("".join(f"data: {event}\n\n" for event in [*events, usage, "[DONE]"]))

            def _answer(self, text: str) -> None:
                self.send_response(200)
                self.end_headers()
                self.wfile.write(text.encode())

            def log_message(self, format: str, *args: object) -> None:  # noqa: A002
                pass

        with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as http:
            thread = threading.Thread(target=http.serve_forever, args=(0.01,))
            thread.start()
            try:
                url = f"http://127.0.0.1:{http.server_address[1]}"
                yield Endpoint(url, url.removeprefix("http://"))
            finally:
                http.shutdown()
                thread.join()


def test_each_load_is_sent_after_a_warm_up_and_measured_by_itself(capsys: pytest.CaptureFixture[str]) -> None:
    server = Server()
    outcomes = run_system(server, LOADS)
    assert server.prompts[NUM_WARM_UPS:] == [[5, 6], [7], [8, 9]]
    assert list(outcomes) == ["one", "two"]
    assert all(outcome.figures.output_tokens_per_second > 0 for outcome in outcomes.values())
    assert [outcome.kv_wasted for outcome in outcomes.values()] == pytest.approx([0.1, 0.1])
    assert len(capsys.readouterr().err.splitlines()) == 1 + len(LOADS)


def test_requests_of_a_wrong_length_are_no_figures() -> None:
    with pytest.raises(BenchmarkFailed, match="A server, one at a time: 2 requests of a wrong length"):
        run_system(Server(missing=1), LOADS)


def test_waste_is_what_was_not_filled_since_then() -> None:
    assert KvUse(tokens=1090, slots=1100).wasted_since(KvUse(tokens=1000, slots=1000)) == pytest.approx(0.1)


def test_no_step_is_no_figure() -> None:
    with pytest.raises(BenchmarkFailed, match="no KV slots"):
        KvUse(5, 10).wasted_since(KvUse(5, 10))
