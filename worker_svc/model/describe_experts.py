"""Describes the experts of models whose dense layers are described already."""

from collections.abc import Collection
from dataclasses import dataclass, replace
from typing import Any

from worker_svc.model.describe_parts import describe_mlp
from worker_svc.model.description import (
    Activation,
    ComputedFormat,
    DecoderLayer,
    ExpertGroups,
    ExpertScores,
    ExpertsSpec,
    LinearLayer,
    LinearRole,
    MlpKind,
    MlpSpec,
    ModelDescription,
    SplitDimension,
    StoredLinear,
)

_MODULE = "mlp"  # what a layer calls its experts in transformers, and in checkpoints with tensors of all experts


@dataclass(frozen=True, slots=True)
class ExpertForm:
    """The experts of one layer, and what checkpoints call their tensors."""

    num_experts: int
    num_chosen: int
    width: int
    normalized: bool
    """Whether the weights of a token's experts are divided by their sum."""
    shared_width: int | None = None
    """Of the MLP for all tokens; None: there is none."""
    shared: str = "shared_expert"
    """What a layer calls that MLP."""
    has_shared_gate: bool = True
    """Whether that MLP has a gate of its own."""
    block: str = _MODULE
    """What a layer calls its experts in checkpoints with tensors of each expert."""
    projections: tuple[str, str, str] = ("gate_proj", "up_proj", "down_proj")
    router: str = "gate"
    """What a layer calls the product of its router."""
    fused: tuple[str, str] = ("experts.gate_up_proj", "experts.down_proj")
    """What a layer calls the tensors of all experts."""
    fused_may_be_transposed: bool = False
    """Whether some checkpoints have these as [experts, inputs, outputs]."""
    scale: float = 1.0
    """Factor of the weights of a token's experts."""
    scores: ExpertScores = ExpertScores.SOFTMAX
    groups: ExpertGroups | None = None
    choice_bias: str | None = None
    """What a layer calls the tensor that is added to choose experts."""


def with_experts(dense: ModelDescription, form: ExpertForm, layers: Collection[int] | None = None) -> ModelDescription:
    """The description with experts in place of the MLPs of some layers; None: of all."""
    mixed, renamed = list(dense.layers), list(dense.renamed)
    for number in range(len(mixed)) if layers is None else layers:
        prefix = f"model.layers.{number}."
        mixed[number] = _layer(mixed[number], f"{prefix}{form.block}.", form)
        if form.block != _MODULE:
            renamed.append((f"{prefix}{_MODULE}.", f"{prefix}{form.block}."))
    return replace(dense, layers=tuple(mixed), renamed=tuple(renamed))


def deepseek_experts(
    config: Any, counts: tuple[str, str] = ("n_routed_experts", "n_shared_experts")
) -> ExpertForm | None:
    """The experts of configs with the fields of DeepSeek-V3's (arXiv:2412.19437, section 2.1.2). None: none of them is
    for all tokens. `counts` are the fields that say how many experts a router chooses from, and how many are for all.
    """
    num_experts, num_shared = (getattr(config, name) for name in counts)
    if not num_shared:
        return None
    return ExpertForm(
        num_experts,
        config.num_experts_per_tok,
        config.moe_intermediate_size,
        config.norm_topk_prob,
        shared_width=num_shared * config.moe_intermediate_size,
        shared="shared_experts",
        has_shared_gate=False,
        scale=config.routed_scaling_factor,
        scores=ExpertScores.SIGMOID,
        groups=ExpertGroups(config.n_group, config.topk_group, num_summed=2),
        choice_bias="gate.e_score_correction_bias",
    )


def predicting_layers(config: Any) -> tuple[str, ...]:
    """First parts of the names of tensors behind the last layer, which predict further tokens: they are not read."""
    first, count = config.num_hidden_layers, getattr(config, "num_nextn_predict_layers", 0)
    return tuple(f"model.layers.{first + number}." for number in range(count))


def layers_called_sparse(config: Any) -> list[int]:
    """The layers with experts, as `mlp_layer_types` of configs names them."""
    kinds = zip(range(config.num_hidden_layers), config.mlp_layer_types, strict=False)
    return [number for number, kind in kinds if kind == "sparse"]


def sparse_layers(config: Any) -> list[int]:
    """The layers with experts, as configs of Qwen name them."""
    step: int = config.decoder_sparse_step
    return [
        number
        for number in range(config.num_hidden_layers)
        if number not in config.mlp_only_layers and config.num_experts > 0 and (number + 1) % step == 0
    ]


def describe_router(hidden: int, *stored: StoredLinear) -> LinearLayer:
    """A router, and the gate of the MLP for all tokens if it has one."""
    return LinearLayer(LinearRole.ROUTER, hidden, stored, SplitDimension.OUTPUTS, computed=ComputedFormat.MODEL)


def _layer(layer: DecoderLayer, prefix: str, form: ExpertForm) -> DecoderLayer:
    (dense,) = layer.mlps
    hidden, activation = dense.gate_up.inputs, dense.activation
    has_gate = form.shared_width is not None and form.has_shared_gate
    router = StoredLinear(f"{prefix}{form.router}", (form.num_experts,))
    gate_up, down = form.fused
    shared_gate = StoredLinear(f"{prefix}shared_expert_gate", (1,))
    return replace(
        layer,
        mlp=ExpertsSpec(
            router=describe_router(hidden, router, *((shared_gate,) if has_gate else ())),
            num_chosen=form.num_chosen,
            normalized=form.normalized,
            experts=tuple(
                describe_expert(f"{prefix}experts.{number}.", form.projections, hidden, form.width, activation)
                for number in range(form.num_experts)
            ),
            shared=None
            if form.shared_width is None
            else describe_expert(f"{prefix}{form.shared}.", form.projections, hidden, form.shared_width, activation),
            scale=form.scale,
            fused=(f"{prefix}{gate_up}", f"{prefix}{down}"),
            fused_may_be_transposed=form.fused_may_be_transposed,
            scores=form.scores,
            groups=form.groups,
            choice_bias=None if form.choice_bias is None else f"{prefix}{form.choice_bias}",
        ),
    )


def describe_expert(
    prefix: str, projections: tuple[str, str, str], hidden: int, width: int, activation: Activation
) -> MlpSpec:
    """An expert whose products, gate, up and down, are called so behind the prefix."""
    gate, up, down = (f"{prefix}{name}" for name in projections)
    gate_up = StoredLinear(gate, (width,)), StoredLinear(up, (width,))
    return describe_mlp(MlpKind.GATED, gate_up, StoredLinear(down, (hidden,)), activation)
