"""Runs requests through the class `LLM` of Quire or of vLLM: the same program, as both have the same interface.

    python benchmarks/offline/program.py --package vllm --model DIRECTORY --requests FILE --output FILE

Requests are a JSON array of [prompt token ids, output tokens]. They are computed in one call, greedy, with end-of-text
ignored, after two that warm up. The output is one JSON object: `seconds` of the call, and `token_ids` of
each output.
"""

import argparse
import importlib
import json
from pathlib import Path
from time import perf_counter
from typing import Any

CONTEXT_LENGTH = 2048
_WARM_UP = [[list(range(1_000, 1_032)), 8], [list(range(2_000, 2_300)), 8]]


def generate(package: Any, llm: Any, requests: list[list[Any]]) -> list[list[int]]:
    """The output tokens of each request."""
    outputs = llm.generate(
        [{"prompt_token_ids": prompt} for prompt, _ in requests],
        [package.SamplingParams(temperature=0, max_tokens=count, ignore_eos=True) for _, count in requests],
        use_tqdm=False,
    )
    return [list(output.outputs[0].token_ids) for output in outputs]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--package", choices=("quire", "vllm"), default="quire")
    parser.add_argument("--model", required=True, help="model directory")
    parser.add_argument("--requests", type=Path, required=True, help="file with the requests")
    parser.add_argument("--output", type=Path, required=True, help="file for the result")
    parser.add_argument("--dtype", default="bfloat16", help="default bfloat16")
    parser.add_argument("--max-sequences", type=int, help="computed at a time; default that of the package")
    parser.add_argument("--quantization", help="of weights; default: as the package has it")
    options = parser.parse_args()
    requests = json.loads(options.requests.read_bytes())
    package = importlib.import_module(options.package)
    given = {"max_num_seqs": options.max_sequences, "quantization": options.quantization}
    chosen = {name: value for name, value in given.items() if value is not None}
    llm = package.LLM(model=options.model, dtype=options.dtype, max_model_len=CONTEXT_LENGTH, **chosen)
    generate(package, llm, _WARM_UP)
    began = perf_counter()
    token_ids = generate(package, llm, requests)
    options.output.write_text(json.dumps({"seconds": perf_counter() - began, "token_ids": token_ids}))


if __name__ == "__main__":
    main()
