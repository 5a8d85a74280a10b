"""AIPerf: a load by each API, with streams, and the counts of its report."""

import os
import tempfile
from pathlib import Path

from aiperf.common.models.export_models import JsonExportData, JsonMetricResult

from checks import BASE_URL, CONCURRENT, MODEL, REQUESTS, TOKENS, check, run, run_command

os.environ.pop("HF_HUB_OFFLINE", None)  # with it, aiperf loads tokenizers of the hub only, not from a folder

OPTIONS = {
    "--model": MODEL,
    "--url": BASE_URL.removesuffix("/v1"),
    "--concurrency": str(CONCURRENT),
    "--request-count": str(REQUESTS),
    "--isl": "32",
    "--osl": str(TOKENS),
    "--tokenizer": os.environ["QUIRE_MODEL_FILES"],
    "--ui": "none",
}
FLAGS = ["--use-server-token-count", "--no-gpu-telemetry"]


def load(endpoint: str, *flags: str) -> JsonMetricResult:
    """Runs a load by an endpoint. Asserts that every request succeeded; returns the numbers of output tokens."""
    with tempfile.TemporaryDirectory() as folder:
        pairs = [word for pair in OPTIONS.items() for word in pair]
        where = ["--endpoint-type", endpoint, "--artifact-dir", folder]
        printed = run_command("aiperf", "profile", *pairs, *FLAGS, *where, *flags)
        (report,) = Path(folder).rglob("profile_export_aiperf.json")
        data = JsonExportData.model_validate_json(report.read_text())
    assert not data.was_cancelled, printed
    assert not data.error_summary, data.error_summary
    assert data.error_request_count is None or data.error_request_count.avg == 0
    assert data.request_count is not None
    assert data.request_count.avg == REQUESTS
    outputs, total = data.output_sequence_length, data.total_osl
    assert outputs is not None
    assert total is not None
    assert outputs.avg is not None
    assert total.avg == round(outputs.avg * REQUESTS)
    return outputs


def check_tokens(outputs: JsonMetricResult) -> None:
    """Asserts that every answer has as many tokens as were asked for."""
    assert (outputs.min, outputs.max) == (TOKENS, TOKENS)


def check_limit(outputs: JsonMetricResult) -> None:
    """Asserts that every answer has tokens, and at most as many as were asked for."""
    assert outputs.min is not None
    assert outputs.max is not None
    assert 0 < outputs.min <= outputs.max <= TOKENS


@check
def chats_are_streamed() -> None:
    check_tokens(load("chat", "--streaming", "--extra-inputs", "ignore_eos:true"))


@check
def chats_are_answered_whole() -> None:
    check_tokens(load("chat", "--extra-inputs", "ignore_eos:true"))


@check
def completions_are_streamed() -> None:
    check_tokens(load("completions", "--streaming", "--extra-inputs", "ignore_eos:true"))


@check
def responses_are_answered_whole() -> None:
    """Not in streams: of these, AIPerf takes no usage from `response.incomplete`, with which they end at the limit."""
    check_limit(load("responses"))


@check
def messages_are_streamed() -> None:
    check_limit(load("messages", "--streaming"))


if __name__ == "__main__":
    run()
