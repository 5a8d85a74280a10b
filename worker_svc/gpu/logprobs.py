"""Log-probabilities of drawn tokens, measured on the device."""

import torch
from torch import Tensor

from quire_kernels.log_norms import log_norms

_LOW = 2**32 - 1


def compute_logprobs(logits: Tensor, tokens: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """Of each row of the model's own logits [rows, vocab_size]: of its token [rows], and of its `count` likeliest.

    Returns float32 [rows, 1 + count], the token's first, and int32 [rows, count], which the likeliest are: of equally
    likely ones the first first, so that neither how many are asked for nor the other rows have a say. A token of -1 has
    none that mean anything.
    """
    norms = log_norms(logits)[:, None]
    ids = _LOW - (_keys(logits).topk(count).values & _LOW)
    chosen = torch.cat((tokens.clamp(min=0)[:, None], ids), 1)
    return logits.gather(-1, chosen) - norms, ids.int()


def _keys(logits: Tensor) -> Tensor:
    """Integers [rows, vocab_size] in the order of the logits, and of equal ones in the reverse of their places."""
    bits = logits.view(torch.int32)
    # Negative floats fall as their bits rise.
    ordered = bits ^ (bits >> 31 & 0x7FFFFFFF)
    places = torch.arange(logits.shape[1], device=logits.device)
    return ordered.long() << 32 | _LOW - places
