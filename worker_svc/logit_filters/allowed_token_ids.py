"""Only given tokens are sampled."""

from collections.abc import Sequence

import torch
from torch import Tensor

from worker_svc.logit_filter import to_device
from worker_svc.step import SamplingParams


class AllowedTokensFilter:
    """Drops all tokens but `allowed_token_ids`. A row none of whose allowed tokens is left has no token."""

    def applies(self, params: SamplingParams) -> bool:
        return bool(params.allowed_token_ids)

    def __call__(self, logits: Tensor, params: Sequence[SamplingParams]) -> None:
        for row, one in zip(logits, params, strict=True):
            ids = to_device(one.allowed_token_ids, torch.int64, logits.device)
            allowed = row[ids]
            row.fill_(float("-inf"))
            row[ids] = allowed


FILTER = AllowedTokensFilter()
