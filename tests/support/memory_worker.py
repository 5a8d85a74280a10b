"""A worker whose model is a checksum. It stores token ids as KV, in the blocks that plans name.

Before it samples, it reads a sequence's context through the block table and compares it with the sequence's tokens. A
block that was shared, published, released or overwritten by mistake gives a wrong context. Swapped blocks are read at
the start of the step, or when the transfer is confirmed, and are written at the confirmation; until then the
destination is empty. Every slot records the step that wrote it. A block keeps its hash until it is written.
"""

import math
import random
import zlib
from array import array
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from scheduler_svc.core.beam_search import num_candidates
from scheduler_svc.core.kv.block_hash_report import BlockHashReport
from scheduler_svc.core.request import Request
from scheduler_svc.core.results import PromptComputation
from scheduler_svc.core.step import (
    BlockPair,
    Direction,
    FailureCause,
    MemoryPressure,
    SampledSequence,
    ScheduledSequence,
    StepOutcome,
    StepPlan,
    SwapDone,
    ValueResult,
)

Slot = tuple[int, int] | None  # position and token
Block = tuple[list[Slot], list[int]]  # the content of a block, and the steps that wrote it


@dataclass
class Drawn:
    token_ids: list[int]
    logprobs: list[object] = field(default_factory=list)
    failure: str | None = None
    failure_cause: FailureCause = FailureCause.INTERNAL


@dataclass
class Known:
    tokens: list[int]
    table: list[int] = field(default_factory=list)
    position: int | None = None  # position of the first uncomputed token; set by the first step
    num_cached_tokens: int = 0
    num_prompt: int = 0  # number of prompt tokens whose log-probabilities are returned; 0 for none


def next_token(tokens: list[int], vocab_size: int) -> int:
    """The next token, a function of all tokens before."""
    return zlib.crc32(array("I", tokens).tobytes()) % vocab_size


def continuation(
    prompt: list[int], count: int, vocab_size: int, stop: frozenset[int] = frozenset(), min_tokens: int = 0
) -> list[int]:
    """The expected tokens of a sequence."""
    tokens = list(prompt)
    for _ in range(count):
        tokens.append(next_token(tokens, vocab_size))
        if tokens[-1] in stop and len(tokens) - len(prompt) > min_tokens:
            break
    return tokens[len(prompt) :]


def prompt_logprob(prompt: list[int], position: int) -> float:
    """The log-probability of a prompt token, a function of the token and all tokens before it; exact in 32 bits."""
    return -(zlib.crc32(array("I", prompt[: position + 1]).tobytes()) % 2**20) / 2**10


def prompt_value(prompt: list[int], name: str) -> list[float]:
    """The value of a prompt, by the name of its kind; exact in 32 bits."""
    checksum = zlib.crc32(array("I", prompt).tobytes(), zlib.crc32(name.encode()))
    return [float(checksum % 2**16), float(checksum >> 16)]


@dataclass(frozen=True)
class Option:
    token_id: int
    logprob: float


@dataclass(frozen=True)
class Options:
    top: list[Option]


def options(tokens: list[int], vocab_size: int, count: int) -> list[Option]:
    """The most likely next tokens, a function of all tokens before."""
    rng = random.Random(zlib.crc32(array("I", tokens).tobytes()))
    weights = [rng.random() ** 2 + 1e-3 for _ in range(vocab_size)]
    ranked = sorted(((weight / sum(weights), token) for token, weight in enumerate(weights)), reverse=True)
    return [Option(token, math.log(share)) for share, token in ranked[:count]]


class Memory:
    """The slots of one tier, and the step that wrote each of them."""

    def __init__(self, num_blocks: int, block_size: int) -> None:
        self.block_size = block_size
        self.slots: list[Slot] = [None] * (num_blocks * block_size)
        self.filled_by = [0] * (num_blocks * block_size)
        self.block_hashes: dict[int, bytes] = {}
        self.with_memory: set[int] = set()

    def read(self, block_id: int) -> Block:
        place = self._place(block_id)
        return self.slots[place], self.filled_by[place]

    def write(self, block_id: int, slots: list[Slot], step_id: int) -> None:
        place = self._place(block_id)
        self.slots[place], self.filled_by[place] = slots, [step_id] * self.block_size
        self.with_memory.add(block_id)
        self.block_hashes.pop(block_id, None)

    def wipe(self, block_id: int) -> None:
        self.write(block_id, [None] * self.block_size, 0)

    def _place(self, block_id: int) -> slice:
        return slice(block_id * self.block_size, (block_id + 1) * self.block_size)


@dataclass
class Transfer:
    step_id: int
    direction: Direction
    pairs: list[BlockPair]
    read_early: list[list[Slot]] | None  # the blocks to copy, if they are read at the start of the step


class MemoryWorker:
    """Executes plans in order. Raises AssertionError if a plan is not executable.

    With an `rng`, transfers take several steps and sometimes fail; without one, they are done with their step. If it
    `speculates`, it returns a random number of tokens for a sequence, from 0 to the maximum of the plan. `results` maps
    each kind of value to the way in which its prompts are computed.
    """

    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        vocab_size: int = 2,
        num_host_blocks: int = 0,
        rng: random.Random | None = None,
        *,
        speculates: bool = False,
        results: Mapping[str, PromptComputation] | None = None,
    ) -> None:
        self._results = results or {}
        self.vocab_size = vocab_size
        self.block_size = block_size
        self.device = Memory(num_blocks, block_size)
        self.host = Memory(num_host_blocks, block_size)
        self.known: dict[int, Known] = {}
        self._returned: set[int] = set()  # sequences that ended with their values
        self.num_computed = 0
        self.in_progress: list[Transfer] = []
        self._rng = rng
        self.speculates = speculates
        self.measure: Callable[[], MemoryPressure | None] = lambda: None
        """What each step reports of the worker's memory."""
        self.num_returned: Counter[int] = Counter()  # speculations, by their number of tokens

    def restart(self) -> BlockHashReport:
        """A new scheduler connects: drops all sequences and transfers, and reports the block hashes."""
        self.known.clear()
        self._returned.clear()
        self.in_progress.clear()
        for memory in (self.device, self.host):
            memory.filled_by = [0] * len(memory.filled_by)
        return BlockHashReport(dict(self.device.block_hashes), dict(self.host.block_hashes))

    def step(self, plan: StepPlan) -> StepOutcome:
        self.device.block_hashes.update(plan.block_hashes)
        self.host.block_hashes.update(plan.host_block_hashes)
        for sequence_id in plan.finished_ids:
            self.known.pop(sequence_id, None)
        for direction, pairs in ((Direction.OUT, plan.swap_out), (Direction.IN, plan.swap_in)):
            if pairs:
                self._begin(plan.step_id, direction, pairs)
        for copy in plan.copies:
            self._check_not_in_transfer(copy.destination)
            self.device.write(copy.destination, self.device.read(copy.source)[0], plan.step_id)
        for change in plan.block_table_updates:
            if change.sequence_id in self._returned:
                continue
            known, size = self.known[change.sequence_id], self.block_size
            positions = range(change.index * size, (change.index + 1) * size)
            same = [(position, known.tokens[position]) for position in positions]
            assert self.device.read(change.block_id)[0] == same, "a block is replaced by one that holds something else"
            known.table[change.index] = change.block_id
        self._discard(plan)
        for new in plan.new_sequences:
            assert new.sequence.id not in self.known, "a sequence is new twice"
            num_prompt = len(new.sequence.request.prompt) if new.needs_prompt_logprobs else 0
            self.known[new.sequence.id] = Known(list(new.tokens), num_prompt=num_prompt)
        for part in plan.scheduled:
            self.known[part.sequence.id].table += part.new_block_ids
        for part in plan.scheduled:  # all tokens of a step are stored before attention is computed
            if self._is_without_kv(part.sequence.request):
                self._compute_without_kv(part)
            else:
                self._store(part, plan.step_id)
        prompt_logprobs = {
            place: found for place, part in enumerate(plan.scheduled) if (found := self._prompt_logprobs(part))
        }
        results = [self._sample(part, plan.step_id) for part in plan.scheduled]
        transfers = self._finish_transfers(plan.step_id, wait=not plan.scheduled)
        return StepOutcome(results, transfers, prompt_logprobs=prompt_logprobs, memory_pressure=self.measure())

    @property
    def num_blocks_with_memory(self) -> int:
        """Blocks of both tiers that were written since they were discarded."""
        return sum(map(len, (self.device.with_memory, self.host.with_memory)))

    def _discard(self, plan: StepPlan) -> None:
        """Loses the contents of blocks that nothing may read any more."""
        named = {block_id for known in self.known.values() for block_id in known.table}
        assert named.isdisjoint(plan.discarded_block_ids), "a block of a sequence is discarded"
        for block_id in plan.discarded_block_ids:
            self._check_not_in_transfer(block_id)
            self.device.wipe(block_id)
        for block_id in plan.discarded_host_block_ids:
            assert all(pair.host != block_id for transfer in self.in_progress for pair in transfer.pairs)
            self.host.wipe(block_id)
        self.device.with_memory.difference_update(plan.discarded_block_ids)
        self.host.with_memory.difference_update(plan.discarded_host_block_ids)

    def _is_without_kv(self, request: Request) -> bool:
        how = self._results.get(request.result.name)
        return request.returns_value and how is PromptComputation.INDIVISIBLE_WITHOUT_KV

    def _compute_without_kv(self, part: ScheduledSequence) -> None:
        known = self.known[part.sequence.id]
        assert not known.table, "a sequence without keys and values has blocks"
        known.position = part.num_tokens
        self.num_computed += part.num_tokens

    def _prompt_logprobs(self, part: ScheduledSequence) -> list[float]:
        """Log-probabilities of the prompt tokens after those that a part computes."""
        known = self.known[part.sequence.id]
        assert known.position is not None
        first, end = known.position - part.num_tokens + 1, min(known.position + 1, known.num_prompt)
        return [prompt_logprob(known.tokens, position) for position in range(first, end)]

    def _value(self, part: ScheduledSequence) -> ValueResult:
        request, known = part.sequence.request, self.known.pop(part.sequence.id)
        self._returned.add(part.sequence.id)
        assert part.samples, "a prompt is computed to its end, and nothing is expected"
        if self._results[request.result.name] is not PromptComputation.CHUNKED:
            assert part.num_tokens == len(request.prompt), "an indivisible prompt is divided"
        return ValueResult(prompt_value(known.tokens, request.result.name))

    def _begin(self, step_id: int, direction: Direction, pairs: list[BlockPair]) -> None:
        early = None
        if direction is Direction.OUT:
            if self._rng is None or self._rng.random() < 0.5:
                early = [self.device.read(pair.device)[0] for pair in pairs]
            for pair in pairs:
                self.host.wipe(pair.host)
        else:
            for pair in pairs:
                self.device.wipe(pair.device)
        self.in_progress.append(Transfer(step_id, direction, pairs, early))

    def _store(self, part: ScheduledSequence, step_id: int) -> None:
        known = self.known[part.sequence.id]
        start = part.start if known.position is None else known.position
        if part.num_cached_tokens > part.start:  # also true if a step that returned no token is repeated
            known.num_cached_tokens = part.num_cached_tokens
        first = max(start, known.num_cached_tokens)
        end = start + part.num_tokens
        known.position = end
        written = set(known.table[first // self.block_size : -(-end // self.block_size)])
        for block_id in written:
            self._check_not_in_transfer(block_id)
            self.device.block_hashes.pop(block_id, None)
            self.device.with_memory.add(block_id)
        for sequence_id, other in self.known.items():
            if sequence_id != part.sequence.id:
                assert written.isdisjoint(other.table), "a step writes a block that another sequence reads"
        for position in range(first, end):
            slot = self._slot(known, position)
            self.device.slots[slot] = (position, known.tokens[position])
            self.device.filled_by[slot] = step_id
        self.num_computed += part.num_tokens

    def _finish_transfers(self, step_id: int, *, wait: bool) -> list[SwapDone]:
        done = []
        for transfer in list(self.in_progress):
            if self._rng is None or wait or self._rng.random() < 0.5:
                self.in_progress.remove(transfer)
                failure = "broken" if self._rng is not None and self._rng.random() < 0.05 else None
                if failure is None:
                    self._move(transfer, step_id)
                done.append(SwapDone(transfer.step_id, transfer.direction, 0.001, failure))
        return done

    def _move(self, transfer: Transfer, step_id: int) -> None:
        for place, pair in enumerate(transfer.pairs):
            if transfer.direction is Direction.IN:
                self.device.write(pair.device, self.host.read(pair.host)[0], step_id)
            elif transfer.read_early is not None:
                self.host.write(pair.host, transfer.read_early[place], step_id)
            else:
                self.host.write(pair.host, self.device.read(pair.device)[0], step_id)

    def _check_not_in_transfer(self, block_id: int) -> None:
        for transfer in self.in_progress:
            for pair in transfer.pairs:
                assert pair.device != block_id, "a step writes a block that a transfer names"

    def _sample(self, part: ScheduledSequence, step_id: int) -> SampledSequence:
        sequence_id, beam = part.sequence.id, part.sequence.request.beam
        known = self.known[sequence_id]
        if self._is_without_kv(part.sequence.request):
            return self._value(part)
        end = known.position
        assert end is not None
        context = [self.device.slots[self._slot(known, position)] for position in range(end)]
        in_transit = {pair.device for t in self.in_progress if t.direction is Direction.IN for pair in t.pairs}
        assert in_transit.isdisjoint(known.table), f"sequence {sequence_id} reads blocks that are not copied yet"
        assert context == list(enumerate(known.tokens[:end])), f"sequence {sequence_id} reads a wrong context"
        if end < len(known.tokens):
            return Drawn([])
        if part.sequence.request.returns_value:
            return self._value(part)
        count = num_candidates(beam.width, len(part.sequence.request.stop_token_ids)) if beam is not None else 0
        logprobs: list[object] = [Options(options(known.tokens, self.vocab_size, count))] if beam is not None else []
        if beam is None and self.speculates:
            return self._speculate(part, known, end, step_id)
        known.tokens.append(next_token(known.tokens, self.vocab_size))
        return Drawn(known.tokens[-1:], logprobs)

    def _speculate(self, part: ScheduledSequence, known: Known, end: int, step_id: int) -> Drawn:
        """Accepts some of the drafts that the plan has room for. The KV of a rejected draft stays in its slot."""
        assert self._rng is not None
        num_tokens = self._rng.randint(0, 1 + part.max_extra_tokens)
        self.num_returned[num_tokens] += 1
        if num_tokens == 0:
            known.position = end - 1
            return Drawn([])
        for _ in range(num_tokens):
            known.tokens.append(next_token(known.tokens, self.vocab_size))
        for position in range(end, end + part.max_extra_tokens):
            slot = self._slot(known, position)
            block_id = known.table[position // self.block_size]
            self._check_not_in_transfer(block_id)
            self.device.block_hashes.pop(block_id, None)
            is_accepted = position < end + num_tokens - 1
            self.device.slots[slot] = (position, known.tokens[position]) if is_accepted else (position, -1)
            self.device.filled_by[slot] = step_id
        known.position = end + num_tokens - 1
        return Drawn(known.tokens[-num_tokens:])

    def _slot(self, known: Known, position: int) -> int:
        return known.table[position // self.block_size] * self.block_size + position % self.block_size
