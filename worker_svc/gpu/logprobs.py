"""Log-probabilities of drawn tokens: measured on the device, told on the host."""

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from worker_svc.step import TokenLogprobs


def measure_logprobs(logits: Tensor, tokens: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """Of each row of the model's own logits [rows, vocab_size]: of its token [rows], and of its `count` likeliest.

    Returns float32 [rows, 1 + count], the token's first, and int32 [rows, count], which the likeliest are. A token of
    -1 has none that mean anything.
    """
    values, ids = logits.topk(count)
    chosen = logits.gather(-1, tokens.clamp(min=0)[:, None])
    return torch.cat((chosen, values), 1) - logits.logsumexp(-1, keepdim=True), ids.int()


def tell_logprobs(values: NDArray[np.float32], ids: NDArray[np.int32], counts: Sequence[int]) -> list[TokenLogprobs]:
    """What `measure_logprobs` made, with as many of each row's likeliest as were asked for."""
    return [
        TokenLogprobs(row[0], list(zip(row_ids[:count], row[1 : 1 + count], strict=True)))
        for row, row_ids, count in zip(values.tolist(), ids.tolist(), counts, strict=True)
    ]
