"""The interface of a logit filter. Each filter is a module of `logit_filters`."""

from collections.abc import Sequence
from typing import Protocol

from torch import Tensor

from worker_svc.step import SamplingParams


class LogitFilter(Protocol):
    """Drops tokens by a sampling parameter other than top-k, top-p and min-p.

    It receives the logits after bias, penalties and the filters before it, in the order of their names, and before
    temperature. It works on tensors of any device and so serves every backend.
    """

    def applies(self, params: SamplingParams) -> bool:
        """Whether it may drop tokens with these parameters."""

    def __call__(self, logits: Tensor, params: Sequence[SamplingParams]) -> None:
        """Sets the logits of dropped tokens to -inf, in place.

        `logits` are float32 [rows, vocab]; suppressed tokens are -inf, or the smallest number, already. A row depends
        only on its own logits and parameters. It keeps at least one of the tokens that are not suppressed, except for
        allowed tokens, which all may be suppressed.
        """


def column(values: Sequence[float], like: Tensor) -> Tensor:
    """A value for each row of logits: [rows, 1]."""
    return like.new_tensor(values)[:, None]
