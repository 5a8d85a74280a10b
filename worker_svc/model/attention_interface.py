"""The attention function that transformers' modules call: its name in their registry, and the arguments of a call."""

from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor
from transformers import AttentionInterface

SINKS = "s_aux"
"""What transformers calls an argument with one more score for each head, of a key without a value."""
PAGED = "quire_paged"
"""Name of the attention function. No mask function has this name, so transformers builds no masks."""


@dataclass(frozen=True, slots=True)
class AttentionCall:
    """A layer's arguments for the tokens of one pass."""

    layer: int
    query: Tensor
    """[num_tokens, num_heads, head_dim]"""
    key: Tensor
    """[num_tokens, num_kv_heads, head_dim]"""
    value: Tensor
    """[num_tokens, num_kv_heads, head_dim]"""
    mask: Tensor | None
    options: dict[str, Any]

    @property
    def sinks(self) -> Tensor | None:
        """float32 [num_heads], if the layer has some."""
        sinks: Tensor | None = self.options.get(SINKS)
        return None if sinks is None else sinks.float()


class AttentionHook(Protocol):
    """Computes the attention of one pass."""

    def __call__(self, call: AttentionCall) -> Tensor:
        """The attention output of each token, [num_tokens, num_heads, head_dim]."""


# The hook of the pass in this thread: not every architecture passes arguments on to its layers.
_hook: ContextVar[AttentionHook] = ContextVar("attention hook")


def run(model: Any, token_ids: Tensor, positions: Tensor, logits_indices: Tensor | None, hook: AttentionHook) -> Tensor:
    """Logits float32 [num_samples, vocab_size] after the tokens [num_tokens] at `logits_indices`, or after all; `hook`
    computes the attention.
    """
    before = _hook.set(hook)
    keep = 0 if logits_indices is None else logits_indices  # as transformers says "all"
    try:
        output = model(input_ids=token_ids[None], position_ids=positions[None], use_cache=False, logits_to_keep=keep)
    finally:
        _hook.reset(before)
    logits: Tensor = output.logits[0].float()
    return logits


def attention_forward(
    module: torch.nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **options: Any
) -> tuple[Tensor, None]:
    """An attention function as transformers calls it, of heads [1, num_heads, num_tokens, head_dim]."""
    layer: Any = module.layer_idx
    call = AttentionCall(layer, _by_token(query), _by_token(key), _by_token(value), attention_mask, options)
    return _hook.get()(call)[None], None


def _by_token(heads: Tensor) -> Tensor:
    """[num_tokens, num_heads, head_dim], contiguous within a head."""
    by_token = heads.squeeze(0).transpose(0, 1)
    return by_token if by_token.stride(2) == 1 else by_token.contiguous()


AttentionInterface.register(PAGED, attention_forward)
