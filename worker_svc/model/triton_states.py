"""The last hidden states of whole prompts by a decoder on a GPU, as embeddings need them.

The layers are those of `triton_body`. Keys and values are needed until the layer's attention has read them, so all
layers share the cache of one, unless they differ in their heads or read other layers' keys and values. It has room for
the prompts of the call.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from numpy.typing import NDArray
from torch import Tensor

from worker_svc.batch import lay_out_prompts
from worker_svc.cache import CacheShape, LayerCache
from worker_svc.gpu.inputs import ForwardInputs
from worker_svc.model.building import build_body, drop_head
from worker_svc.model.description import ExpertsSpec, ModelDescription
from worker_svc.model.device_formats import Quantization
from worker_svc.model.triton_body import (
    AttentionLimits,
    TritonBody,
    TritonBodyBuilder,
    check_description,
    make_attention,
)
from worker_svc.model.weights import Checkpoint, open_checkpoint
from worker_svc.wanted_states import Places, wanted_states

_BLOCK_SIZE = 16  # the default of workers, for which the table of compiled kernels has every shape of heads


class TritonStates:
    """A decoder without its head, as the backend of an encoder. For one thread. With `deterministic`, a prompt's bits
    do not depend on the other prompts of its call. `quantization` is the format of linear layers; None: the model's
    dtype.
    """

    def __init__(
        self,
        description: ModelDescription,
        checkpoint: Checkpoint,
        *,
        deterministic: bool = False,
        quantization: Quantization | None = None,
    ) -> None:
        """Raises UnsupportedModel if the description is not supported, or tensors do not match it."""
        check_description(description)
        self._description = description
        builder = TritonBodyBuilder(deterministic, quantization)
        self._body = TritonBody(description, build_body(description, checkpoint, builder))
        drop_head(description, checkpoint)

    def __call__(
        self, prompts: Sequence[Sequence[int]], num_first: Sequence[int] | None = None, places: Places = None
    ) -> list[Tensor]:
        """The hidden states of each prompt after the last norm [num_tokens, hidden_size], or those that `places`
        want. No prompt is empty. A decoder has one type of tokens, so `num_first` has no effect.
        """
        batch = lay_out_prompts(prompts, _BLOCK_SIZE)
        caches = self._allocate_caches(int(batch.block_tables.max()) + 1)
        most = AttentionLimits(len(batch.token_ids), len(prompts), self._description.context_length)
        # Without the plans of decodes, which a prompt of one token would take, with other bits than in tiles
        attention = make_attention(self._description, self._body.dtype, caches, most, deterministic=True)
        tokens, upload = self._upload(batch.token_ids), self._upload
        inputs = ForwardInputs(
            tokens,
            upload(batch.positions),
            upload(batch.slots),
            upload(batch.block_tables),
            upload(batch.query_starts),
            upload(batch.context_lens),
            logits_indices=None,
            num_single=0,
            max_query_len=batch.max_query_len,
            plan=[upload(array) for array in attention.plan(batch, 0)],
        )
        # No token is one that was just sampled.
        states = self._body(inputs, tokens, caches, attention.attend(inputs))
        return wanted_states(torch.split(states, list(map(len, prompts))), places)

    def _allocate_caches(self, num_blocks: int) -> list[LayerCache]:
        """The cache that each layer reads."""
        layout = self._description.layout
        shape = CacheShape.of_whole_sequences(layout, _BLOCK_SIZE, self._body.dtype)
        return shape.allocate(num_blocks, self._body.device).of_layers(layout)

    def _upload(self, array: NDArray[Any]) -> Tensor:
        return torch.from_numpy(array).to(self._body.device)


def prompt_bytes(description: ModelDescription, num_tokens: int, dtype: torch.dtype) -> int:
    """About how much memory the computation of a prompt takes at its peak, beside the weights."""
    hidden = description.hidden_size
    per_token = 0
    for layer in description.layers:
        attention = layer.attention
        # Queries and their outputs are there until the layer ends.
        heads = 2 * attention.num_heads * attention.head_dim
        mlp = max(3 * one.width for one in layer.mlps)
        if isinstance(layer.mlp, ExpertsSpec):
            mlp += layer.mlp.num_chosen * (mlp + hidden)  # a row for each expert of a token
        per_token = max(per_token, heads + max(sum(attention.qkv.outputs), mlp))
    if (inputs := description.layer_inputs) is not None:
        per_token += 2 * inputs.width * len(description.layers)  # what is projected, and the vectors
    # Keys and values are there until the next layer's, or until the end, as those of other layers.
    cache = CacheShape.of_whole_sequences(description.layout, _BLOCK_SIZE, dtype)
    # The sum of the layers is float32.
    return num_tokens * (3 * 4 * hidden + per_token * dtype.itemsize + -(-cache.block_bytes // _BLOCK_SIZE))


def load_triton_states(
    description: ModelDescription,
    directory: Path,
    dtype: torch.dtype,
    device: torch.device,
    *,
    deterministic: bool = False,
    quantization: Quantization | None = None,
) -> TritonStates:
    """Loads the decoder of a directory without its head. Raises UnsupportedModel if it is not supported, or its tensors
    do not match.
    """
    with open_checkpoint(directory, dtype, device) as checkpoint:
        return TritonStates(description, checkpoint, deterministic=deterministic, quantization=quantization)
