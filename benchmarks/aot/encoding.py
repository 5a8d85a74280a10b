"""Which kernels would be compiled while a worker computes embeddings: random batches of prompts, on meta tensors."""

import random

import torch

from benchmarks.aot.launches import Launches
from benchmarks.aot.targets import TARGETS, intercepted_launches
from benchmarks.gpu.random_model import MetaCheckpoint
from worker_svc.model.encoder_description import EncoderDescription
from worker_svc.model.triton_encoder import TritonEncoder

_STEP_TOKENS = 16384


def compiled_while_encoding(
    description: EncoderDescription, num_steps: int, *, deterministic: bool = False
) -> tuple[int, list[tuple[str, ...]]]:
    """How many launches the batches made, and the kernels among them that the batch of the start-up did not need."""
    launches, chosen = Launches(), random.Random(1)
    with torch.inference_mode(), intercepted_launches(TARGETS["sm_90"], launches.record):
        encoder = TritonEncoder(description, MetaCheckpoint(), deterministic=deterministic)
        length = min(128, description.context_length)
        encoder([[0] * length] * (_STEP_TOKENS // length))
        launches.take_new()
        num_before = launches.num_launches
        for _ in range(num_steps):
            longest = chosen.choice((1, 16, 100, description.context_length))
            lengths = [chosen.randint(1, longest) for _ in range(chosen.choice((1, 2, 7, 32)))]
            encoder([[0] * length for length in lengths], [chosen.randint(1, length) for length in lengths])
        return launches.num_launches - num_before, launches.take_new()
