"""Codes of a few bits are taken out of words of 32 bits, whatever crosses the border of a word."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from quantized_models import awq_words, bit_stream
from worker_svc.model.formats._packing import codes_in_words, unpack, words_of


@given(bits=st.integers(1, 8), groups=st.integers(1, 3), others=st.integers(1, 5), seed=st.integers(0, 99))
def test_unpacking_is_the_inverse_of_packing(bits: int, groups: int, others: int, seed: int) -> None:
    size = groups * codes_in_words(bits)
    codes = np.random.default_rng(seed).integers(2**bits, size=(others, size))
    words = bit_stream(codes, bits)
    assert words.shape[1] == words_of(size, bits)
    expected = torch.from_numpy(codes).to(torch.uint8)
    assert torch.equal(unpack(words, bits, 1), expected)
    assert torch.equal(unpack(words, bits, -1), expected)
    assert torch.equal(unpack(words.t(), bits, 0), expected.t())
    assert torch.equal(unpack(words[:, None], bits, 2), expected[:, None])


@pytest.mark.parametrize("dim", [0, 1])
def test_codes_in_another_order_are_put_in_theirs(dim: int) -> None:
    codes = np.random.default_rng(0).integers(16, size=(5, 24))
    words, expected = awq_words(codes), torch.from_numpy(codes).to(torch.uint8)
    if dim == 0:
        words, expected = words.t(), expected.t()
    assert torch.equal(unpack(words, 4, dim, (0, 4, 1, 5, 2, 6, 3, 7)), expected)
