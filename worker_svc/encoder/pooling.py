"""Hidden states to embeddings, as requests and the model say."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from worker_svc.step import EmbeddingParams, Pooling


@dataclass(frozen=True, slots=True)
class EmbeddingDefaults:
    """How a model's embeddings are made if a request says nothing else. `max_tokens`: of a prompt; None: no limit."""

    pooling: Pooling = Pooling.MEAN
    normalizes: bool = False
    max_tokens: int | None = None


def embed(
    hidden: Sequence[Tensor], params: Sequence[EmbeddingParams], defaults: EmbeddingDefaults
) -> list[list[float]]:
    """The embedding of each prompt from its last hidden states [num_tokens, hidden_size]."""
    vectors = []
    for states, wanted in zip(hidden, params, strict=True):
        vector = _pool(states, wanted.pooling or defaults.pooling)
        if wanted.num_dimensions:
            vector = vector[: wanted.num_dimensions]
        if defaults.normalizes if wanted.normalizes is None else wanted.normalizes:
            vector = F.normalize(vector, dim=0)
        vectors.append(vector)
    # One copy from the device for all of them.
    numbers = iter(torch.cat(vectors).tolist()) if vectors else iter(())
    return [list(islice(numbers, len(vector))) for vector in vectors]


def _pool(states: Tensor, pooling: Pooling) -> Tensor:
    match pooling:
        case Pooling.MEAN:
            return states.mean(0, dtype=torch.float32)
        case Pooling.CLS:
            return states[0].float()
        case Pooling.LAST:
            return states[-1].float()
