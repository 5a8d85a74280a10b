"""Embeddings of hidden states."""

import pytest
import torch

from worker_svc.encoder.pooling import EmbeddingDefaults, embed
from worker_svc.step import EmbeddingParams, Pooling

STATES = torch.tensor([[3.0, 0.0, 4.0], [1.0, 2.0, 2.0], [2.0, 4.0, 0.0]])
MEAN = [2.0, 2.0, 2.0]


@pytest.mark.parametrize(
    ("params", "expected"),
    [
        (EmbeddingParams(), MEAN),
        (EmbeddingParams(Pooling.CLS), [3.0, 0.0, 4.0]),
        (EmbeddingParams(Pooling.LAST), [2.0, 4.0, 0.0]),
        (EmbeddingParams(Pooling.CLS, normalizes=True), [0.6, 0.0, 0.8]),
        (EmbeddingParams(num_dimensions=2), MEAN[:2]),
        (EmbeddingParams(Pooling.LAST, 1, normalizes=True), [1.0]),
    ],
)
def test_a_request_says_how(params: EmbeddingParams, expected: list[float]) -> None:
    other = EmbeddingParams(Pooling.LAST)
    made = embed([STATES, STATES], [other, params], EmbeddingDefaults())
    assert made == [[2.0, 4.0, 0.0], pytest.approx(expected)]


def test_else_the_model_says_how() -> None:
    defaults = EmbeddingDefaults(Pooling.CLS, normalizes=True)
    assert embed([STATES], [EmbeddingParams()], defaults) == [pytest.approx([0.6, 0.0, 0.8])]
    assert embed([STATES], [EmbeddingParams(normalizes=False)], defaults) == [[3.0, 0.0, 4.0]]
    assert embed([], [], defaults) == []
