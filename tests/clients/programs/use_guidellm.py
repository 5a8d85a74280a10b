"""GuideLLM: a load by each API, with streams, and the counts of its report."""

import json
import os
import tempfile
from pathlib import Path
from typing import Any

from guidellm.benchmark.schemas import GenerativeBenchmark, GenerativeBenchmarksReport

from checks import BASE_URL, CONCURRENT, MODEL, REQUESTS, TOKENS, check, run, run_command

TARGET = BASE_URL.removesuffix("/v1")
PROMPT_TOKENS = 32

os.environ["GUIDELLM__MAX_WORKER_PROCESSES"] = "1"  # each of them imports torch


def load(route: str, **backend: Any) -> GenerativeBenchmark:
    """Runs a load by a route. Asserts that every request succeeded; returns the benchmark of the report.

    GuideLLM sends `ignore_eos` with a number of output tokens.
    """
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder, "report.json")
        flags: dict[str, dict[str, Any]] = {
            "backend": {"kind": "openai_http", "target": TARGET, "model": MODEL, "request_format": route, **backend},
            "profile": {"kind": "concurrent", "streams": CONCURRENT},
            "constraint": {"kind": "max_requests", "count": REQUESTS},
            "data": {"kind": "synthetic_text", "prompt_tokens": PROMPT_TOKENS, "output_tokens": TOKENS},
            "tokenizer": {"kind": "huggingface_auto", "model": os.environ["QUIRE_MODEL_FILES"]},
            "output": {"kind": "json", "path": str(report)},
        }
        pairs = [word for name, value in flags.items() for word in (f"--{name}", json.dumps(value))]
        run_command("guidellm", "run", "--disable-console", *pairs)
        (benchmark,) = GenerativeBenchmarksReport.load_file(report).benchmarks
    totals = benchmark.metrics.request_totals
    assert (totals.successful, totals.errored, totals.incomplete, totals.total) == (REQUESTS, 0, 0, REQUESTS)
    return benchmark


def check_tokens(benchmark: GenerativeBenchmark) -> None:
    """Asserts that every answer has as many tokens as were asked for, and every prompt at least its own."""
    metrics = benchmark.metrics
    outputs, prompts = metrics.output_token_count.successful, metrics.prompt_token_count.successful
    assert (outputs.count, outputs.min, outputs.max) == (REQUESTS, TOKENS, TOKENS)
    assert outputs.total_sum == REQUESTS * TOKENS
    assert prompts.min >= PROMPT_TOKENS


@check
def chats_are_streamed() -> None:
    benchmark = load("/v1/chat/completions")
    check_tokens(benchmark)
    assert benchmark.metrics.request_streaming_iterations_count.successful.min > 1


@check
def chats_are_answered_whole() -> None:
    check_tokens(load("/v1/chat/completions", stream=False))


@check
def completions_are_streamed() -> None:
    check_tokens(load("/v1/completions"))


@check
def responses_are_streamed() -> None:
    check_tokens(load("/v1/responses"))


if __name__ == "__main__":
    run()
