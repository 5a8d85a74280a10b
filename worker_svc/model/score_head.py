"""The head of a model that scores pairs of texts, or classifies texts: the hidden state of one token to a number for
each label.
"""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from worker_svc.model.architecture import AnyDescription
from worker_svc.model.description import ModelDescription, StoredLinear
from worker_svc.model.score_head_description import DenseActivation, ScoreActivation, ScoreHeadSpec
from worker_svc.model.stored_linear import is_stored_dense, read_stored
from worker_svc.model.tensor_names import described_names
from worker_svc.model.torch_norms import make_torch_norm
from worker_svc.model.weight_format import format_of
from worker_svc.model.weights import Checkpoint

_DENSE_ACTIVATIONS: Mapping[DenseActivation, Callable[[Tensor], Tensor]] = {
    DenseActivation.TANH: torch.tanh,
    DenseActivation.RELU: F.relu,
    DenseActivation.GELU: F.gelu,
}


class ScoreHead:
    """A head's weights, in float32: they are few."""

    def __init__(self, spec: ScoreHeadSpec, description: AnyDescription, checkpoint: Checkpoint) -> None:
        """Raises UnsupportedModel if tensors do not match the description."""
        self._spec, hidden_size = spec, description.hidden_size
        self._scale, self._soft_cap = 1.0, None

        def layer(name: str, width: int, *, has_bias: bool) -> tuple[Tensor, Tensor | None]:
            weight, bias = read_stored(checkpoint, StoredLinear(name, (width,), bias=has_bias), hidden_size)
            device = checkpoint.device
            return weight.dense().to(device).float(), None if bias is None else bias.to(device).float()

        self._dense = None if spec.dense is None else layer(spec.dense, hidden_size, has_bias=spec.dense_bias)
        self._norm = None if spec.norm is None else make_torch_norm(spec.norm, *checkpoint.take_norm(spec.norm))
        if spec.tokens:
            assert isinstance(description, ModelDescription), "encoders have no logits"
            self._output = _of_tokens(spec.tokens, description, checkpoint)
            self._scale, self._soft_cap = description.logits_scale, description.logits_soft_cap
        else:
            self._output = layer(spec.output, spec.num_labels, has_bias=spec.bias)

    def outputs(self, states: Tensor) -> Tensor:
        """The outputs [num_prompts, num_labels] for the hidden states [num_prompts, hidden_size] of the tokens at
        `place`, or their means.
        """
        states = states.float()
        if self._dense is not None:
            states = _DENSE_ACTIVATIONS[self._spec.dense_activation](F.linear(states, *self._dense))
        if self._norm is not None:
            states = self._norm(states)
        outputs = F.linear(states, *self._output) * self._scale
        if self._soft_cap is not None:
            outputs = self._soft_cap * (outputs / self._soft_cap).tanh()
        return outputs[:, :1] - outputs[:, 1:] if len(self._spec.tokens) == 2 else outputs

    def place(self, prompt: Sequence[int]) -> int | None:
        """The place of the token of a prompt whose state is read: as in transformers, 0 where all are padding.
        None: the mean of all states is read.
        """
        if self._spec.of_mean:
            return None
        if not self._spec.of_last_token:
            return 0
        return next((place for place in reversed(range(len(prompt))) if prompt[place] != self._spec.passed_over), 0)

    def activate(self, outputs: Tensor) -> Tensor:
        """The numbers of outputs, in the same shape."""
        match self._spec.activation:
            case ScoreActivation.NONE:
                return outputs
            case ScoreActivation.SIGMOID:
                return outputs.sigmoid()
            case ScoreActivation.SOFTMAX:
                return outputs.softmax(dim=1)


def load_score_head(description: AnyDescription, directory: Path, device: torch.device) -> ScoreHead | None:
    """Loads the head of a directory's model; None: it has none. Raises UnsupportedModel if its tensors do not match."""
    if description.score_head is None:
        return None
    with torch.inference_mode():
        checkpoint = Checkpoint(directory, format_of(directory), torch.float32, device)
        return ScoreHead(description.score_head, description, checkpoint)


def _of_tokens(
    tokens: Sequence[int], description: ModelDescription, checkpoint: Checkpoint
) -> tuple[Tensor, Tensor | None]:
    """The rows of a decoder's head for logits that are those of tokens, and their biases."""
    checkpoint.rename(described_names(description, checkpoint.names))
    stored, vocab_size = description.head.stored[0], description.vocab_size
    inputs, names = description.hidden_size, checkpoint.names
    # A dense head has the embedding's rows, or is used in its place: see `building`.
    if description.tied_embeddings and not is_stored_dense(stored, inputs, checkpoint.weight_format, names):
        stored = StoredLinear(description.embedding.removesuffix(".weight"), (vocab_size,))
    weight, bias = read_stored(checkpoint, stored, inputs)
    rows = torch.cat([weight.outputs(token, token + 1).dense() for token in tokens])
    device = checkpoint.device
    return rows.to(device).float(), None if bias is None else bias[list(tokens)].to(device).float()
