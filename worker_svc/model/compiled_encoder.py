"""An encoder by compiled code on a CPU: one call computes all layers of many prompts, without padding."""

import math
from collections.abc import Sequence
from pathlib import Path

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from quire_kernels.cpu.activations import ActivationCode
from quire_kernels.cpu.attention import check_compiled_support
from quire_kernels.cpu.encoder import PADDING, DistanceScoresArgs, Encoder, EncoderLayerArgs, EncoderModelArgs
from quire_kernels.cpu.linear import MatrixArgs, MatrixFormat
from quire_kernels.cpu.norms import NormArgs, NormCode, pack_norm
from quire_kernels.cpu.thread_pool import ThreadPool
from worker_svc.errors import UnsupportedModel
from worker_svc.model.compiled_builder import CompiledBuilder
from worker_svc.model.description import LinearLayer, MlpKind
from worker_svc.model.encoder_description import EncoderDescription, EncoderLayer, LayerNorm
from worker_svc.model.encoder_weights import open_encoder, take_distance_scores, take_embeddings
from worker_svc.model.linear_weights import LinearWeights
from worker_svc.model.panel_order import HalfHeads
from worker_svc.model.rope import inverse_frequencies
from worker_svc.model.weights import Checkpoint
from worker_svc.wanted_states import Places, wanted_rows

# Tokens of a block of keys and values in encoder.h.
_BLOCK_SIZE = 16


def unsupported_reason(description: EncoderDescription, dtype: torch.dtype) -> str | None:
    """Why the compiled kernels do not support an encoder; None: they do."""
    if len({(layer.mlp.width, layer.mlp.kind, layer.mlp.activation) for layer in description.layers}) > 1:
        return "layers with MLPs of different widths, kinds or activations"
    head_dim, rope = description.head_dim, description.rope
    if rope is not None and (not HalfHeads.suits(head_dim) or rope.rotated_dims is not None):
        return f"rotary positions of an encoder with heads of {head_dim}, or of a part of them"
    return check_compiled_support([head_dim], _BLOCK_SIZE, dtype)


class CompiledEncoder:
    """An encoder's weights in the layout of the compiled code. For one thread.

    A prompt's bits do not depend on the other prompts of its call. On a processor with AMX, products of float32 have 16
    bits of precision of their factors' 24, unless weights are in codes.
    """

    def __init__(
        self,
        description: EncoderDescription,
        checkpoint: Checkpoint,
        thread_pool: ThreadPool,
        weights: MatrixFormat = MatrixFormat.PLAIN,
    ) -> None:
        """`weights`: the format of layers. Embeddings are in the checkpoint's dtype, and norms in float32.

        Raises UnsupportedModel if the description is not supported, or tensors do not match it.
        """
        refused = unsupported_reason(description, checkpoint.dtype)
        if refused is not None:
            raise UnsupportedModel(f"the compiled kernels cannot be used: {refused}")
        self.description = description
        # Scores by distances are computed by vectors.
        may_use_amx = description.relative_positions is None
        self._builder = CompiledBuilder(
            thread_pool,
            checkpoint.dtype,
            weights,
            of_encoder=True,
            may_use_amx=may_use_amx,
            pairs_halves=description.rope is not None,
        )
        self.use_amx = self._builder.use_amx
        """Whether products are computed by AMX."""
        self._checkpoint = checkpoint
        self._kept: list[object] = []  # whose addresses the library has
        embeddings, mlp = take_embeddings(description, checkpoint), description.layers[0].mlp
        arguments = EncoderModelArgs(
            description.hidden_size,
            mlp.width,
            len(description.layers),
            description.num_heads,
            ActivationCode[mlp.activation.name],
            int(mlp.kind is MlpKind.GATED),
            self._address(embeddings.words),
            None if embeddings.positions is None else self._address(embeddings.positions.float()),
            self._address(embeddings.types.float()),
            *self._angles(),
            self._norm(description.embedding_norm),
            self._distances(),
            (EncoderLayerArgs * len(description.layers))(*map(self._layer, description.layers)),
        )
        del self._checkpoint, self._builder
        # The pool's threads compute. torch's own threads would spin and compete with them.
        torch.set_num_threads(1)
        self._encoder = Encoder(thread_pool, checkpoint.dtype, arguments, use_amx=self.use_amx)

    def __call__(
        self, prompts: Sequence[Sequence[int]], num_first: Sequence[int] | None = None, places: Places = None
    ) -> list[Tensor]:
        """The last hidden states of each prompt, float32 [num_tokens, hidden_size]. `num_first` is how many tokens of
        each prompt are of the first type, at least one; None: all. Only the states that `places` want are returned;
        after its attention, the last layer computes only these. Raises ValueError for an empty prompt.
        """
        rows, counts = wanted_rows(list(map(len, prompts)), places)
        return list(torch.split(self._encoder(prompts, num_first, rows), counts))

    def _address(self, tensor: Tensor) -> int:
        kept = tensor.contiguous()
        self._kept.append(kept)
        return kept.data_ptr()

    def _norm(self, norm: LayerNorm) -> NormArgs:
        weight, bias = (self._checkpoint.take(f"{norm.name}.{part}", norm.size) for part in ("weight", "bias"))
        packed = pack_norm(NormCode.LAYER, weight, bias, norm.eps)
        self._kept.append(packed)
        return packed.args()

    def _angles(self) -> tuple[int | None, int | None]:
        """The cosines and sines of all positions."""
        rope = self.description.rope
        if rope is None:
            return None, None
        frequencies = inverse_frequencies(rope, self.description.head_dim)
        angles = torch.arange(self.description.context_length)[:, None].float() * frequencies
        return self._address(angles.cos() * rope.attention_factor), self._address(angles.sin() * rope.attention_factor)

    def _distances(self) -> DistanceScoresArgs:
        relative, num_heads = self.description.relative_positions, self.description.num_heads
        if relative is None:
            return DistanceScoresArgs()
        scores = take_distance_scores(relative, num_heads, self.description.context_length, self._checkpoint)
        # They are added before products are divided by this.
        scaled = F.pad(scores.float() * math.sqrt(self.description.head_dim), (0, PADDING))
        return DistanceScoresArgs(self._address(scaled), scaled.shape[1], scores.shape[1] // 2)

    def _linear(self, layer: LinearLayer) -> MatrixArgs:
        matrix = self._builder.linear(LinearWeights(layer, self._checkpoint))
        self._kept.append(matrix)
        return matrix.args()

    def _layer(self, layer: EncoderLayer) -> EncoderLayerArgs:
        return EncoderLayerArgs(
            self._linear(layer.qkv),
            self._linear(layer.output),
            self._norm(layer.attention_norm),
            self._linear(layer.mlp.gate_up),
            self._linear(layer.mlp.down),
            self._norm(layer.mlp_norm),
        )


def load_compiled_encoder(
    description: EncoderDescription,
    directory: Path,
    dtype: torch.dtype,
    thread_pool: ThreadPool,
    weights: MatrixFormat = MatrixFormat.PLAIN,
) -> CompiledEncoder:
    """Loads the encoder of a directory. Raises UnsupportedModel if it is not supported, or its tensors do not match."""
    with open_encoder(description, directory, dtype, torch.device("cpu")) as checkpoint:
        return CompiledEncoder(description, checkpoint, thread_pool, weights)
