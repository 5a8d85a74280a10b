"""A peer of Quire: transformers' `generate` on static batches, timed step by step.

    python -m benchmarks.serving.static_batches --model DIRECTORY < REQUESTS

Requests come as a JSON array of [prompt token ids, output tokens]. They run in order, eight at a time, padded on
the left, in bf16. A batch runs until its longest output is complete; a request's tokens count up to its own length. All
requests count as sent when the first batch begins. Prints one JSON array: for each request, the seconds
from then to each of its tokens.
"""

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from time import perf_counter
from typing import Any

import torch
from transformers import AutoModelForCausalLM, StoppingCriteria, StoppingCriteriaList

from quire_client.bench.mix import MixRequest, sample_mix

BATCH_SIZE = 8


class StepClock(StoppingCriteria):
    """Records when each step of a batch was done: `generate` calls it after each new token. It never stops."""

    def __init__(self) -> None:
        self.times: list[float] = []

    def __call__(self, input_ids: torch.Tensor, scores: Any, **kwargs: Any) -> torch.Tensor:
        self.times.append(perf_counter())
        return torch.zeros(input_ids.shape[0], dtype=torch.bool, device=input_ids.device)


def load_model(path: Path, device: torch.device) -> Any:
    """The model in bf16, which continues after end-of-text."""
    model: Any = AutoModelForCausalLM.from_pretrained(path, dtype=torch.bfloat16)
    model.to(device).eval()
    model.generation_config.eos_token_id = None
    model.generation_config.pad_token_id = 0  # masked
    return model


def run_batch(model: Any, requests: Sequence[MixRequest], device: torch.device) -> list[list[float]]:
    """Times of each request's tokens, greedy."""
    longest_prompt = max(len(request.prompt_token_ids) for request in requests)
    longest_output = max(request.output_tokens for request in requests)
    ids = torch.zeros(len(requests), longest_prompt, dtype=torch.long)
    mask = torch.zeros_like(ids)
    for row, request in enumerate(requests):
        length = len(request.prompt_token_ids)
        ids[row, longest_prompt - length :] = torch.tensor(request.prompt_token_ids)
        mask[row, longest_prompt - length :] = 1
    clock = StepClock()
    output = model.generate(
        ids.to(device),
        attention_mask=mask.to(device),
        max_new_tokens=longest_output,
        do_sample=False,
        stopping_criteria=StoppingCriteriaList([clock]),
    )
    if output.shape[1] != longest_prompt + longest_output or len(clock.times) != longest_output:
        raise RuntimeError(f"a batch ended after {len(clock.times)} of {longest_output} tokens")
    return [clock.times[: request.output_tokens] for request in requests]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, required=True, help="model directory")
    options = parser.parse_args()
    requests = [MixRequest(tuple(prompt), output_tokens) for prompt, output_tokens in json.load(sys.stdin)]
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    model = load_model(options.model, device)
    with torch.inference_mode():
        run_batch(
            model, [MixRequest(request.prompt_token_ids, 8) for request in sample_mix(1, BATCH_SIZE, None)], device
        )
        sent = perf_counter()
        times: list[list[float]] = []
        for start in range(0, len(requests), BATCH_SIZE):
            times += run_batch(model, requests[start : start + BATCH_SIZE], device)
    print(json.dumps([[at - sent for at in request] for request in times]))


if __name__ == "__main__":
    main()
