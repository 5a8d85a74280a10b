"""The last hidden states of whole prompts by a decoder's compiled code on a CPU, as embeddings need them.

The layers are those of `compiled_body`. Keys and values are needed until the layer's attention has read them, so all
layers share the cache of one, unless they differ in their heads or read other layers' keys and values.
"""

from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from quire_kernels.cpu.attention import check_compiled_support
from quire_kernels.cpu.decoder import Decoder, DecoderStepArgs
from quire_kernels.cpu.linear import PANEL, MatrixFormat
from quire_kernels.cpu.thread_pool import ThreadPool
from worker_svc.batch import lay_out_prompts
from worker_svc.cache import CacheShape, KVCache
from worker_svc.model import support
from worker_svc.model.building import build_body, drop_head
from worker_svc.model.compiled_body import COMPUTED as COMPUTED_OF_TOKENS
from worker_svc.model.compiled_body import CompiledBody, token_args
from worker_svc.model.compiled_builder import CompiledBuilder
from worker_svc.model.description import ExpertsSpec, ModelDescription
from worker_svc.model.support import Feature
from worker_svc.model.weights import Checkpoint, open_checkpoint
from worker_svc.wanted_states import Places, wanted_rows

COMPUTED = COMPUTED_OF_TOKENS | {Feature.BIDIRECTIONAL}
_BLOCK_SIZE = 16  # tokens in a block of keys and values
_CPU = torch.device("cpu")


def unsupported_reason(description: ModelDescription, dtype: torch.dtype) -> str | None:
    """Why the compiled kernels do not compute a decoder's states; None: they do."""
    reason = support.unsupported_reason(description, COMPUTED)
    return reason or check_compiled_support(description.layout.head_dims, _BLOCK_SIZE, dtype)


class CompiledStates:
    """A decoder without its head, as the backend of an encoder. For one thread.

    A prompt's bits do not depend on the other prompts of its call.
    """

    def __init__(
        self,
        description: ModelDescription,
        checkpoint: Checkpoint,
        thread_pool: ThreadPool,
        weights: MatrixFormat = MatrixFormat.PLAIN,
    ) -> None:
        """`weights`: the format of layers that name none.

        Raises UnsupportedModel if the description is not supported, or tensors do not match it.
        """
        support.check_computed("the compiled kernels", description, COMPUTED)
        builder = CompiledBuilder(thread_pool, checkpoint.dtype, weights)
        self._body = CompiledBody(description, build_body(description, checkpoint, builder), builder)
        drop_head(description, checkpoint)
        self._cache, self._decoder = self._with_blocks(1)

    def __call__(
        self, prompts: Sequence[Sequence[int]], num_first: Sequence[int] | None = None, places: Places = None
    ) -> list[Tensor]:
        """The hidden states of each prompt after the last norm, float32 [num_tokens, hidden_size], or those that
        `places` want. No prompt is empty. A decoder has one type of tokens, so `num_first` has no effect.
        """
        batch = lay_out_prompts(prompts, _BLOCK_SIZE)
        num_blocks, num_allocated = int(batch.block_tables.max()) + 1, len(self._cache.blocks)
        if num_blocks > num_allocated:
            # By half at least: the decoder over another cache allocates all of its own memory again.
            self._cache, self._decoder = self._with_blocks(max(num_blocks, num_allocated * 3 // 2))
        hidden_size = self._body.description.hidden_size
        rows, counts = wanted_rows(list(map(len, prompts)), places)
        states = torch.empty(len(rows), -(-hidden_size // PANEL) * PANEL)  # whole vectors
        self._decoder(
            DecoderStepArgs(
                *token_args(batch),
                num_samples=len(rows),
                logits_indices=rows.ctypes.data,
                states=states.data_ptr(),
                states_stride=states.shape[1],
            )
        )
        return list(torch.split(states[:, :hidden_size], counts))

    def _with_blocks(self, num_blocks: int) -> tuple[KVCache, Decoder]:
        """A cache of so many blocks, and the decoder over it."""
        layout = self._body.description.layout
        cache = CacheShape.of_whole_sequences(layout, _BLOCK_SIZE, self._body.dtype).allocate(num_blocks, _CPU)
        return cache, self._body.over(cache, head=None)


def prompt_bytes(description: ModelDescription, num_tokens: int, dtype: torch.dtype) -> int:
    """About how much memory the computation of a prompt takes at its peak, beside the weights."""
    hidden, per_token = description.hidden_size, 0
    for layer in description.layers:
        attention = layer.attention
        queries = attention.qkv.outputs[0]
        # Queries, keys and values as they are multiplied, in float32; rotated queries; and what they have attended to.
        heads = 4 * sum(attention.qkv.outputs) + dtype.itemsize * (queries + attention.output.inputs)
        latent = attention.latent
        if latent is not None:
            # Of each head: its query as it is compared, before and after that; in float32 if it is of a latent one.
            heads += dtype.itemsize * attention.num_heads * (2 * latent.rank + latent.rotated_dim + latent.plain_dim)
            heads += 0 if latent.query_up is None else 4 * attention.num_heads * latent.query_dim
        width = max(one.width for one in layer.mlps)
        if isinstance(layer.mlp, ExpertsSpec):
            width = layer.mlp.num_chosen * (width + hidden)  # a row for each expert of a token
        per_token = max(per_token, heads + dtype.itemsize * width)
    if (inputs := description.layer_inputs) is not None:
        per_token += 4 * inputs.width * len(description.layers)
    cache = CacheShape.of_whole_sequences(description.layout, _BLOCK_SIZE, dtype)
    # The sums of the layers, what a layer adds, the states that are returned, and the inputs of products.
    return num_tokens * ((3 * 4 + dtype.itemsize) * hidden + per_token + -(-cache.block_bytes // _BLOCK_SIZE))


def load_compiled_states(
    description: ModelDescription,
    directory: Path,
    dtype: torch.dtype,
    thread_pool: ThreadPool,
    weights: MatrixFormat = MatrixFormat.PLAIN,
) -> CompiledStates:
    """Loads the decoder of a directory without its head. Raises UnsupportedModel if it is not supported, or its tensors
    do not match.
    """
    with open_checkpoint(directory, dtype, _CPU) as checkpoint:
        return CompiledStates(description, checkpoint, thread_pool, weights)
