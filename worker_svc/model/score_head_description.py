"""The head of a model that scores pairs of texts, or classifies texts, as plain values."""

from dataclasses import dataclass
from enum import StrEnum


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
    """A head: activation(output(f(dense(x)))), without `dense` activation(output(x)), of one token's hidden state x.

    `dense` [hidden_size, hidden_size] and `output` [num_labels, hidden_size] are linear layers of the checkpoint.
    """

    output: str
    activation: ScoreActivation
    num_labels: int = 1
    """How many numbers a prompt gets: one, a score, or several."""
    dense: str | None = None
    dense_activation: DenseActivation = DenseActivation.TANH
    """f."""
    bias: bool = True
    """Whether these layers have biases."""
    of_last_token: bool = False
    """Whether x is the state of a prompt's last token, else of its first one."""
    passed_over: int | None = None
    """Where x is that of the last token: of the last one that is not this token, of padding."""
    tokens: tuple[int, ...] = ()
    """Of a decoder that answers with a token: `output` is its head for logits, as the decoder's description has it, and
    output(x) the logit of the first of these tokens, less that of the second one if there are two. Empty: `output` has
    one output.
    """
