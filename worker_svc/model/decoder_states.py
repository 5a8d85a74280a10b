"""The last hidden states of whole prompts by a decoder, as embeddings need them, without a KV cache."""

from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from worker_svc.model.building import build_body, drop_head
from worker_svc.model.description import ModelDescription
from worker_svc.model.prompt_groups import PromptGroup, prompt_groups
from worker_svc.model.support import Feature, check_computed
from worker_svc.model.torch_layers import TorchBodyBuilder
from worker_svc.model.torch_model import COMPUTED as TORCH_COMPUTED
from worker_svc.model.torch_model import TorchBody
from worker_svc.model.weights import Checkpoint, open_checkpoint
from worker_svc.model_layout import LayerAttention, ModelLayout
from worker_svc.wanted_states import Places, wanted_states

COMPUTED = TORCH_COMPUTED - {Feature.SINKS, Feature.SOFT_CAP} | {Feature.BIDIRECTIONAL}


class DecoderStates:
    """A decoder without its head, as the backend of an encoder, by torch's operators. For one thread."""

    def __init__(self, description: ModelDescription, checkpoint: Checkpoint) -> None:
        """Raises UnsupportedModel if the description is not supported, or tensors do not match it."""
        check_computed("embeddings of decoders", description, COMPUTED)
        self._device = checkpoint.device
        self._layout = description.layout
        self._body = TorchBody(description, build_body(description, checkpoint, TorchBodyBuilder()))
        drop_head(description, checkpoint)

    def __call__(
        self, prompts: Sequence[Sequence[int]], num_first: Sequence[int] | None = None, places: Places = None
    ) -> list[Tensor]:
        """The hidden states of each prompt after the last norm [num_tokens, hidden_size], or those that `places`
        want. No prompt is empty. A decoder has one type of tokens, so `num_first` has no effect.
        """
        lengths = [len(prompt) for prompt in prompts]
        flat = [token_id for prompt in prompts for token_id in prompt]
        tokens = torch.tensor(flat, dtype=torch.long, device=self._device)
        positions = torch.cat([torch.arange(length) for length in lengths]).to(self._device)
        attention = _PromptAttention(prompt_groups(lengths, self._device), self._layout)
        return wanted_states(torch.split(self._body(tokens, positions, attention), lengths), places)


class _PromptAttention:
    """Attention within each prompt; a `worker_svc.attention.StepAttention`."""

    def __init__(self, groups: Sequence[PromptGroup], layout: ModelLayout) -> None:
        self._groups, self._layers, self._kv_of_layers = groups, layout.layers, layout.kv_of_layers
        self._shared = {place for place, count in Counter(layout.kv_of_layers).items() if count > 1}
        self._kept: dict[int, tuple[Tensor, Tensor]] = {}  # keys and values that layers share
        self._masks: dict[tuple[int, int], Tensor] = {}

    def __call__(
        self, layer: int, query: Tensor, key: Tensor | None, value: Tensor | None, sinks: Tensor | None = None
    ) -> Tensor:
        assert sinks is None, "a feature that is refused"
        place = self._kv_of_layers[layer]
        if key is None or value is None:
            key, value = self._kept[place]
        elif place in self._shared:
            self._kept[place] = key, value
        output = query.new_empty(query.shape)
        for group in self._groups:
            queries, keys, values = (heads[group.rows].transpose(1, 2) for heads in (query, key, value))
            attended = self._attend(queries, keys, values, self._layers[layer], group.mask)
            flat = attended.transpose(1, 2).flatten(0, 1)
            output[group.targets] = flat if group.sources is None else flat[group.sources]
        return output

    def _attend(self, query: Tensor, key: Tensor, value: Tensor, how: LayerAttention, tokens: Tensor | None) -> Tensor:
        """The output [num_prompts, num_heads, longest, head_dim]. `tokens` hides rows beyond a prompt's end, which are
        after all of its tokens; None: there are none.
        """
        longest = query.shape[2]
        sees_all = how.window is None or how.window >= longest
        mask = None if sees_all else self._mask(longest, how, query.device)
        if how.bidirectional and tokens is not None:
            mask = tokens if mask is None else mask & tokens
        is_causal = sees_all and not how.bidirectional
        return scaled_dot_product_attention(
            query, key, value, mask, is_causal=is_causal, scale=how.scale, enable_gqa=True
        )

    def _mask(self, longest: int, how: LayerAttention, device: torch.device) -> Tensor:
        """Which keys each query sees of a window, bool [longest, longest]. All layers of a window share it."""
        assert how.window is not None
        mask = self._masks.get((longest, how.window))
        if mask is None:
            ones = torch.ones(longest, longest, dtype=torch.bool, device=device)
            mask = ones.tril_(how.window - 1 if how.bidirectional else 0).triu_(1 - how.window)
            self._masks[longest, how.window] = mask
        return mask


def prompt_bytes(description: ModelDescription, num_tokens: int, dtype: torch.dtype) -> int:
    """About how much memory the computation of a prompt takes at its peak, beside the weights."""
    hidden = 3 * 4 * description.hidden_size  # the sums of the layers are float32
    # The gate, the product with it and its activation; queries, keys and values, rotated and repeated for all heads.
    per_token = max(
        max(*(3 * mlp.width for mlp in layer.mlps), 8 * layer.attention.num_heads * layer.attention.head_dim)
        for layer in description.layers
    )
    if (inputs := description.layer_inputs) is not None:
        per_token += 3 * inputs.width * len(description.layers)  # what is projected, its norm, and the vectors
    windows = {layer.attention.window for layer in description.layers}
    num_masks = sum(window is not None and window < num_tokens for window in windows)
    # A mask is bool, and torch makes numbers of it.
    masks = num_masks * num_tokens**2 + bool(num_masks) * num_tokens**2 * dtype.itemsize
    return num_tokens * (hidden + per_token * dtype.itemsize) + masks


def load_decoder_states(
    description: ModelDescription, directory: Path, dtype: torch.dtype, device: torch.device
) -> DecoderStates:
    """Loads the decoder of a directory without its head. Raises UnsupportedModel if it is not supported, or its tensors
    do not match.
    """
    with open_checkpoint(directory, dtype, device) as checkpoint:
        return DecoderStates(description, checkpoint)
