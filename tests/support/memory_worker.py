"""A worker whose model is a checksum: it stores token ids as its keys and values, in the blocks it is told.

Before it draws, it reads a sequence's whole context back through the block table and compares it with the tokens that
the sequence has. So a block that was shared, published, released or overwritten wrongly shows as a wrong context.
"""

import zlib
from array import array
from dataclasses import dataclass, field

from scheduler_svc.core.plan import StepPlan


@dataclass
class Drawn:
    token_ids: list[int]
    logprobs: list[object] = field(default_factory=list)
    failure: str | None = None


@dataclass
class Known:
    tokens: list[int]
    table: list[int] = field(default_factory=list)


def next_token(tokens: list[int], vocab_size: int) -> int:
    """The token that follows, a function of all that came before."""
    return zlib.crc32(array("I", tokens).tobytes()) % vocab_size


def continuation(
    prompt: list[int], count: int, vocab_size: int, stop: frozenset[int] = frozenset(), min_tokens: int = 0
) -> list[int]:
    """What a sequence must draw, whatever happens around it."""
    tokens = list(prompt)
    for _ in range(count):
        tokens.append(next_token(tokens, vocab_size))
        if tokens[-1] in stop and len(tokens) - len(prompt) > min_tokens:
            break
    return tokens[len(prompt) :]


class MemoryWorker:
    """Executes plans in order, and raises AssertionError where a plan is not executable."""

    def __init__(self, num_blocks: int, block_size: int, vocab_size: int = 2) -> None:
        self.vocab_size = vocab_size
        self.block_size = block_size
        self.slots: list[tuple[int, int] | None] = [None] * (num_blocks * block_size)
        self.known: dict[int, Known] = {}
        self.num_computed = 0

    def step(self, plan: StepPlan) -> list[Drawn]:
        for sequence_id in plan.departed_ids:
            self.known.pop(sequence_id, None)
        for new in plan.introductions:
            assert new.sequence.id not in self.known, "introduced twice"
            self.known[new.sequence.id] = Known(list(new.tokens))
        for part in plan.scheduled:
            self.known[part.sequence.id].table += part.new_block_ids
        for part in plan.scheduled:  # all of a step's tokens are stored before any is attended to
            known = self.known[part.sequence.id]
            for position in range(max(part.start, part.store_start), part.start + part.num_tokens):
                self.slots[self._slot(known, position)] = (position, known.tokens[position])
            self.num_computed += part.num_tokens
        return [self._draw(part.sequence.id, part.start + part.num_tokens) for part in plan.scheduled]

    def _draw(self, sequence_id: int, end: int) -> Drawn:
        known = self.known[sequence_id]
        context = [self.slots[self._slot(known, position)] for position in range(end)]
        assert context == list(enumerate(known.tokens[:end])), f"sequence {sequence_id} reads a wrong context"
        if end < len(known.tokens):
            return Drawn([])
        known.tokens.append(next_token(known.tokens, self.vocab_size))
        return Drawn(known.tokens[-1:])

    def _slot(self, known: Known, position: int) -> int:
        return known.table[position // self.block_size] * self.block_size + position % self.block_size
