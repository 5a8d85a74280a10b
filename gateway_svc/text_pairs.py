"""Pairs of texts as one prompt. By the tokenizer, each text is tokenized once, however many pairs it is in."""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Protocol

from tokenizers import Tokenizer

from gateway_svc.validated_request import TruncationSide


@dataclass(frozen=True, slots=True)
class PairText:
    """A text of pairs: the tokens that pairs may keep of it, without special tokens.

    `num_tokens` is how many of its `num_all` its own limit leaves; where a call cuts pairs, there may be fewer
    `token_ids`.
    """

    text: str
    token_ids: Sequence[int]
    num_tokens: int
    num_all: int

    @classmethod
    def of(
        cls, text: str, token_ids: Sequence[int], limit: int | None, num_kept: int | None, side: TruncationSide
    ) -> "PairText":
        """Cuts a text to its own limit, and drops what no pair of `num_kept` tokens keeps; None: no limit."""
        num_all = len(token_ids)
        num_tokens = num_all if limit is None else min(num_all, limit)
        kept = _cut(token_ids, num_tokens if num_kept is None else min(num_tokens, num_kept), side)
        return cls(text, kept, num_tokens, num_all)


@dataclass(frozen=True, slots=True)
class EncodedPair:
    """The tokens of a pair of texts. The first ones are of the token type 0, the others of 1."""

    token_ids: list[int]
    num_first_tokens: int


class PairForm(Protocol):
    """How a model takes a pair of texts as one prompt."""

    @property
    def num_special(self) -> int:
        """How many tokens a pair has beside those of its texts."""

    @property
    def of_chat(self) -> bool:
        """Whether texts are tokenized as `TextToEncode.of_chat` says."""

    async def with_instruction(self, instruction: str, tenant: str) -> "PairForm | None":
        """The form with an instruction in place of that of the model's files; None: the model reads none."""

    async def shorten(self, text: PairText, side: TruncationSide, tenant: str) -> PairText:
        """A text without what no pair keeps of it, for `join`. Work in threads is of `tenant`."""

    async def join(
        self, first: PairText, second: PairText, num_kept: int | None, side: TruncationSide, tenant: str
    ) -> EncodedPair:
        """A pair as one prompt. Its texts are cut at `side` to `num_kept` tokens in all, the longer one first; None:
        they are not cut.
        """


@dataclass(frozen=True, slots=True)
class PairTemplate:
    """A `PairForm`: the special tokens around the first and the second text of a pair, and the first token of the type
    1.
    """

    before: tuple[int, ...]
    between: tuple[int, ...]
    after: tuple[int, ...]
    types: tuple[int, int]
    """Of the tokens of the two texts."""
    num_first_special: int
    """How many special tokens are of the type 0."""

    @classmethod
    def of(cls, tokenizer: Tokenizer) -> "PairTemplate":
        """The template of a tokenizer. Raises ValueError unless the texts come in their order, and the types of their
        tokens are 0, and from some position on 1.
        """
        encoding = tokenizer.encode("a", "a")
        types, sequences = encoding.type_ids, encoding.sequence_ids
        if types != sorted(types) or any(one > 1 for one in types):
            raise ValueError(f"gives the tokens of a pair of texts other types than 0, then 1: {types}")
        of_texts = [one for one in sequences if one is not None]
        if of_texts != sorted(of_texts) or set(of_texts) != {0, 1}:
            raise ValueError(f"does not place two texts one behind the other: {sequences}")
        first, second = sequences.index(0), sequences.index(1)
        first_end, second_end = first + of_texts.count(0), second + of_texts.count(1)
        if None in sequences[first:first_end] or None in sequences[second:second_end]:
            raise ValueError(f"has special tokens inside a text: {sequences}")
        ids = encoding.ids
        special_types = [kind for kind, one in zip(types, sequences, strict=True) if one is None]
        return cls(
            tuple(ids[:first]),
            tuple(ids[first_end:second]),
            tuple(ids[second_end:]),
            (types[first], types[second]),
            special_types.count(0),
        )

    of_chat: ClassVar[bool] = False

    @property
    def num_special(self) -> int:
        """As `PairForm` says."""
        return len(self.before) + len(self.between) + len(self.after)

    async def with_instruction(self, instruction: str, tenant: str) -> None:
        """A tokenizer's template has texts of the pair only."""

    async def shorten(self, text: PairText, side: TruncationSide, tenant: str) -> PairText:
        """The same: only its tokens are used."""
        return text

    async def join(
        self, first: PairText, second: PairText, num_kept: int | None, side: TruncationSide, tenant: str
    ) -> EncodedPair:
        """As `PairForm` says."""
        await asyncio.sleep(0)  # to join many long pairs takes tens of milliseconds
        lengths = [first.num_tokens, second.num_tokens]
        if num_kept is not None:
            lengths = truncate_longest(first.num_tokens, second.num_tokens, num_kept - self.num_special)
        kept = [_cut(one.token_ids, length, side) for one, length in zip((first, second), lengths, strict=True)]
        num_first = sum(length for length, kind in zip(lengths, self.types, strict=True) if kind == 0)
        return EncodedPair(
            [*self.before, *kept[0], *self.between, *kept[1], *self.after], num_first + self.num_first_special
        )


def _cut(token_ids: Sequence[int], length: int, side: TruncationSide) -> Sequence[int]:
    """So many of the tokens, where those at `side` go first."""
    return token_ids[len(token_ids) - length :] if side is TruncationSide.LEFT else token_ids[:length]


def truncate_longest(first: int, second: int, room: int) -> list[int]:
    """How many tokens two texts keep of these, `room` in all: the longer one loses tokens until both have as many, then
    both do. As `longest_first` of transformers.
    """
    if first + second <= room:
        return [first, second]
    shorter = min(first, second, room // 2)
    return [shorter, room - shorter] if first <= second else [room - shorter, shorter]
