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

    def __init__(self, weight: Tensor, bias: Tensor | None = None) -> None:
        """`weight` is [vocab_size, hidden_size], which may be the embedding too, and `bias` [vocab_size]."""
        self._weight = weight
        self._bias = None if bias is None else bias.float()
        self._linear = make_linear(weight)

    def __call__(self, hidden: Tensor) -> Tensor:
        if hidden.dtype == torch.float32:
            return self._biased(self._linear(hidden))
        if hidden.device.type != "cpu":
            return self._biased(torch.mm(hidden, self._weight.t(), out_dtype=torch.float32))
        products = self._linear(hidden).float()
        largest = None if self._bias is None else products.abs().amax(-1, keepdim=True)
        logits = self._biased(products)
        rows, tokens = _near_argmax(logits, largest)
        exact = (hidden[rows].float() * self._weight[tokens].float()).sum(-1)
        logits[rows, tokens] = exact if self._bias is None else exact + self._bias[tokens]
        return logits

    def _biased(self, products: Tensor) -> Tensor:
        return products if self._bias is None else products.add_(self._bias)


def _near_argmax(logits: Tensor, largest: Tensor | None) -> tuple[Tensor, Tensor]:
    """Rows and tokens of the logits [rows, vocab_size] that may be the maximum of their rows. `largest` [rows, 1] are
    the rows' largest absolute products where something was added to them.
    """
    width = math.gcd(logits.shape[1], _GROUP)
    groups = logits.view(len(logits), -1, width)
    tops = groups.amax(-1)
    best = tops.amax(-1, keepdim=True)
    limits = best - (best.abs() if largest is None else largest) * _TOLERANCE
    row_of, group_of = (tops >= limits).nonzero(as_tuple=True)
    place, member = (groups[row_of, group_of] >= limits[row_of]).nonzero(as_tuple=True)
    rows, tokens = row_of[place], group_of[place] * width + member
    few = (rows.bincount(minlength=len(logits)) <= _MAX_NEAR)[rows]
    return rows[few], tokens[few]
