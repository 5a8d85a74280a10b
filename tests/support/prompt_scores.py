"""Log-probabilities of prompts: by transformers, and by a runner that is driven like one of a scheduler."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM

from worker_svc.runner import Runner
from worker_svc.step import NewSequence, SamplingParams, ScheduledSequence, Step, TokenLogprobs


def reference_scores(directory: Path, prompt: Sequence[int]) -> torch.Tensor:
    """The log-softmax [len(prompt) - 1, vocab_size] after each token of a prompt but the last, by transformers."""
    model: Any = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
    with torch.inference_mode():
        scores: torch.Tensor = model(torch.tensor([list(prompt)])).logits[0, :-1].log_softmax(-1)
    return scores


def scored(sequence_id: int, prompt: Sequence[int], num_top: int = 0, **params: Any) -> NewSequence:
    """A sequence that asks for log-probabilities of its prompt."""
    sampling = SamplingParams(**params)
    return NewSequence(
        sequence_id, list(prompt), len(prompt), 0, sampling, result="prompt_logprobs", num_top_of_prompt=num_top
    )


def run_prompts(
    runner: Runner, new: Sequence[NewSequence], chunk: int, ahead: int = 1
) -> list[tuple[list[TokenLogprobs], list[int]]]:
    """Computes prompts together, `chunk` tokens of each at a time: their log-probabilities, and the sampled tokens."""
    size = runner.limits.block_size
    longest = max(len(one.token_ids) for one in new)
    blocks_each = longest // size + 1
    found: dict[int, tuple[list[TokenLogprobs], list[int]]] = {one.sequence_id: ([], []) for one in new}
    launched = []
    for start in range(0, longest, chunk):
        parts = []
        for place, one in enumerate(new):
            end = min(start + chunk, len(one.token_ids))
            if end > start:
                first, last = (-(-start // size), -(-end // size))
                blocks = [place * blocks_each + block for block in range(first, last)]
                parts.append(ScheduledSequence(one.sequence_id, start, end - start, blocks))
        launched.append(runner.launch(Step([], list(new) if start == 0 else [], parts)))
        if len(launched) > ahead:
            _take(runner, launched.pop(0), found)
    for step in launched:
        _take(runner, step, found)
    runner.step(Step(list(found), [], []))
    return list(found.values())


def _take(runner: Runner, step: Any, found: dict[int, tuple[list[TokenLogprobs], list[int]]]) -> None:
    for result in runner.finish(step).sequences:
        assert result.failure is None, result.failure
        logprobs, tokens = found[result.sequence_id]
        logprobs += result.prompt_logprobs
        tokens += result.token_ids
