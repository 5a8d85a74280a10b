"""Takes the place of vLLM's helpers that compare vectors, and of its runner of models in transformers.

Copied beside the tests of each suite.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from tests.peers.support.reference import Reference

Vectors = Sequence[Sequence[float]]

_TOLERANCE = 1e-2


class HfRunner(Reference):
    """The embedding model in another implementation. It is the served one, whatever model a test names."""

    def __init__(self, *_: object, **__: object) -> None:
        super().__init__()


@dataclass(frozen=True)
class EmbedModelInfo:
    """A model that a test names."""

    name: str
    is_matryoshka: bool = False
    matryoshka_dimensions: list[int] | None = None


def float_embeddings(answer: Any) -> list[list[float]]:
    """The vectors of an answer."""
    return [one.embedding for one in answer.data]


def check_embeddings_close(
    *, embeddings_0_lst: Vectors, embeddings_1_lst: Vectors, name_0: str, name_1: str, tol: float = 1e-3
) -> None:
    """Asserts that vectors at the same place have a cosine of at least 1 - tol."""
    assert len(embeddings_0_lst) == len(embeddings_1_lst)
    for place, (first, second) in enumerate(zip(embeddings_0_lst, embeddings_1_lst, strict=True)):
        cosine = np.dot(first, second) / (np.linalg.norm(first) * np.linalg.norm(second))
        assert cosine >= 1 - tol, f"{name_0} and {name_1} differ at {place}"


def run_embedding_correctness_test(
    hf_model: HfRunner, inputs: Sequence[str], vllm_outputs: Vectors, dimensions: int | None = None
) -> None:
    """Asserts that the vectors of texts are those of another implementation."""
    expected = [vector[:dimensions] for vector in hf_model.encode(inputs)]
    check_embeddings_close(
        embeddings_0_lst=expected, embeddings_1_lst=vllm_outputs, name_0="hf", name_1="served", tol=_TOLERANCE
    )
