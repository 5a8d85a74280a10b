"""The head of a model that scores pairs of texts, or classifies texts, as plain values."""

from dataclasses import dataclass
from enum import StrEnum

from worker_svc.model.linear_description import Norm, NormKind, require


class ScoreActivation(StrEnum):
    """The function after a head's last product."""

    NONE = "none"
    SIGMOID = "sigmoid"
    SOFTMAX = "softmax"
    """Over all outputs of a prompt."""


class DenseActivation(StrEnum):
    """The function between a head's two products."""

    TANH = "tanh"
    RELU = "relu"
    GELU = "gelu"


@dataclass(frozen=True, slots=True)
class ScoreHeadSpec:
    """A head: activation(output(norm(f(dense(x))))), without `dense` activation(output(x)), where x is one token's
    hidden state or the mean of all.

    `dense` [hidden_size, hidden_size] and `output` [num_labels, hidden_size] are linear layers of the checkpoint.
    """

    output: str
    activation: ScoreActivation
    num_labels: int = 1
    """How many numbers a prompt gets: one, a score, or several."""
    dense: str | None = None
    dense_activation: DenseActivation = DenseActivation.TANH
    """f."""
    dense_bias: bool = True
    norm: Norm | None = None
    """A layer norm, whose weight has no offset; None: there is none."""
    bias: bool = True
    """Whether `output` has one."""
    of_mean: bool = False
    """Whether x is the mean of the states of all tokens."""
    of_last_token: bool = False
    """Whether x is the state of a prompt's last token; else it is that of the first one, or the mean."""
    passed_over: int | None = None
    """Where x is that of the last token: of the last one that is not this token, of padding."""
    tokens: tuple[int, ...] = ()
    """Of a decoder that answers with a token: `output` is its head for logits, as the decoder's description has it, and
    output(x) the logit of the first of these tokens, less that of the second one if there are two. Empty: `output` has
    one output.
    """

    def __post_init__(self) -> None:
        if self.norm is not None:
            is_plain = self.norm.kind is NormKind.LAYER and not self.norm.weight_offset
            require(is_plain, self.norm.tensor, "a layer norm whose weight has no offset")
