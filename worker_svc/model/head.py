"""The last product: from hidden states to the logits of all tokens, in float32 whatever the weights are."""

import math

import torch
from torch import Tensor

from worker_svc.model.linear import make_linear

# A 16-bit logit is off by up to half a unit in its last place: 2**-8 of it in bfloat16, less in float16. The maximum
# may come out below another logit by the sum of both errors.
_TOLERANCE = 2.0**-7
# A row with more logits than this so close to its maximum has no clear maximum.
_MAX_NEAR = 64
# Close logits are searched only in groups that contain one.
_GROUP = 64


class Head:
    """Logits [rows, vocab_size] of hidden states [rows, hidden_size].

    Logits of about 25 are 0.125 apart in bfloat16, which makes ties of many near choices. On a GPU the product is
    returned in float32. oneDNN rounds it; the few logits close to the maximum are then computed again, one by one.
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
    """Rows and tokens of the logits [rows, vocab_size] that may be the maximum of their rows."""
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
