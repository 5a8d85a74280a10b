"""Log-probabilities of sampled tokens, computed on the device."""

import torch
from torch import Tensor

from quire_kernels.log_norms import log_norms

_LOW = 2**32 - 1


def compute_logprobs(logits: Tensor, tokens: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """From the model's own logits [rows, vocab_size]: those of each row's token [rows], and of its top `count` tokens.

    Returns float32 [rows, 1 + count], the token's first, and the top tokens int32 [rows, count]. Of equal logits the
    lower token id comes first, so that neither `count` nor the other rows matter. The values of a token of -1 mean
    nothing.
    """
    norms = log_norms(logits)[:, None]
    ids = _LOW - (_keys(logits).topk(count).values & _LOW)
    chosen = torch.cat((tokens.clamp(min=0)[:, None], ids), 1)
    return logits.gather(-1, chosen) - norms, ids.int()


def _keys(logits: Tensor) -> Tensor:
    """Integers [rows, vocab_size] in the order of the logits; of equal logits, lower token ids have larger keys."""
    bits = logits.view(torch.int32)
    # The order of negative floats is the reverse of that of their bits.
    ordered = bits ^ (bits >> 31 & 0x7FFFFFFF)
    places = torch.arange(logits.shape[1], device=logits.device)
    return ordered.long() << 32 | _LOW - places
