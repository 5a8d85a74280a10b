"""The perplexity of the served model on a fixed text, for formats of its weights side by side.

    python -m benchmarks.quality [--formats float32,bfloat16,int8] [--output FILE]

The text is the first chapter of Alice's Adventures in Wonderland (Lewis Carroll, 1865), as far as it tells of the
bottle. Perplexity is exp(-mean log-probability of its tokens), each after at least half a window of the text before it;
the model is loaded and run as a worker does. Settings are a worker's: QUIRE_MODEL names another model.
"""

import argparse
import math
import os
import sys
import time
from pathlib import Path
from statistics import fmean
from typing import Any

from tokenizers import Tokenizer

from benchmarks.quality.report import quality_table
from benchmarks.quality.score import score, windows_of
from benchmarks.record import RESULTS, provenance, write_result
from svc_common.models import ModelNotFound, resolve_model
from worker_svc.errors import StartupFailed
from worker_svc.instance import load_instance
from worker_svc.settings import WorkerSettings

TEXT = Path(__file__).with_name("alice.txt")
RESULT = RESULTS / "quality.json"
WINDOW = 512
# A worker's settings that make a format.
FORMATS: dict[str, dict[str, str]] = {
    "float32": {"dtype": "float32"},
    "bfloat16": {"dtype": "bfloat16"},
    "int8": {"dtype": "bfloat16", "quantization": "int8"},
}


def measure(name: str, tokens: list[int]) -> dict[str, Any]:
    """One format. Raises StartupFailed where the worker cannot serve it."""
    windows = windows_of(tokens, WINDOW)
    block_size = 16
    num_blocks = len(windows) * WINDOW // block_size + 1
    settings = WorkerSettings.model_validate(
        FORMATS[name] | {"block_size": block_size, "num_blocks": num_blocks, "max_sequences": max(64, len(windows))}
    )
    replica = load_instance(settings, lambda text: print(text, file=sys.stderr))
    began = time.perf_counter()
    logprobs = score(replica.runner, windows)
    return {
        "perplexity": math.exp(-fmean(logprobs)),
        "num_tokens": len(logprobs),
        "seconds": time.perf_counter() - began,
        "dtype": replica.description.dtype,
        "device": replica.description.device,
    }


def main() -> None:
    """Reads flags, measures, writes."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--formats", default=",".join(FORMATS), help=f"default {','.join(FORMATS)}")
    parser.add_argument("--tokens", type=int, help="only so many of the text, for a quick pass")
    parser.add_argument("--output", type=Path, help=f"file for the result; default {RESULT.name}, for the whole text")
    options = parser.parse_args()
    names = options.formats.split(",")
    if unknown := [name for name in names if name not in FORMATS]:
        parser.error(f"no such format: {', '.join(unknown)}")
    try:
        model = resolve_model(os.environ.get("QUIRE_MODEL"))
        tokenizer = Tokenizer.from_file(str(model.path / "tokenizer.json"))
        tokens = tokenizer.encode(TEXT.read_text(), add_special_tokens=False).ids[: options.tokens]
        formats = {name: measure(name, tokens) for name in names}
    except (StartupFailed, ModelNotFound) as error:
        sys.exit(f"quality: {error}")
    result = {**provenance("torch"), "model": model.name, "window": WINDOW, "formats": formats}
    quality_table(result).print(f"{model.name} on {TEXT.name}")
    output = options.output or (RESULT if options.tokens is None else None)
    if output:
        write_result(output, result)


if __name__ == "__main__":
    main()
