"""Drives a runner as a scheduler would: scattered blocks, chunks of prompts beside decodes, deltas for what is known.

As a program it prints what a model generates:
`python runner_driver.py MODEL_DIRECTORY KERNELS PROMPTS_AS_JSON NUM_TOKENS`.
"""

import json
import random
import sys
from pathlib import Path

import torch

import compiled
from worker_svc.attention import AttentionKind, make_attention
from worker_svc.forward import EagerForward
from worker_svc.identity import Limits
from worker_svc.memory import CacheShape
from worker_svc.model.compiled import CompiledKernels, load_compiled
from worker_svc.model.config import read_model_config
from worker_svc.model.llama import load_model
from worker_svc.runner import Runner
from worker_svc.step import NewSequence, SamplingParams, ScheduledSequence, Step, TokenLogprobs

GREEDY = SamplingParams()


def make_runner(
    directory: Path,
    kernels: str = "torch",
    *,
    int8: bool = False,
    dtype: torch.dtype = torch.float32,
    block_size: int = 16,
    num_blocks: int = 64,
    max_step_tokens: int = 512,
    max_sequences: int = 64,
    device: str = "cpu",
) -> Runner:
    """A runner of the model in a directory, over a cache that is full of garbage."""
    config = read_model_config(directory)
    cache = CacheShape.of(config, block_size, dtype).allocate(num_blocks, torch.device(device))
    cache.normal_(generator=torch.Generator(device).manual_seed(0))
    limits = Limits(config.vocab_size, config.context_length, block_size, num_blocks, max_step_tokens, max_sequences)
    if kernels == "compiled":
        compiled_model = load_compiled(config, directory, dtype, CompiledKernels(compiled.team(), int8))
        return Runner(compiled_model.over(cache), limits)
    model = load_model(config, directory, dtype, torch.device(device))
    backend = make_attention(AttentionKind(kernels), cache, config.attention_scale)
    return Runner(EagerForward(model, backend), limits)


class Driver:
    """Runs prompts together, `chunk` prompt tokens of each at a time, until each has its tokens."""

    def __init__(self, runner: Runner, chunk: int = 512) -> None:
        self._runner = runner
        self._chunk = chunk
        self._free = list(range(runner.limits.num_blocks))
        random.Random(0).shuffle(self._free)
        self._next_id = 1
        self.logprobs: dict[int, list[TokenLogprobs]] = {}

    def generate(
        self, prompts: list[list[int]], num_tokens: int, params: SamplingParams | list[SamplingParams] = GREEDY
    ) -> list[list[int]]:
        """What each prompt continues with."""
        every = params if isinstance(params, list) else [params] * len(prompts)
        ids = range(self._next_id, self._next_id + len(prompts))
        self._next_id = ids.stop
        tables: dict[int, list[int]] = {sequence_id: [] for sequence_id in ids}
        computed = dict.fromkeys(ids, 0)
        known = {sequence_id: len(prompt) for sequence_id, prompt in zip(ids, prompts, strict=True)}
        drawn: dict[int, list[int]] = {sequence_id: [] for sequence_id in ids}
        new = [
            NewSequence(sequence_id, prompt, len(prompt), 0, wanted)
            for sequence_id, prompt, wanted in zip(ids, prompts, every, strict=True)
        ]
        while running := [sequence_id for sequence_id in ids if len(drawn[sequence_id]) < num_tokens]:
            scheduled = []
            for sequence_id in running:
                count = min(self._chunk, known[sequence_id] - computed[sequence_id])
                end = computed[sequence_id] + count
                missing = -(-end // self._runner.limits.block_size) - len(tables[sequence_id])
                added = [self._free.pop() for _ in range(missing)]
                tables[sequence_id] += added
                scheduled.append(ScheduledSequence(sequence_id, computed[sequence_id], count, added))
                computed[sequence_id] = end
            for result in self._runner.step(Step([], new, scheduled)).sequences:
                assert result.failure is None, result.failure
                drawn[result.sequence_id] += result.token_ids
                known[result.sequence_id] += len(result.token_ids)
                self.logprobs.setdefault(result.sequence_id, []).extend(result.logprobs)
            new = []
        self._runner.step(Step(list(ids), [], []))
        self._free += [block for table in tables.values() for block in table]
        return list(drawn.values())


def main() -> None:
    directory, kernels, prompts, num_tokens = sys.argv[1:]
    driver = Driver(make_runner(Path(directory), kernels), chunk=8)
    print(json.dumps(driver.generate(json.loads(prompts), int(num_tokens))))


if __name__ == "__main__":
    main()
