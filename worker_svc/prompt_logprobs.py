"""Log-probabilities of prompts: the tokens of a prompt are computed piece by piece, with logits after each token."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from worker_svc.batch import Batch
from worker_svc.forward import Forward
from worker_svc.logprobs import to_token_logprobs
from worker_svc.step import TokenLogprobs

TopLogprobs: TypeAlias = Callable[[Tensor, NDArray[np.int64], int], tuple[NDArray[np.float32], NDArray[np.int64]]]
"""Log-probabilities [rows, 1 + count] of a token of each row of float32 logits and of the row's top tokens, and the ids
[rows, count] of these."""


@dataclass(frozen=True, slots=True)
class PromptPiece:
    """Consecutive tokens of one prompt, with a row of logits for each.

    Each row gives the log-probability of its `next_tokens` int64 [rows], and of `num_top` top tokens.
    """

    batch: Batch
    next_tokens: NDArray[np.int64]
    num_top: int


def score_prompts(
    forward: Forward, top_logprobs: TopLogprobs, pieces: Sequence[PromptPiece]
) -> list[list[TokenLogprobs]]:
    """Computes pieces of prompts on the host. Returns a value for each token that follows one of a piece."""
    scored = []
    for piece in pieces:
        logits = forward(piece.batch).float()
        values, ids = top_logprobs(logits, piece.next_tokens, min(piece.num_top, logits.shape[1]))
        scored.append(to_token_logprobs(values, ids, [ids.shape[1]] * len(values)))
    return scored


def top_logprobs_by_torch(
    logits: Tensor, tokens: NDArray[np.int64], count: int
) -> tuple[NDArray[np.float32], NDArray[np.int64]]:
    """`TopLogprobs` by torch's operators, on any device."""
    top = logits.topk(count)
    chosen = torch.cat((logits.gather(-1, torch.from_numpy(tokens).to(logits.device)[:, None]), top.values), 1)
    values = chosen - logits.logsumexp(-1, keepdim=True)
    return values.cpu().numpy(), top.indices.cpu().numpy()
