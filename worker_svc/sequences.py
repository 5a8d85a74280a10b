"""What a worker knows of each sequence, kept between steps and fed by deltas."""

from collections.abc import Sequence as Items
from typing import Self

import numpy as np

from worker_svc.description import WorkerLimits
from worker_svc.int_list import IntList
from worker_svc.sampler import SamplingState
from worker_svc.step import BlockTableUpdate, NewSequence, ScheduledSequence


class InvalidSequence(Exception):  # noqa: N818
    """A sequence that cannot be learned or run as asked. The text is for the operator; it holds no tokens."""


class Sequence:
    """A sequence: its known tokens, how many are computed, the blocks that hold their keys and values.

    The last tokens may be *promised*: drawn by a step that was launched, their values not known here yet. A stand-in
    holds the place of each.
    """

    __slots__ = (
        "__weakref__",
        "_sampling",
        "blocks",
        "failure",
        "index",
        "num_computed",
        "params",
        "prompt_length",
        "tokens",
    )

    def __init__(self, new: NewSequence) -> None:
        self.tokens = IntList(new.token_ids)
        self.prompt_length = new.prompt_length
        self.params, self.index = new.sampling, new.index
        # How many are computed when a sequence comes: its first step says, for a prefix may be in the cache already.
        self.num_computed: int | None = None
        self.blocks = IntList()
        self._sampling: SamplingState | None = None
        # Why a promised token never came. What was launched for the sequence since then was computed for nothing.
        self.failure: str | None = None

    @classmethod
    def from_new_sequence(cls, new: NewSequence, limits: WorkerLimits) -> Self:
        """The sequence that `new` describes. Raises InvalidSequence where it is not well formed."""
        if not 1 <= new.prompt_length <= len(new.token_ids):
            raise InvalidSequence(f"a prompt of {new.prompt_length} tokens among {len(new.token_ids)}")
        if len(new.token_ids) > limits.context_length:
            raise InvalidSequence(f"{len(new.token_ids)} tokens, and the context is {limits.context_length}")
        named = (new.token_ids, list(new.sampling.logit_bias), new.sampling.suppressed_token_ids)
        if not all(_within(ids, limits.vocab_size) for ids in named):
            raise InvalidSequence(f"a token id beyond the vocabulary of {limits.vocab_size}")
        return cls(new)

    def validate(self, scheduled: ScheduledSequence, limits: WorkerLimits) -> bool:
        """Whether what is scheduled reaches the last known token, so that the next one is drawn.

        Raises InvalidSequence unless it follows on what is known.
        """
        start, known, new_block_ids = scheduled.start, len(self.tokens), scheduled.new_block_ids
        end = start + scheduled.num_tokens
        if end <= start or end > known:
            raise InvalidSequence(f"tokens {start} to {end - 1} scheduled, and {known} known")
        if self.num_computed is not None and start != self.num_computed:
            raise InvalidSequence(f"scheduled from {start}, and {self.num_computed} computed")
        if new_block_ids and not _within(new_block_ids, limits.num_blocks):
            raise InvalidSequence(f"a block beyond the {limits.num_blocks} there are")
        held = (len(self.blocks) + len(new_block_ids)) * limits.block_size
        if end > held:
            raise InvalidSequence(f"scheduled up to {end}, and its blocks hold {held}")
        if end == known >= limits.context_length:
            raise InvalidSequence(f"a token drawn beyond the context of {limits.context_length}")
        return end == known

    def update(self, update: BlockTableUpdate, limits: WorkerLimits) -> None:
        """Another block stands in one place of the table from now on. Raises InvalidSequence where there is no such
        place.
        """
        if update.index >= len(self.blocks):
            raise InvalidSequence(f"block {update.index} of its table to change, and it has {len(self.blocks)}")
        if not _within([update.block_id], limits.num_blocks):
            raise InvalidSequence(f"a block beyond the {limits.num_blocks} there are")
        self.blocks.values[update.index] = update.block_id

    def append_placeholder(self, placeholder_token: int) -> None:
        """The next token is being drawn."""
        self.tokens.append(placeholder_token)

    def fill_placeholder(self, position: int, token: int) -> None:
        """The token promised at this position was drawn: it is known from now on."""
        self.tokens[position] = token

    @property
    def sampling(self) -> SamplingState:
        """How it draws on the host, from the tokens known when this is first asked for; whoever draws keeps it."""
        if self._sampling is None:
            self._sampling = SamplingState(self.params, self.index, self.tokens.values, self.prompt_length)
        return self._sampling


def _within(values: Items[int], end: int) -> bool:
    if not values:
        return True
    array = np.asarray(values, np.int64)
    return bool(array.min() >= 0 and array.max() < end)
