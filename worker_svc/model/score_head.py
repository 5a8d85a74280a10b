"""The head of a cross-encoder: the hidden state of a prompt's first token to its score."""

from pathlib import Path

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from worker_svc.model.encoder_description import EncoderDescription, ScoreActivation, ScoreHeadSpec
from worker_svc.model.weight_format import format_of
from worker_svc.model.weights import Checkpoint


class ScoreHead:
    """A head's weights, in float32: they are few."""

    def __init__(self, spec: ScoreHeadSpec, hidden_size: int, checkpoint: Checkpoint) -> None:
        """Raises UnsupportedModel if tensors do not match the description."""
        self._activation = spec.activation
        self._dense, self._output = (
            (checkpoint.take(f"{name}.weight", width, hidden_size), checkpoint.take(f"{name}.bias", width))
            for name, width in ((spec.dense, hidden_size), (spec.output, 1))
        )

    def outputs(self, states: Tensor) -> Tensor:
        """The outputs [num_prompts] for the first tokens' hidden states [num_prompts, hidden_size]."""
        return F.linear(F.linear(states.float(), *self._dense).tanh(), *self._output)[:, 0]

    def activate(self, outputs: Tensor) -> Tensor:
        """The scores of outputs."""
        return outputs.sigmoid() if self._activation is ScoreActivation.SIGMOID else outputs


def load_score_head(description: EncoderDescription, directory: Path, device: torch.device) -> ScoreHead | None:
    """Loads the head of a directory's model; None: it has none. Raises UnsupportedModel if its tensors do not match."""
    if description.score_head is None:
        return None
    with torch.inference_mode():
        checkpoint = Checkpoint(directory, format_of(directory), torch.float32, device)
        return ScoreHead(description.score_head, description.hidden_size, checkpoint)
