"""A random decoder's compiled forward pass, for tests."""

from ctypes import pointer

import torch
from torch import Tensor
from torch.nn.functional import pad

import compiled
from joined_heads import joined_heads
from quire_kernels.cpu.activations import ActivationCode
from quire_kernels.cpu.amx import pack_for_amx
from quire_kernels.cpu.attention import RuleArgs, SequencesArgs
from quire_kernels.cpu.decoder import (
    Decoder,
    DecoderLayerArgs,
    DecoderModelArgs,
    DecoderStepArgs,
    HeadsArgs,
    LayerInputArgs,
    LayerInputsArgs,
    MlpArgs,
    RopeArgs,
)
from quire_kernels.cpu.linear import MatrixArgs, pack_matrix
from quire_kernels.cpu.norms import NormArgs, pack_norm
from random_decoder import (
    CONTEXT,
    HEADS,
    HIDDEN,
    KV_HEADS,
    VOCAB,
    RandomDecoder,
    RandomInput,
    RandomInputs,
    RandomLayer,
    RandomNorm,
)
from worker_svc.cache import CacheShape
from worker_svc.model_layout import KVShape

BLOCK_SIZE = 16


class Compiled:
    """A model's compiled forward pass, over a cache for one sequence: of numbers, or of codes in 8 bits."""

    def __init__(
        self,
        model: RandomDecoder,
        dtype: torch.dtype,
        use_amx: bool,
        *,
        pairs_halves: bool = False,
        has_codes: bool = False,
        block_size: int = BLOCK_SIZE,
    ) -> None:
        self._kept: list[object] = []
        self._pack = pack_for_amx if use_amx else pack_matrix
        self._pairs_halves = pairs_halves
        num_blocks = -(-CONTEXT // block_size)
        self._table = torch.arange(num_blocks, dtype=torch.int32)
        shape = CacheShape(
            tuple(KVShape(KV_HEADS, layer.dim) for layer in model.layers),
            block_size,
            torch.int8 if has_codes else dtype,
        )
        cache = shape.allocate(num_blocks, torch.device("cpu"))
        layers = (DecoderLayerArgs * len(model.layers))(*map(self._layer, model.layers))
        for number, (layer, arguments) in enumerate(zip(model.layers, layers, strict=True)):
            views = cache.layers[number if layer.shared is None else layer.shared]
            arguments.cache = views.keys.data_ptr()
            arguments.cache_scales = None if views.key_scales is None else views.key_scales.data_ptr()
        ropes = (RopeArgs * len(model.ropes))(
            *(RopeArgs(frequencies.data_ptr(), len(frequencies), factor) for frequencies, factor in model.ropes)
        )
        inputs = None if model.inputs is None else self._inputs(model.inputs)
        of_model = DecoderModelArgs(
            *(HIDDEN, len(model.layers), layers),
            *(self._norm(model.norm), self._matrix(model.head, model.head_bias), None),
            *(model.logits_scale, model.logits_soft_cap),
            *(model.embedding.data_ptr(), model.embedding_scale),
            None if model.positions is None else model.positions.data_ptr(),
            *(None if inputs is None else pointer(inputs), shape.block_bytes, block_size),
            *(len(ropes), ropes),
        )
        self._kept += [model, cache, ropes, layers, inputs]
        self._decoder = Decoder(compiled.thread_pool(), dtype, of_model, use_amx=use_amx)

    def logits(self, tokens: Tensor, first: int = 0, num_unstored: int = 0) -> Tensor:
        """The logits behind each of these tokens, which are those from position `first` on: float32 [tokens, VOCAB].

        The first `num_unstored` tokens are in the cache already.
        """
        logits, argmax = self.compute(tokens, first, num_unstored)
        assert torch.equal(argmax, torch.where(logits.isfinite().all(-1), logits.argmax(-1), -1))
        return logits

    def compute(
        self,
        tokens: Tensor,
        first: int = 0,
        num_unstored: int = 0,
        needs_logits: Tensor | None = None,
        sampled: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        """As `logits`, and their argmax int64 [tokens]. Rows that `needs_logits`, bool [tokens], leaves out are NaN.
        With `sampled`, ascending, only those behind the tokens at these places.
        """
        rows = torch.arange(len(tokens)) if sampled is None else sampled
        positions = torch.arange(first, first + len(tokens))
        slots = torch.where(positions < first + num_unstored, -1, positions)
        starts = torch.tensor([0, len(tokens)], dtype=torch.int32)
        context = torch.tensor([first + len(tokens)], dtype=torch.int32)
        logits = torch.full((len(rows), VOCAB), float("nan"))
        argmax = torch.empty(len(rows), dtype=torch.int64)
        sequences = SequencesArgs(1, len(self._table), self._table.data_ptr(), starts.data_ptr(), context.data_ptr())
        self._decoder(
            DecoderStepArgs(
                *(len(tokens), tokens.data_ptr(), slots.data_ptr(), positions.data_ptr(), sequences),
                *(len(rows), rows.data_ptr(), logits.data_ptr(), VOCAB),
                *(None if needs_logits is None else needs_logits.data_ptr(), argmax.data_ptr()),
            )
        )
        return logits, argmax

    def logits_in_steps(self, tokens: Tensor, size: int) -> Tensor:
        """The logits behind each token of a prompt, computed in steps of so many."""
        return torch.cat([self.logits(part, step * size) for step, part in enumerate(torch.split(tokens, size))])

    def _matrix(self, weight: Tensor, bias: Tensor | None = None) -> MatrixArgs:
        matrix = self._pack(compiled.thread_pool(), weight, bias)
        self._kept.append(matrix)
        return matrix.args()

    def _norm(self, norm: RandomNorm | None) -> NormArgs:
        if norm is None:
            return NormArgs()
        packed = pack_norm(norm.kind, norm.weight, norm.bias, norm.epsilon)
        self._kept.append(packed)
        return packed.args()

    def _layer(self, layer: RandomLayer) -> DecoderLayerArgs:
        first = layer.up
        if layer.is_gated:
            rows = (0, 0, 0, -len(layer.up) % 32)
            parts = [pad(part, rows).view(-1, 16, HIDDEN) for part in (layer.gate, layer.up)]
            first = torch.stack(parts, 1).flatten(0, 2)
        return DecoderLayerArgs(
            self._norm(layer.attention_norm),
            self._norm(layer.query_norm),
            self._norm(layer.key_norm),
            self._norm(layer.value_norm),
            self._norm(layer.post_attention_norm),
            self._norm(layer.mlp_norm),
            self._norm(layer.post_mlp_norm),
            self._matrix(joined_heads([layer.qkv], layer.dim) if self._pairs_halves else layer.qkv),
            self._matrix(layer.output),
            HeadsArgs(HEADS, KV_HEADS, layer.dim, self._pairs_halves),
            RuleArgs(layer.dim**-0.5),
            -1 if layer.rope is None else layer.rope,
            MlpArgs(self._matrix(first), self._matrix(layer.down), layer.activation, layer.is_gated),
            None,
            None,
            layer.is_parallel,
            layer.has_joint_norms,
            layer.norms_after_rotation,
            None,
            layer.shared is None,
            layer.values_are_keys,
            None if layer.input is None else pointer(self._input(layer.input)),
            layer.scale,
        )

    def _input(self, each: RandomInput) -> LayerInputArgs:
        return LayerInputArgs(
            self._matrix(each.gate), self._matrix(each.up), self._norm(each.norm), ActivationCode.SILU
        )

    def _inputs(self, inputs: RandomInputs) -> LayerInputsArgs:
        return LayerInputsArgs(
            inputs.width,
            inputs.embedding.data_ptr(),
            inputs.embedding_scale,
            self._matrix(inputs.projection),
            self._norm(inputs.norm),
            inputs.scale,
        )
