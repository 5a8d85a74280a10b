"""The last hidden states of whole prompts by a decoder, as embeddings need them: causal attention, and no KV cache."""

from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from worker_svc.model.building import build_body, drop_head
from worker_svc.model.config import UnsupportedModel, raw_config
from worker_svc.model.description import ModelDescription
from worker_svc.model.prompt_groups import PromptGroup, prompt_groups
from worker_svc.model.support import Feature, check_computed
from worker_svc.model.torch_layers import TorchBodyBuilder
from worker_svc.model.torch_model import COMPUTED as TORCH_COMPUTED
from worker_svc.model.torch_model import TorchBody
from worker_svc.model.weights import Checkpoint, open_checkpoint
from worker_svc.model_layout import LayerAttention

COMPUTED = TORCH_COMPUTED - {Feature.SOFT_CAP}


class DecoderStates:
    """A decoder without its head, as the backend of an encoder, by torch's operators. For one thread."""

    def __init__(self, description: ModelDescription, checkpoint: Checkpoint) -> None:
        """Raises UnsupportedModel if the description is not supported, or tensors do not match it."""
        check_computed("embeddings of decoders", description, COMPUTED)
        self._device = checkpoint.device
        self._layers = description.layout.layers
        self._body = TorchBody(description, build_body(description, checkpoint, TorchBodyBuilder()))
        drop_head(description, checkpoint)

    def __call__(self, prompts: Sequence[Sequence[int]], num_first: Sequence[int] | None = None) -> list[Tensor]:
        """The hidden states of each prompt after the last norm [num_tokens, hidden_size]. No prompt is empty. A decoder
        has one type of tokens, so `num_first` has no effect.
        """
        lengths = [len(prompt) for prompt in prompts]
        flat = [token_id for prompt in prompts for token_id in prompt]
        tokens = torch.tensor(flat, dtype=torch.long, device=self._device)
        positions = torch.cat([torch.arange(length) for length in lengths]).to(self._device)
        attention = _PromptAttention(prompt_groups(lengths, self._device), self._layers)
        return list(torch.split(self._body(tokens, positions, attention), lengths))


class _PromptAttention:
    """Causal attention within each prompt; a `worker_svc.attention.StepAttention`."""

    def __init__(self, groups: Sequence[PromptGroup], layers: Sequence[LayerAttention]) -> None:
        self._groups, self._layers = groups, layers
        self._masks: dict[tuple[int, int], Tensor] = {}

    def __call__(self, layer: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        output = query.new_empty(query.shape)
        for group in self._groups:
            queries, keys, values = (heads[group.rows].transpose(1, 2) for heads in (query, key, value))
            attended = self._attend(queries, keys, values, self._layers[layer])
            flat = attended.transpose(1, 2).flatten(0, 1)
            output[group.targets] = flat if group.sources is None else flat[group.sources]
        return output

    def _attend(self, query: Tensor, key: Tensor, value: Tensor, how: LayerAttention) -> Tensor:
        """The output [num_prompts, num_heads, longest, head_dim]. Rows beyond a prompt's end are after its tokens,
        which do not see them.
        """
        longest = query.shape[2]
        if how.window is None or how.window >= longest:
            return scaled_dot_product_attention(query, key, value, is_causal=True, scale=how.scale, enable_gqa=True)
        mask = self._mask(longest, how.window, query.device)
        return scaled_dot_product_attention(query, key, value, attn_mask=mask, scale=how.scale, enable_gqa=True)

    def _mask(self, longest: int, window: int, device: torch.device) -> Tensor:
        """Which keys each query sees, bool [longest, longest]. All layers of a window share it."""
        mask = self._masks.get((longest, window))
        if mask is None:
            mask = torch.ones(longest, longest, dtype=torch.bool, device=device).tril_().triu_(1 - window)
            self._masks[longest, window] = mask
        return mask


def prompt_bytes(description: ModelDescription, num_tokens: int, dtype: torch.dtype) -> int:
    """About how much memory the computation of a prompt takes at its peak, beside the weights."""
    hidden = 3 * 4 * description.hidden_size  # the sums of the layers are float32
    # The gate, the product with it and its activation; queries, keys and values, rotated and repeated for all heads.
    per_token = max(
        max(*(3 * mlp.width for mlp in layer.mlps), 8 * layer.attention.num_heads * layer.attention.head_dim)
        for layer in description.layers
    )
    windows = {layer.attention.window for layer in description.layers}
    num_masks = sum(window is not None and window < num_tokens for window in windows)
    # A mask is bool, and torch makes numbers of it.
    masks = num_masks * num_tokens**2 + bool(num_masks) * num_tokens**2 * dtype.itemsize
    return num_tokens * (hidden + per_token * dtype.itemsize) + masks


def check_causal(directory: Path) -> None:
    """Raises UnsupportedModel if tokens of a directory's model see later ones."""
    if raw_config(directory).get("is_causal") is False:
        raise UnsupportedModel(f"the model in {directory} is a decoder whose attention is not causal: not supported")


def load_decoder_states(
    description: ModelDescription, directory: Path, dtype: torch.dtype, device: torch.device
) -> DecoderStates:
    """Loads the decoder of a directory without its head. Raises UnsupportedModel if it is not supported, or its tensors
    do not match.
    """
    check_causal(directory)
    with open_checkpoint(directory, dtype, device) as checkpoint:
        return DecoderStates(description, checkpoint)
