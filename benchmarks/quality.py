"""The perplexity of the served model on a fixed text, for formats of its weights side by side.

    python -m benchmarks.quality [--formats float32,bfloat16,int8,w8a8,w4a16,w4a8] [--output FILE]

The text is the beginning of Alice's Adventures in Wonderland (Lewis Carroll, 1865), four chapters and a part of the
fifth, 46,000 characters. Perplexity is exp(-mean log-probability of its tokens), each after at least half a window of
the text before it; the model is loaded and run as a worker does. Settings are a worker's: QUIRE_MODEL names another
model.
"""

import math
import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

from tokenizers import Tokenizer

from benchmarks.processes import BenchmarkFailed
from benchmarks.record import RESULTS, provenance
from benchmarks.report import Cells, version
from benchmarks.runner import failures_exit, log, make_parser, publish
from svc_common.models import resolve_model
from worker_svc.errors import StartupFailed
from worker_svc.instance import load_instance
from worker_svc.runner import Runner
from worker_svc.settings import WorkerSettings
from worker_svc.step import NewSequence, SamplingParams, ScheduledSequence, Step

TEXT = Path(__file__).with_name("alice.txt")
RESULT = RESULTS / "quality.json"
WINDOW = 512
# The worker's settings for each format.
FORMATS: dict[str, dict[str, str]] = {
    "float32": {"dtype": "float32"},
    "bfloat16": {"dtype": "bfloat16"},
    "int8": {"dtype": "bfloat16", "quantization": "int8"},
    "w8a8": {"dtype": "bfloat16", "quantization": "w8a8"},
    "w4a16": {"dtype": "bfloat16", "quantization": "w4a16"},
    "w4a8": {"dtype": "bfloat16", "quantization": "w4a8"},
    "bfloat16+int8-kv": {"dtype": "bfloat16", "kv_cache_dtype": "int8"},
    "w8a8+int8-kv": {"dtype": "bfloat16", "quantization": "w8a8", "kv_cache_dtype": "int8"},
}
# The most that a request may add to a logit: the token is sampled whatever its logit is. Log-probabilities are
# of the model's own logits.
_CERTAIN = 100.0


@dataclass(frozen=True)
class Window:
    """A stretch of the text: the tokens from `num_given` on are scored, each after all before it in the window."""

    tokens: Sequence[int]
    num_given: int


def windows_of(tokens: Sequence[int], size: int) -> list[Window]:
    """Windows that overlap by half: each token beyond the first half is scored once, after half a window or more."""
    half = size // 2
    starts = range(0, max(1, len(tokens) - half), half)
    return [Window(tokens[start : start + size], half) for start in starts if start + half < len(tokens)]


def score(runner: Runner, windows: Sequence[Window]) -> list[float]:
    """The natural logarithms of the probabilities of all tokens to score.

    Prompts are computed as prefill, then a token of each window at a time as decode. Each token is sampled by a
    sequence of its own, which reuses the blocks of the one before. Raises RuntimeError where the runner fails.
    """
    limits = runner.limits
    pages = -(-max(len(window.tokens) for window in windows) // limits.block_size)
    tables = [list(range(row * pages, (row + 1) * pages)) for row in range(len(windows))]
    for row, window in enumerate(windows):
        for start in range(0, window.num_given - 1, limits.max_step_tokens):
            count = min(limits.max_step_tokens, window.num_given - 1 - start)
            new = NewSequence(row, list(window.tokens[: window.num_given]), window.num_given, 0, SamplingParams())
            _run(runner, Step([], [new], [ScheduledSequence(row, start, count, tables[row])]))
            _run(runner, Step([row], [], []))
    logprobs: list[float] = []
    next_id = len(windows)
    for place in range(max(len(window.tokens) for window in windows)):
        new_sequences, scheduled = [], []
        for window, table in zip(windows, tables, strict=True):
            if not window.num_given <= place < len(window.tokens):
                continue
            params = SamplingParams(logit_bias={window.tokens[place]: _CERTAIN}, logprobs=0)
            new_sequences.append(NewSequence(next_id, list(window.tokens[:place]), 1, 0, params))
            scheduled.append(ScheduledSequence(next_id, place - 1, 1, table))
            next_id += 1
        if scheduled:
            logprobs += _run(runner, Step([], new_sequences, scheduled))
            _run(runner, Step([new.sequence_id for new in new_sequences], [], []))
    return logprobs


def _run(runner: Runner, step: Step) -> list[float]:
    wanted = [next(iter(new.sampling.logit_bias), None) for new in step.new_sequences]
    results = runner.step(step).sequences
    if failure := next((result.failure for result in results if result.failure is not None), None):
        raise RuntimeError(failure)
    for result, token in zip(results, wanted, strict=True):
        if token is not None and result.token_ids != [token]:
            raise RuntimeError(f"token {token} was to be sampled, and {result.token_ids} was")
    return [one.logprob for result in results for one in result.logprobs]


def measure(options: Mapping[str, str], windows: Sequence[Window]) -> dict[str, Any]:
    """The figures of a worker with these settings. Raises BenchmarkFailed where it cannot serve the model."""
    block_size = 16
    num_blocks = len(windows) * max(-(-len(window.tokens) // block_size) for window in windows)
    limits = {"block_size": block_size, "num_blocks": num_blocks, "max_sequences": max(64, len(windows))}
    settings = WorkerSettings.model_validate({**options, **limits})
    try:
        instance = load_instance(settings, log)
    except StartupFailed as error:
        raise BenchmarkFailed(str(error)) from error
    began = time.perf_counter()
    logprobs = score(instance.runner, windows)
    return {
        "perplexity": math.exp(-fmean(logprobs)),
        "num_tokens": len(logprobs),
        "seconds": time.perf_counter() - began,
        "dtype": instance.description.dtype,
        "device": instance.description.device,
    }


def quality_table(result: dict[str, Any]) -> Cells:
    """A row for each format, with its difference from the first."""
    formats = result["formats"]
    first = next(iter(formats.values()))["perplexity"]
    rows = [
        [name, f"{about['perplexity']:.3f}", f"{about['perplexity'] / first - 1:+.2%}"]
        for name, about in formats.items()
    ]
    return Cells(("weights", "perplexity", f"against {next(iter(formats))}"), rows)


def quality_section(result: dict[str, Any]) -> str:
    """The section of docs/performance.md."""
    num_tokens = next(iter(result["formats"].values()))["num_tokens"]
    return f"{result['model']}, {num_tokens:,} tokens; {version(result)}.\n\n{quality_table(result).markdown()}"


def main() -> None:
    parser = make_parser(__doc__, RESULT, ", for the whole text")
    parser.add_argument("--formats", default=",".join(FORMATS), help=f"default {','.join(FORMATS)}")
    parser.add_argument("--tokens", type=int, help="only so many of the text, for a quick pass")
    options = parser.parse_args()
    names = options.formats.split(",")
    if unknown := [name for name in names if name not in FORMATS]:
        parser.error(f"no such format: {', '.join(unknown)}")
    with failures_exit("quality"):
        model = resolve_model(os.environ.get("QUIRE_MODEL"))
        tokenizer = Tokenizer.from_file(str(model.path / "tokenizer.json"))
        tokens = tokenizer.encode(TEXT.read_text(), add_special_tokens=False).ids[: options.tokens]
        windows = windows_of(tokens, WINDOW)
        formats = {name: measure(FORMATS[name], windows) for name in names}
    result = {**provenance("torch"), "model": model.name, "window": WINDOW, "formats": formats}
    output = options.output or (RESULT if options.tokens is None else None)
    publish(result, output, {f"{model.name} on {TEXT.name}": quality_table(result)})


if __name__ == "__main__":
    main()
