"""The last product: from hidden states to the scores of all tokens, in float32 whatever the weights are."""

import math

import torch
from torch import Tensor

from worker_svc.model.linear import make_linear

# A 16-bit score is off by up to half a unit in its last place: 2**-8 of it in bfloat16, less in float16. What is best
# may come out below another score by both their errors.
_TOLERANCE = 2.0**-7
# A row with more scores than this so close to its best has no clear best one.
_MAX_NEAR = 64
# Close scores are looked for only in groups that hold one.
_GROUP = 64


class Head:
    """Logits [rows, vocab_size] of hidden states [rows, hidden_size].

    Scores of about 25 are 0.125 apart in bfloat16, which makes ties of many near choices. On a GPU the product is
    given out in float32. oneDNN rounds it; the few scores close to the best are then computed again, each for itself.
    """

    def __init__(self, weight: Tensor) -> None:
        """`weight` is [vocab_size, hidden_size]; it may be the embedding too."""
        self._weight = weight
        self._linear = make_linear(weight)

    def __call__(self, hidden: Tensor) -> Tensor:
        if hidden.dtype == torch.float32:
            return self._linear(hidden)
        if hidden.is_cuda:
            return torch.mm(hidden, self._weight.t(), out_dtype=torch.float32)
        logits = self._linear(hidden).float()
        rows, tokens = _near_argmax(logits)
        logits[rows, tokens] = (hidden[rows].float() * self._weight[tokens].float()).sum(-1)
        return logits


def _near_argmax(logits: Tensor) -> tuple[Tensor, Tensor]:
    """Rows and tokens of the scores [rows, vocab_size] that may be the best ones of their rows."""
    width = math.gcd(logits.shape[1], _GROUP)
    groups = logits.view(len(logits), -1, width)
    tops = groups.amax(-1)
    best = tops.amax(-1, keepdim=True)
    limits = best - best.abs() * _TOLERANCE
    row_of, group_of = (tops >= limits).nonzero(as_tuple=True)
    place, member = (groups[row_of, group_of] >= limits[row_of]).nonzero(as_tuple=True)
    rows, tokens = row_of[place], group_of[place] * width + member
    few = (rows.bincount(minlength=len(logits)) <= _MAX_NEAR)[rows]
    return rows[few], tokens[few]
