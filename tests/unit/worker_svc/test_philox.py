"""Philox gives the published vectors, and uniforms that depend on seed, index and position alone."""

import numpy as np
import pytest

from worker_svc.philox import philox4x32, uniforms


def _words(text: str) -> tuple[np.ndarray, ...]:
    return tuple(np.array([int(word, 16)], np.uint32) for word in text.split())


# kat_vectors of Random123: philox4x32, 10 rounds
@pytest.mark.parametrize(
    ("counter", "key", "expected"),
    [
        (
            "00000000 00000000 00000000 00000000",
            "00000000 00000000",
            "6627e8d5 e169c58d bc57ac4c 9b00dbd8",
        ),
        (
            "ffffffff ffffffff ffffffff ffffffff",
            "ffffffff ffffffff",
            "408f276d 41c83b0e a20bc7c6 6d5451fd",
        ),
        (
            "243f6a88 85a308d3 13198a2e 03707344",
            "a4093822 299f31d0",
            "d16cfe09 94fdcceb 5001e420 24126ea1",
        ),
    ],
)
def test_known_vectors(counter: str, key: str, expected: str) -> None:
    assert philox4x32(_words(counter), _words(key)) == _words(expected)


def _uniforms(seeds: list[int], indices: list[int], positions: list[int]) -> np.ndarray:
    return uniforms(np.array(seeds, np.uint64), np.array(indices, np.uint32), np.array(positions, np.uint32))


def test_uniforms_do_not_depend_on_the_batch() -> None:
    seeds, indices, positions = [7, 2**64 - 1, 7, 0], [0, 3, 1, 0], [5, 5, 5, 0]
    together = _uniforms(seeds, indices, positions)
    alone = [_uniforms([s], [i], [p])[0] for s, i, p in zip(seeds, indices, positions, strict=True)]
    assert together.tolist() == alone


@pytest.mark.parametrize("other", [([8], [0], [5]), ([7 + 2**32], [0], [5]), ([7], [1], [5]), ([7], [0], [6])])
def test_uniforms_change_with_each_input(other: tuple[list[int], list[int], list[int]]) -> None:
    assert _uniforms([7], [0], [5])[0] != _uniforms(*other)[0]


def test_uniforms_are_spread_evenly() -> None:
    sampled = _uniforms([42] * 10_000, [0] * 10_000, list(range(10_000)))
    assert sampled.min() >= 0.0
    assert sampled.max() < 1.0
    counts, _ = np.histogram(sampled, bins=20, range=(0, 1))
    assert ((counts - 500) ** 2 / 500).sum() < 43.8  # chi-square with 19 degrees of freedom, 0.1 %
