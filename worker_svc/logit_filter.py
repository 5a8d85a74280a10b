"""The interface of a logit filter. Each filter is a module of `logit_filters`."""

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from worker_svc.step import SamplingParams


class LogitFilter(Protocol):
    """Drops tokens by a sampling parameter other than top-k, top-p and min-p.

    It receives the logits after bias, penalties and the filters before it, in the order of their names, and before
    temperature. It works on tensors of any device and so serves every backend. It must not wait for a device: values of
    the host get there by `column` and `to_device`.
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
    return to_device(values, like.dtype, like.device)[:, None]


def to_device(values: Sequence[float], dtype: torch.dtype, device: torch.device) -> Tensor:
    """The values on a device. The host does not wait until they are there."""
    tensor = torch.tensor(values, dtype=dtype)
    return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor.to(device)
