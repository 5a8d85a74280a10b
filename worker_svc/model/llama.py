"""The Llama family (Llama, Mistral, Qwen 2 and 3, SmolLM) over a paged KV cache: all tokens of a step in one pass.

Products are of the model's dtype; what they add up to, the hidden states between layers, is float32. Rounding those to
bfloat16 after each product moves logits further from float32's, by enough to turn near choices.
"""

from pathlib import Path

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from worker_svc.attention import StepAttention
from worker_svc.model.config import ModelConfig
from worker_svc.model.head import Head
from worker_svc.model.linear import Linear, make_linear
from worker_svc.model.rope import Rotation, inverse_frequencies
from worker_svc.model.weights import Checkpoint


class RmsNorm:
    """Root mean square normalisation of the last dimension (arXiv:1910.07467), in float32, to the model's dtype."""

    def __init__(self, weight: Tensor, epsilon: float) -> None:
        self._weight, self._dtype = weight.float(), weight.dtype
        self._shape, self._epsilon = list(weight.shape), epsilon

    def __call__(self, inputs: Tensor) -> Tensor:
        return torch.rms_norm(inputs.float(), self._shape, self._weight, self._epsilon).to(self._dtype)


class Attention:
    """Grouped-query self-attention; queries, keys and values come from one product."""

    def __init__(self, config: ModelConfig, checkpoint: Checkpoint, layer: int) -> None:
        self._layer = layer
        self._num_rotated = config.num_heads + config.num_kv_heads
        self._num_heads, self._head_dim = config.num_heads, config.head_dim
        prefix = f"model.layers.{layer}.self_attn."
        widths = [count * config.head_dim for count in (config.num_heads, config.num_kv_heads, config.num_kv_heads)]
        names = ("q_proj", "k_proj", "v_proj")
        self._qkv = _fused(checkpoint, prefix, names, widths, config.hidden_size, config.qkv_bias)
        self._output = _single(checkpoint, prefix + "o_proj", config.hidden_size, widths[0], config.output_bias)
        self._query_norm = self._key_norm = None
        if config.qk_norm:
            weights = [checkpoint.take(f"{prefix}{name}_norm.weight", config.head_dim) for name in "qk"]
            self._query_norm, self._key_norm = (RmsNorm(weight, config.rms_norm_eps) for weight in weights)

    def attend(self, inputs: Tensor, rotation: Rotation, attention: StepAttention) -> Tensor:
        """What each token of `inputs` [num_tokens, hidden] gathers, before the output product."""
        heads = self._qkv(inputs).view(len(inputs), -1, self._head_dim)
        if self._query_norm is None or self._key_norm is None:
            rotated = rotation(heads[:, : self._num_rotated])
            query, key = rotated[:, : self._num_heads], rotated[:, self._num_heads :]
        else:
            query = rotation(self._query_norm(heads[:, : self._num_heads]))
            key = rotation(self._key_norm(heads[:, self._num_heads : self._num_rotated]))
        return attention(self._layer, query, key, heads[:, self._num_rotated :]).flatten(1)

    def add_output(self, gathered: Tensor, hidden: Tensor) -> Tensor:
        """The output product of `gathered`, added to `hidden`."""
        return self._output.add(gathered, hidden)


class GatedMlp:
    """SwiGLU (arXiv:2002.05202); gate and up come from one product."""

    def __init__(self, config: ModelConfig, checkpoint: Checkpoint, layer: int) -> None:
        prefix = f"model.layers.{layer}.mlp."
        widths = [config.intermediate_size] * 2
        self._gate_up = _fused(
            checkpoint, prefix, ("gate_proj", "up_proj"), widths, config.hidden_size, config.mlp_bias
        )
        self._down = _single(checkpoint, prefix + "down_proj", config.hidden_size, widths[0], config.mlp_bias)

    def add_output(self, inputs: Tensor, hidden: Tensor) -> Tensor:
        """The image of `inputs`, added to `hidden`."""
        gate, up = self._gate_up(inputs).chunk(2, -1)
        return self._down.add(F.silu(gate).mul_(up), hidden)


class Layer:
    """One decoder layer."""

    def __init__(self, config: ModelConfig, checkpoint: Checkpoint, layer: int) -> None:
        prefix = f"model.layers.{layer}."
        self.attention_norm = _norm(config, checkpoint, prefix + "input_layernorm")
        self.attention = Attention(config, checkpoint, layer)
        self.mlp_norm = _norm(config, checkpoint, prefix + "post_attention_layernorm")
        self.mlp = GatedMlp(config, checkpoint, layer)


class LlamaModel:
    """A causal language model. Not thread-safe; run it under `torch.inference_mode`."""

    def __init__(self, config: ModelConfig, checkpoint: Checkpoint) -> None:
        self.config = config
        shape = (config.vocab_size, config.hidden_size)
        self._embedding = checkpoint.take("model.embed_tokens.weight", *shape)
        self._layers = [Layer(config, checkpoint, layer) for layer in range(config.num_layers)]
        self._norm = _norm(config, checkpoint, "model.norm")
        if config.tied_embeddings:
            checkpoint.drop("lm_head.weight")
            head = self._embedding
        else:
            head = checkpoint.take("lm_head.weight", *shape)
        self._head = Head(head)
        self._frequencies = inverse_frequencies(config.rope, config.head_dim).to(self.device)

    @property
    def device(self) -> torch.device:
        """Where it runs."""
        return self._embedding.device

    @property
    def dtype(self) -> torch.dtype:
        """In what it computes, and what the KV cache holds."""
        return self._embedding.dtype

    def forward(self, token_ids: Tensor, positions: Tensor, attention: StepAttention, logits_indices: Tensor) -> Tensor:
        """Compute a step's tokens.

        Args:
            token_ids, positions: int64 [num_tokens], the sequences one after another.
            attention: stores keys and values of these tokens, and attends over the cache.
            logits_indices: int64 [num_draws], places in `token_ids` whose next token is wanted.

        Returns:
            Logits float32 [num_draws, vocab_size].
        """
        rotation = Rotation(positions, self._frequencies, self.dtype, self.config.rope.attention_factor)
        hidden = F.embedding(token_ids, self._embedding).float()
        for layer in self._layers:
            gathered = layer.attention.attend(layer.attention_norm(hidden), rotation, attention)
            if layer is self._layers[-1]:
                # Beyond the last layer's keys and values, only tokens whose successor is drawn matter.
                if not len(logits_indices):
                    return hidden.new_empty(0, self.config.vocab_size)
                gathered, hidden = gathered[logits_indices], hidden[logits_indices]
            hidden = layer.attention.add_output(gathered, hidden)
            hidden = layer.mlp.add_output(layer.mlp_norm(hidden), hidden)
        return self._head(self._norm(hidden))


def load_model(config: ModelConfig, directory: Path, dtype: torch.dtype, device: torch.device) -> LlamaModel:
    """The model of a directory. Raises UnsupportedModel where its tensors are not those of its config."""
    with torch.inference_mode(), Checkpoint(directory, dtype, device) as checkpoint:
        model = LlamaModel(config, checkpoint)
        checkpoint.check_all_taken()
        return model


def _norm(config: ModelConfig, checkpoint: Checkpoint, name: str) -> RmsNorm:
    return RmsNorm(checkpoint.take(f"{name}.weight", config.hidden_size), config.rms_norm_eps)


def _single(checkpoint: Checkpoint, name: str, out_features: int, in_features: int, biased: bool) -> Linear:
    weight = checkpoint.take(f"{name}.weight", out_features, in_features)
    return make_linear(weight, checkpoint.take(f"{name}.bias", out_features) if biased else None)


def _fused(
    checkpoint: Checkpoint, prefix: str, names: tuple[str, ...], widths: list[int], in_features: int, biased: bool
) -> Linear:
    """Several products of the same input as one, their outputs side by side."""
    wanted = list(zip(names, widths, strict=True))
    weight = torch.cat([checkpoint.take(f"{prefix}{name}.weight", width, in_features) for name, width in wanted])
    if not biased:
        return make_linear(weight)
    return make_linear(weight, torch.cat([checkpoint.take(f"{prefix}{name}.bias", width) for name, width in wanted]))
