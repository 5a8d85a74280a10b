"""Runs requests through OpenVINO GenAI's continuous batching, with a GGUF file. For the Python that has it.

    python benchmarks/offline/openvino_program.py --model FILE.gguf --requests FILE --output FILE

Requests and output are those of `program.py`. Data types and threads are OpenVINO's own defaults: on a processor with
bfloat16 it computes in that, with keys and values in 8 bits. Steps have more tokens than by default, which gives more
output.
"""

import argparse
import importlib
import json
from pathlib import Path
from time import perf_counter
from typing import Any

_CACHE_GIB = 4  # of keys and values: room for all requests
_STEP_TOKENS = 1024
_WARM_UP = [[list(range(1_000, 1_032)), 8], [list(range(2_000, 2_300)), 8]]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True, help="GGUF file")
    parser.add_argument("--requests", type=Path, required=True, help="file with the requests")
    parser.add_argument("--output", type=Path, required=True, help="file for the result")
    parser.add_argument("--max-sequences", type=int, help="computed at a time; default that of the package")
    options = parser.parse_args()
    import numpy as np

    openvino, openvino_genai = map(importlib.import_module, ("openvino", "openvino_genai"))
    scheduling = openvino_genai.SchedulerConfig()
    scheduling.cache_size, scheduling.max_num_batched_tokens = _CACHE_GIB, _STEP_TOKENS
    if options.max_sequences is not None:
        scheduling.max_num_seqs = options.max_sequences
    pipeline = openvino_genai.ContinuousBatchingPipeline(options.model, scheduling, "CPU")

    def config(count: int) -> Any:
        made = openvino_genai.GenerationConfig()
        made.max_new_tokens = made.min_new_tokens = count
        made.ignore_eos, made.do_sample = True, False
        return made

    def generate(requests: list[list[Any]]) -> list[list[int]]:
        prompts = [openvino.Tensor(np.array([prompt], np.int64)) for prompt, _ in requests]
        results = pipeline.generate(prompts, [config(count) for _, count in requests])
        return [list(result.m_generation_ids[0]) for result in results]

    generate(_WARM_UP)
    requests = json.loads(options.requests.read_bytes())
    began = perf_counter()
    token_ids = generate(requests)
    options.output.write_text(json.dumps({"seconds": perf_counter() - began, "token_ids": token_ids}))


if __name__ == "__main__":
    main()
