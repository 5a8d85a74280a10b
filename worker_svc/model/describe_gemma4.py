"""Describes Gemma 4: layers whose heads differ, values with norms, in the small models vectors of each layer's own and
layers that share keys and values, and in one an MLP beside experts.
"""

from typing import Any

from worker_svc.model.describe_experts import describe_expert, describe_router
from worker_svc.model.describe_parts import ACTIVATIONS, NormForm, describe_attention, describe_head, describe_mlp
from worker_svc.model.describe_rope import ropes_of
from worker_svc.model.description import (
    Activation,
    AttentionSpec,
    BesideSpec,
    DecoderLayer,
    ExpertsSpec,
    LayerInputSpec,
    LayerInputsSpec,
    LinearLayer,
    LinearRole,
    MlpKind,
    MlpSpec,
    ModelDescription,
    Norm,
    RopeConfig,
    SplitDimension,
    StoredLinear,
    require,
)


def describe_gemma4(config: Any) -> ModelDescription | None:
    """The description. None: it cannot hold activation or positions, or tokens see later ones.

    `gemma4_unified` has no experts, and no vectors of each layer's own.
    """
    activation = ACTIVATIONS.get(config.hidden_activation)
    # Frequencies are of whole heads, whatever their size.
    ropes = ropes_of(config, config.per_layer_config[0].head_dim)
    if activation is None or ropes is None or config.use_bidirectional_attention == "all":
        return None
    _check(config)
    described = _Described(config, activation)
    return ModelDescription(
        architecture=config.model_type,
        vocab_size=config.vocab_size,
        hidden_size=config.hidden_size,
        context_length=config.max_position_embeddings,
        embedding="model.embed_tokens.weight",
        layers=tuple(map(described.layer, range(config.num_hidden_layers), ropes)),
        norm=described.norms.norm("model.norm", config.hidden_size),
        head=describe_head(config.hidden_size, config.vocab_size),
        tied_embeddings=config.tie_word_embeddings,
        embedding_scale=float(config.hidden_size**0.5),
        rounds_embedding_scale=True,
        layer_inputs=described.layer_inputs(),
        logits_soft_cap=config.final_logit_softcapping,
        unused_prefixes=described.unused_prefixes(),
    )


def _check(config: Any) -> None:
    """Raises InvalidDescription for fields that contradict each other."""
    vocab_size, width = config.vocab_size, getattr(config, "hidden_size_per_layer_input", None)
    is_fit = not width or config.vocab_size_per_layer_input == vocab_size
    require(is_fit, "vocab_size_per_layer_input", f"{vocab_size}, the size of the vocabulary")
    if getattr(config, "enable_moe_block", False):
        for name in ("num_experts", "top_k_experts", "moe_intermediate_size"):
            require(getattr(config, name) is not None, name, "a number with enable_moe_block")
    own = config.layer_types[: config.num_hidden_layers - config.num_kv_shared_layers]
    is_fit = set(config.layer_types) <= set(own)
    require(is_fit, "num_kv_shared_layers", "so few that a layer of each kind has keys and values of its own")


class _Described:
    """The parts of one model."""

    def __init__(self, config: Any, activation: Activation) -> None:
        self.norms = NormForm(config.rms_norm_eps)
        self._config, self._activation, self._hidden = config, activation, config.hidden_size
        self._input_width: int = getattr(config, "hidden_size_per_layer_input", None) or 0
        self._first_shared: int = config.num_hidden_layers - config.num_kv_shared_layers
        self._has_experts: bool = getattr(config, "enable_moe_block", False)

    def layer(self, number: int, rope: RopeConfig) -> DecoderLayer:
        prefix = f"model.layers.{number}."

        def norm(name: str) -> Norm:
            return self.norms.norm(f"{prefix}{name}", self._hidden)

        mlp = self._mlp(f"{prefix}mlp.", number)
        beside = BesideSpec(
            mlp,
            norm("pre_feedforward_layernorm"),
            norm("post_feedforward_layernorm_1"),
            norm("post_feedforward_layernorm_2"),
            # What the model scores is divided by the root of the hidden size.
            Norm(f"{prefix}router.scale", self._hidden, self.norms.eps, weight_factor=float(self._hidden**-0.5)),
        )
        return DecoderLayer(
            norm("input_layernorm"),
            self._attention(f"{prefix}self_attn.", number, rope),
            norm("pre_feedforward_layernorm_2" if self._has_experts else "pre_feedforward_layernorm"),
            self._experts(prefix) if self._has_experts else mlp,
            post_attention_norm=norm("post_attention_layernorm"),
            post_mlp_norm=norm("post_feedforward_layernorm"),
            beside=beside if self._has_experts else None,
            input=self._layer_input(prefix),
            scale=f"{prefix}layer_scalar",
        )

    def layer_inputs(self) -> LayerInputsSpec | None:
        """None: layers have no vectors of their own."""
        width, config = self._input_width, self._config
        if not width:
            return None
        stored = StoredLinear("model.per_layer_model_projection", (config.num_hidden_layers * width,))
        return LayerInputsSpec(
            width,
            "model.embed_tokens_per_layer.weight",
            embedding_scale=float(width**0.5),
            projection=LinearLayer(LinearRole.LAYER_INPUTS, self._hidden, (stored,), SplitDimension.OUTPUTS),
            # The model divides what it normalizes by the root of the hidden size, and adds the epsilon to the squares.
            norm=NormForm(config.rms_norm_eps * self._hidden).norm("model.per_layer_projection_norm", width),
            scale=2.0**-0.5,
        )

    def unused_prefixes(self) -> tuple[str, ...]:
        """First parts of the names of tensors that some checkpoints have of layers that share keys and values."""
        names = ("k_proj.", "v_proj.", "k_norm.", "v_norm.")
        shared = range(self._first_shared, self._config.num_hidden_layers)
        return tuple(f"model.layers.{number}.self_attn.{name}" for number in shared for name in names)

    def _attention(self, prefix: str, number: int, rope: RopeConfig) -> AttentionSpec:
        config = self._config
        heads, kinds = config.per_layer_config[number], config.layer_types
        is_shared, is_sliding = number >= self._first_shared, kinds[number] == "sliding_attention"
        dim, bias = heads.head_dim, config.attention_bias
        values_are_keys = config.attention_k_eq_v and not is_sliding and not is_shared
        queries, keys = config.num_attention_heads * dim, heads.num_key_value_heads * dim
        parts = (
            ("q", queries),
            *(() if is_shared else (("k", keys),) if values_are_keys else (("k", keys), ("v", keys))),
        )
        window = config.sliding_window if is_sliding else None
        shared = max(i for i in range(self._first_shared) if kinds[i] == kinds[number])
        return describe_attention(
            config.num_attention_heads,
            heads.num_key_value_heads,
            dim,
            tuple(StoredLinear(f"{prefix}{name}_proj", (width,), bias) for name, width in parts),
            StoredLinear(f"{prefix}o_proj", (self._hidden,), bias),
            rope=rope,
            scale=1.0,
            window=window if window is not None and window < config.max_position_embeddings else None,
            query_norm=self.norms.norm(f"{prefix}q_norm", dim),
            key_norm=None if is_shared else self.norms.norm(f"{prefix}k_norm", dim),
            value_norm_eps=None if is_shared else config.rms_norm_eps,
            values_are_keys=values_are_keys,
            shared_layer=shared if is_shared else None,
        )

    def _mlp(self, prefix: str, number: int) -> MlpSpec:
        config = self._config
        is_wide = config.use_double_wide_mlp and number >= self._first_shared
        width = config.intermediate_size * (2 if is_wide else 1)
        gate_up = tuple(StoredLinear(f"{prefix}{name}_proj", (width,)) for name in ("gate", "up"))
        down = StoredLinear(f"{prefix}down_proj", (self._hidden,))
        return describe_mlp(MlpKind.GATED, gate_up, down, self._activation)

    def _experts(self, prefix: str) -> ExpertsSpec:
        config, names = self._config, ("gate_proj", "up_proj", "down_proj")
        return ExpertsSpec(
            describe_router(self._hidden, StoredLinear(f"{prefix}router.proj", (config.num_experts,))),
            config.top_k_experts,
            normalized=True,
            experts=tuple(
                describe_expert(
                    f"{prefix}experts.{number}.", names, self._hidden, config.moe_intermediate_size, self._activation
                )
                for number in range(config.num_experts)
            ),
            fused=(f"{prefix}experts.gate_up_proj", f"{prefix}experts.down_proj"),
            weight_scales=f"{prefix}router.per_expert_scale",
        )

    def _layer_input(self, prefix: str) -> LayerInputSpec | None:
        width, hidden = self._input_width, self._hidden
        if not width:
            return None
        gate = StoredLinear(f"{prefix}per_layer_input_gate", (width,))
        up = StoredLinear(f"{prefix}per_layer_projection", (hidden,))
        return LayerInputSpec(
            LinearLayer(LinearRole.INPUT_GATE, hidden, (gate,), SplitDimension.OUTPUTS),
            LinearLayer(LinearRole.INPUT_UP, width, (up,), SplitDimension.INPUTS),
            self.norms.norm(f"{prefix}post_per_layer_input_norm", hidden),
            self._activation,
        )
