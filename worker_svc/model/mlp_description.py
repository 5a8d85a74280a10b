"""What follows attention in a layer of a description: an MLP, a mixture of experts, or both."""

from dataclasses import dataclass
from enum import StrEnum

from worker_svc.model.linear_description import LinearLayer, Norm, require


class MlpKind(StrEnum):
    """The form of an MLP."""

    GATED = "gated"
    """down(activation(gate(x)) * up(x))"""
    PLAIN = "plain"
    """down(activation(up(x)))"""


class Activation(StrEnum):
    """The function between an MLP's products."""

    SILU = "silu"
    GELU = "gelu"
    GELU_TANH = "gelu_tanh"
    RELU = "relu"
    RELU2 = "relu2"
    """The square of RELU (arXiv:2109.08668)."""
    SWIGLU_OAI = "swiglu_oai"
    """Of gated MLPs alone: (up + 1) * gate * sigmoid(1.702 * gate), after gate is limited to at most 7 and up to -7
    to 7.
    """


@dataclass(frozen=True, slots=True)
class MlpSpec:
    """The MLP of a layer. Where it is plain, `gate_up` has one part."""

    width: int
    gate_up: LinearLayer
    down: LinearLayer
    kind: MlpKind = MlpKind.GATED
    activation: Activation = Activation.SILU

    def __post_init__(self) -> None:
        require(self.width > 0, "width", "above 0")
        outputs = (self.width,) * (2 if self.kind is MlpKind.GATED else 1)
        require(self.gate_up.outputs == outputs, "gate_up", f"of the outputs {outputs}")
        is_fit = self.kind is MlpKind.GATED or self.activation is not Activation.SWIGLU_OAI
        require(is_fit, "activation", "one of a single product where the MLP is plain")
        require(self.down.inputs == self.width, "down", f"of {self.width} inputs")


class ExpertScores(StrEnum):
    """The function that makes weights of a router's outputs."""

    SOFTMAX = "softmax"
    """Over all experts."""
    SIGMOID = "sigmoid"
    """Of each output alone."""


@dataclass(frozen=True, slots=True)
class ExpertGroups:
    """Groups of consecutive experts of equal number: a token's experts are of the groups with the largest sums of
    their best weights (arXiv:2405.04434, section 2.2.2).
    """

    count: int
    num_chosen: int
    """Groups of each token."""
    num_summed: int
    """How many of a group's best weights are summed."""

    def __post_init__(self) -> None:
        # The compiled kernels hold no more. DeepSeek-V3 has 8 groups, and sums 2 weights.
        require(max(self.count, self.num_summed) <= 256, "groups", "at most 256, of as many summed weights")


@dataclass(frozen=True, slots=True)
class ExpertsSpec:
    """A mixture of experts (arXiv:2401.04088): a router scores them for each token, and the outputs of those with the
    largest weights are added, each times its weight: a function of the scores.
    """

    router: LinearLayer
    """An output for each expert, in float32, and in a second part of one output the gate of the shared MLP."""
    num_chosen: int
    """Experts of each token."""
    normalized: bool
    """Whether the weights of the chosen experts are divided by their sum, as a softmax of their scores alone."""
    experts: tuple[MlpSpec, ...]
    shared: MlpSpec | None = None
    """For all tokens; its output is multiplied by the sigmoid of its gate, if there is one, and added."""
    scale: float = 1.0
    """Factor of the weights."""
    fused: tuple[str, str] | None = None
    """Tensors of all experts that some checkpoints have: gate and up [experts, 2 * width, inputs], and down."""
    stacked: str | None = None
    """First part of the names of tensors that have a first dimension of experts, and are otherwise those of one expert,
    whose names have its number behind this part.
    """
    fused_may_be_transposed: bool = False
    """Whether some checkpoints have them as [experts, inputs, outputs]."""
    scores: ExpertScores = ExpertScores.SOFTMAX
    groups: ExpertGroups | None = None
    """None: experts are chosen among all."""
    choice_bias: str | None = None
    """The checkpoint's tensor [experts] that is added to the weights to choose experts, and not to their use."""
    weight_scales: str | None = None
    """The checkpoint's tensor [experts] of factors of the weights in the end."""

    def __post_init__(self) -> None:
        count, first = len(self.experts), self.experts[0]
        outputs = (count, 1) if self.has_shared_gate else (count,)
        require(self.router.outputs == outputs, "router", f"of the outputs {outputs}")
        require(not self.has_shared_gate or self.shared is not None, "router", "without a gate where no MLP is shared")
        choice = count
        if self.groups is not None:
            size, rest = divmod(count, self.groups.count)
            require(rest == 0, "groups", f"a divisor of {count} experts")
            require(1 <= self.groups.num_chosen <= self.groups.count, "groups", f"chosen among {self.groups.count}")
            require(1 <= self.groups.num_summed <= size, "groups", f"of at least {self.groups.num_summed} experts")
            choice = size * self.groups.num_chosen
        require(1 <= self.num_chosen <= choice, "num_chosen", f"1 to {choice} experts")
        for mlp in self.mlps:
            require(mlp.kind is MlpKind.GATED, "experts", "gated MLPs")
            require(mlp.activation is first.activation, "experts", f"MLPs with the activation {first.activation}")
            require(mlp.width == first.width or mlp is self.shared, "experts", f"of the width {first.width}")

        for mlp in self.experts:
            is_alike = mlp.gate_up.biased == first.gate_up.biased and mlp.down.biased == first.down.biased
            require(is_alike, "experts", "all with biases, or all without")

    @property
    def has_shared_gate(self) -> bool:
        return len(self.router.outputs) > 1

    @property
    def mlps(self) -> tuple[MlpSpec, ...]:
        """Those of the experts, and the shared one."""
        return self.experts if self.shared is None else (*self.experts, self.shared)


@dataclass(frozen=True, slots=True)
class BesideSpec:
    """An MLP beside the experts of a layer, both of the same x, whose norms differ. Together they return
    post_norm(mlp(norm(x))) + experts_post_norm(experts(mlp_norm(x))), where the router scores router_norm(x).
    """

    mlp: MlpSpec
    norm: Norm
    post_norm: Norm
    experts_post_norm: Norm
    router_norm: Norm

    @property
    def norms(self) -> tuple[Norm, ...]:
        return self.norm, self.post_norm, self.experts_post_norm, self.router_norm
