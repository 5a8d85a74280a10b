"""Which kernels would be compiled while a worker computes embeddings: random batches of prompts, on meta tensors."""

import random
from collections.abc import Callable
from typing import Any

import torch

from benchmarks.aot.launches import Launches
from benchmarks.aot.targets import TARGETS, intercepted_launches

_STEP_TOKENS = 16384


def compiled_while_encoding(
    make: Callable[[], Callable[..., Any]], context_length: int, num_steps: int
) -> tuple[int, list[tuple[str, ...]]]:
    """How many launches the batches made, and the kernels among them that those of the start-up did not need.

    `make` makes the backend of an encoder, or of a decoder whose hidden states are needed.
    """
    launches, chosen = Launches(), random.Random(1)
    with torch.inference_mode(), intercepted_launches(TARGETS["sm_90"], launches.record):
        encoder = make()
        encoder([[0]], [1])
        length = min(128, context_length)
        encoder([[0] * length] * (_STEP_TOKENS // length))
        launches.take_new()
        num_before = launches.num_launches
        for _ in range(num_steps):
            longest = chosen.choice((1, 16, 100, min(context_length, _STEP_TOKENS)))
            lengths = [chosen.randint(1, longest) for _ in range(chosen.choice((1, 2, 7, 32)))]
            encoder([[0] * length for length in lengths], [chosen.randint(1, length) for length in lengths])
        return launches.num_launches - num_before, launches.take_new()
