"""Hidden states to the values of prompts: embeddings, as requests and the model say, or the numbers of a head."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Protocol, TypeAlias

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from worker_svc.step import EmbeddingParams, NewSequence, Pooling

VectorLayer: TypeAlias = Callable[[Tensor], Tensor]
"""Pooled vectors, float32 [num_prompts, inputs], to others [num_prompts, outputs]."""


class Pooler(Protocol):
    """Makes one kind of value of prompts' last hidden states."""

    @property
    def result(self) -> str:
        """The kind, by its name in quire.worker.v1.ResultKind."""

    def __call__(self, hidden: Sequence[Tensor], sequences: Sequence[NewSequence]) -> list[list[float]]:
        """The value of each sequence, from the hidden states [num_tokens, hidden_size] of its prompt, or from the one
        [1, hidden_size] that `place` wants.
        """

    def place(self, new: NewSequence) -> int | None:
        """The place of the token of the prompt whose state its value needs; None: it needs those of all tokens."""


class ScoreLayers(Protocol):
    """The head of a model that scores pairs of texts, or classifies texts."""

    def place(self, prompt: Sequence[int]) -> int | None:
        """The place of the token of a prompt whose state is read; None: the mean of all states is."""

    def outputs(self, states: Tensor) -> Tensor:
        """The outputs [num_prompts, num_labels] for these hidden states [num_prompts, hidden_size]."""

    def activate(self, outputs: Tensor) -> Tensor:
        """The numbers of outputs, in the same shape."""


@dataclass(frozen=True, slots=True)
class DenseSpec:
    """A linear layer behind the pooling, with its activation, and where its weights are."""

    folder: str
    inputs: int
    outputs: int
    bias: bool
    activation: str


@dataclass(frozen=True, slots=True)
class EmbeddingDefaults:
    """How a model's embeddings are made if a request says nothing else. `max_tokens`: of a prompt; None: no limit."""

    pooling: Pooling = Pooling.MEAN
    normalizes: bool = False
    max_tokens: int | None = None
    layers: tuple[DenseSpec, ...] = ()
    """What a pooled vector goes through, whatever the pooling, before its dimensions are cut."""


class EmbeddingPooler:
    """Embeddings."""

    result = "embedding"

    def __init__(self, defaults: EmbeddingDefaults, layers: Sequence[VectorLayer] = ()) -> None:
        """`layers` compute those of `defaults`."""
        self._defaults, self._layers = defaults, layers

    def __call__(self, hidden: Sequence[Tensor], sequences: Sequence[NewSequence]) -> list[list[float]]:
        return embed(hidden, [new.embedding for new in sequences], self._defaults, self._layers)

    def place(self, new: NewSequence) -> int | None:
        match new.embedding.pooling or self._defaults.pooling:
            case Pooling.MEAN:
                return None
            case Pooling.CLS:
                return 0
            case Pooling.LAST:
                return len(new.token_ids) - 1


class ScorePooler:
    """A number for each label of a head: one, the score of a pair of texts, or several."""

    result = "score"

    def __init__(self, head: ScoreLayers) -> None:
        self._head = head

    def __call__(self, hidden: Sequence[Tensor], sequences: Sequence[NewSequence]) -> list[list[float]]:
        # The mean of one state is that state.
        outputs = self._head.outputs(torch.stack([states.mean(0, dtype=torch.float32) for states in hidden]))
        both: list[list[list[float]]] = torch.stack([self._head.activate(outputs), outputs]).tolist()
        return [raw if new.score.is_raw else activated for activated, raw, new in zip(*both, sequences, strict=True)]

    def place(self, new: NewSequence) -> int | None:
        return self._head.place(new.token_ids)


def embed(
    hidden: Sequence[Tensor],
    params: Sequence[EmbeddingParams],
    defaults: EmbeddingDefaults,
    layers: Sequence[VectorLayer] = (),
) -> list[list[float]]:
    """The embedding of each prompt from its last hidden states [num_tokens, hidden_size], or from the one that its
    pooling takes.
    """
    pooled = [_pool(states, one.pooling or defaults.pooling) for states, one in zip(hidden, params, strict=True)]
    if layers and pooled:
        together = torch.stack(pooled)
        for layer in layers:
            together = layer(together)
        pooled = list(together)
    vectors = []
    for vector, wanted in zip(pooled, params, strict=True):
        if wanted.num_dimensions:
            vector = vector[: wanted.num_dimensions]
        if defaults.normalizes if wanted.normalizes is None else wanted.normalizes:
            vector = F.normalize(vector, dim=0)
        vectors.append(vector)
    # One copy from the device for all of them.
    numbers = iter(torch.cat(vectors).tolist()) if vectors else iter(())
    return [list(islice(numbers, len(vector))) for vector in vectors]


def _pool(states: Tensor, pooling: Pooling) -> Tensor:
    match pooling:
        case Pooling.MEAN:
            return states.mean(0, dtype=torch.float32)
        case Pooling.CLS:
            return states[0].float()
        case Pooling.LAST:
            return states[-1].float()
