"""What calls return whose results are values of inputs: embeddings, classifications and scores."""

from dataclasses import dataclass

from quire.inference.v1 import inference_pb2 as pb
from quire_client.results import Usage


@dataclass(frozen=True, slots=True)
class Embeddings:
    """The vectors of all inputs, in their order, and the model that computed them."""

    model: str
    vectors: tuple[tuple[float, ...], ...]
    usage: Usage

    @property
    def vector(self) -> tuple[float, ...]:
        """That of the first input."""
        return self.vectors[0]

    @classmethod
    def from_proto(cls, message: pb.EmbedResponse) -> "Embeddings":
        return cls(
            model=message.model,
            vectors=tuple(tuple(one.numbers) for one in message.embeddings),
            usage=Usage.from_proto(message.usage),
        )


@dataclass(frozen=True, slots=True)
class Classifications:
    """The numbers of all inputs, in their order, each one for each of `labels`; and the model that computed them."""

    model: str
    labels: tuple[str, ...]
    scores: tuple[tuple[float, ...], ...]
    usage: Usage

    @property
    def top_labels(self) -> tuple[str, ...]:
        """The label of each input with the highest number; of equal ones, the first."""
        return tuple(self.labels[numbers.index(max(numbers))] for numbers in self.scores)

    @classmethod
    def from_proto(cls, message: pb.ClassifyResponse) -> "Classifications":
        return cls(
            model=message.model,
            labels=tuple(message.labels),
            scores=tuple(tuple(one.scores) for one in message.classifications),
            usage=Usage.from_proto(message.usage),
        )


@dataclass(frozen=True, slots=True)
class Scores:
    """The scores of all documents, in their order, and the model that computed them."""

    model: str
    scores: tuple[float, ...]
    usage: Usage

    @classmethod
    def from_proto(cls, message: pb.ScoreResponse) -> "Scores":
        return cls(model=message.model, scores=tuple(message.scores), usage=Usage.from_proto(message.usage))
