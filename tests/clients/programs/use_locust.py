"""Locust: a load of chats and one of streams, and the counts of its report. This file is also the locustfile."""

import itertools
import json
import tempfile
from pathlib import Path
from typing import Any

from locust import HttpUser, task
from locust.exception import StopUser

from checks import BASE_URL, CHAT, CONCURRENT, MODEL, REQUESTS, TOKENS, check, run, run_command

BODY: dict[str, Any] = {"model": MODEL, "messages": CHAT, "max_tokens": TOKENS, "ignore_eos": True}
ended = itertools.count(1)


class Chatter(HttpUser):
    """Sends its part of the load, one request after the other. The load ends with the last user."""

    @task
    def send_all(self) -> None:
        """Sends the requests. A failed one counts as a failure in the report."""
        for _ in range(REQUESTS // CONCURRENT):
            self.send()
        if next(ended) == CONCURRENT:
            self.environment.runner.quit()
        raise StopUser

    def send(self) -> None:
        """Sends a chat."""
        with self.client.post("/chat/completions", json=BODY, catch_response=True) as answer:
            if not answer.ok:
                answer.failure(answer.text)
            elif answer.json()["usage"]["completion_tokens"] != TOKENS:
                answer.failure("another number of tokens")


class Streamer(Chatter):
    """Sends chats whose answers are streams."""

    def send(self) -> None:
        """Sends a chat, and reads its events."""
        body = BODY | {"stream": True, "stream_options": {"include_usage": True}}
        with self.client.post("/chat/completions", json=body, stream=True, catch_response=True) as answer:
            if not answer.ok:
                answer.failure(answer.text)
                return
            *events, done = [line.removeprefix(b"data: ") for line in answer.iter_lines() if line]
            usage = json.loads(events[-1])["usage"]
            if done != b"[DONE]" or usage["completion_tokens"] != TOKENS or len(events) < 3:
                answer.failure("a stream without its events")


def check_load(user: type[Chatter]) -> None:
    """Runs a load of one kind of users. Asserts that every request succeeded."""
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder, "report")
        flags = ["--headless", "--host", BASE_URL, "--users", str(CONCURRENT), "--spawn-rate", str(CONCURRENT)]
        run_command("locust", "--locustfile", __file__, *flags, "--json-file", report, user.__name__)
        (entry,) = json.loads(report.with_suffix(".json").read_text())
    assert (entry["method"], entry["name"]) == ("POST", "/v1/chat/completions")
    assert (entry["num_requests"], entry["num_failures"]) == (REQUESTS, 0)


@check
def chats_are_answered() -> None:
    check_load(Chatter)


@check
def chats_are_streamed() -> None:
    check_load(Streamer)


if __name__ == "__main__":
    run()
