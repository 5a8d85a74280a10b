"""Rows of logits with sampling parameters, for the sampling kernels."""

from collections.abc import Sequence

import numpy as np
import torch

from quire_kernels.sample import SamplingTensors
from worker_svc.sampler import SamplingState
from worker_svc.step import SamplingParams


def make_tensors(params: Sequence[SamplingParams], device: str, index: int = 0, position: int = 1) -> SamplingTensors:
    """The state of these rows on the device, as a runner keeps it."""
    return SamplingTensors(
        temperature=torch.tensor([p.temperature for p in params], dtype=torch.float32, device=device),
        top_k=torch.tensor([p.top_k for p in params], dtype=torch.int32, device=device),
        top_p=torch.tensor([p.top_p for p in params], dtype=torch.float64, device=device),
        min_p=torch.tensor([p.min_p for p in params], dtype=torch.float32, device=device),
        seeds=torch.tensor([p.seed for p in params], dtype=torch.int64, device=device),
        indices=torch.full((len(params),), index, dtype=torch.int32, device=device),
        positions=torch.full((len(params),), position, dtype=torch.int32, device=device),
    )


def make_states(params: Sequence[SamplingParams], index: int = 0, position: int = 1) -> list[SamplingState]:
    """The same rows for the CPU sampler."""
    return [SamplingState(p, index, np.zeros(position, np.int32), position) for p in params]
