"""Codes of a few bits that are packed in words of 32 bits, along one dimension of a tensor."""

import math
from collections.abc import Sequence

import torch
from torch import Tensor

_WORD = 32


def words_of(count: int, bits: int) -> int:
    """How many words hold `count` codes; the last one may not be full."""
    return -(-count * bits // _WORD)


def codes_in_words(bits: int) -> int:
    """The smallest number of codes that fill whole words: 8 of 4 bits in one word, 32 of 3 bits in three."""
    return _WORD // math.gcd(bits, _WORD)


def unpack(words: Tensor, bits: int, dim: int, order: Sequence[int] | None = None) -> Tensor:
    """The codes in int32 `words`, as uint8. Dimension `dim` grows by 32 / bits, the others are the same.

    The words along `dim` are a stream of bits, each word from its lowest bit up: a code may begin in one word and end
    in the next. `order` has the places of the codes in a group of them that fills whole words; None: as they follow
    each other. The number of words must be a multiple of those of a group.
    """
    places = range(codes_in_words(bits)) if order is None else order
    stride = bits // math.gcd(bits, _WORD)
    dim %= words.dim()
    groups = words.reshape(*words.shape[:dim], -1, stride, *words.shape[dim + 1 :])
    codes = torch.empty(*groups.shape[: dim + 1], len(places), *groups.shape[dim + 2 :], dtype=torch.uint8)
    for number, place in enumerate(places):
        word, shift = divmod(place * bits, _WORD)
        # The shift of a negative word fills it with ones, which the mask removes.
        code = groups.select(dim + 1, word) >> shift & (1 << min(bits, _WORD - shift)) - 1
        if (missing := shift + bits - _WORD) > 0:
            rest = groups.select(dim + 1, word + 1) & (1 << missing) - 1
            code |= rest << bits - missing
        codes.select(dim + 1, number).copy_(code)
    return codes.flatten(dim, dim + 1)
