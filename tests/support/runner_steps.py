"""Helpers to run single steps of a runner."""

import random
from collections.abc import Callable
from pathlib import Path

import torch

from llama_models import VOCAB
from runner_driver import GREEDY
from worker_svc.block_copier import HostBlockCopier, RateLimiter
from worker_svc.executor import run_inline
from worker_svc.runner import Runner
from worker_svc.step import NewSequence, SamplingParams, ScheduledSequence, SequenceResult, Step

NO_COPIER = HostBlockCopier(torch.empty(0, 1), torch.empty(0, 1), run_inline, RateLimiter(None))
Generate = Callable[[Path, list[list[int]], int], list[list[int]]]
"""The `reference` fixture: continuations of prompts by a model of a directory."""

_rng = random.Random(2)
PROMPTS = [[_rng.randrange(VOCAB) for _ in range(length)] for length in (1, 15, 16, 17, 65, 111)]


def new_sequence(sequence_id: int, tokens: list[int], params: SamplingParams = GREEDY) -> NewSequence:
    return NewSequence(sequence_id, tokens, len(tokens), 0, params)


def run_step(runner: Runner, new: list[NewSequence], *scheduled: ScheduledSequence) -> list[SequenceResult]:
    return runner.step(Step([], new, list(scheduled))).sequences


class FixedDrafter:
    """Drafts the same tokens each time, as many of them as are allowed."""

    def __init__(self, *tokens: int) -> None:
        self._tokens = list(tokens)

    def draft(self, tokens: object, max_tokens: int) -> list[int]:
        return self._tokens[:max_tokens]
