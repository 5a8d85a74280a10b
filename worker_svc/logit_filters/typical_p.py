"""Locally typical sampling (Meister et al., 2022): keeps the tokens whose information is nearest to the entropy."""

from collections.abc import Sequence

from torch import Tensor

from worker_svc.logit_filter import column
from worker_svc.step import SamplingParams


class TypicalFilter:
    """Keeps the most typical tokens whose probabilities reach `typical_p`, like transformers' TypicalLogitsWarper after
    temperature.
    """

    def applies(self, params: SamplingParams) -> bool:
        """Greedy sampling takes the top token, typical or not."""
        return params.typical_p > 0.0 and params.temperature > 0.0

    def __call__(self, logits: Tensor, params: Sequence[SamplingParams]) -> None:
        log_probs = (logits / column([p.temperature for p in params], logits)).log_softmax(-1)
        probs = log_probs.exp()
        entropy = -(probs * log_probs).nansum(-1, keepdim=True)
        distance = (log_probs + entropy).abs()
        nearest, order = distance.sort(-1)
        reached = probs.gather(-1, order).cumsum(-1)
        last = (reached < column([p.typical_p for p in params], logits)).sum(-1, keepdim=True)
        logits.masked_fill_(distance > nearest.gather(-1, last.clamp_(max=logits.shape[1] - 1)), float("-inf"))


FILTER = TypicalFilter()
