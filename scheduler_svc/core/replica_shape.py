"""What a worker reports of itself, as far as scheduling needs it."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from scheduler_svc.core.request import Request
from scheduler_svc.core.results import TOKENS, PromptComputation


@dataclass(frozen=True, slots=True)
class ReplicaShape:
    """A worker's sizes and capabilities.

    Rates are per second, as the worker measured them at start-up: bytes swapped, and tokens of prompts computed.
    `results` are the kinds of results that it computes, by name. With `has_kv_in_host_memory` both tiers of blocks are
    in the memory of the machine or container, and take some of it only while they hold something.
    """

    fingerprint: bytes
    block_size: int
    num_blocks: int
    context_length: int
    max_step_tokens: int
    max_sequences: int
    num_host_blocks: int = 0
    block_bytes: int = 0
    swap_bytes_per_second: float = 0.0
    prefill_tokens_per_second: float = 0.0
    max_sampled_tokens: int = 1
    protocol: int = 1
    max_indivisible_tokens: int = 0  # of a prompt that is alone in its step, if that is more than max_step_tokens
    has_kv_in_host_memory: bool = False
    usual_step_tokens: int = 0  # of a step: see StepBuilder.limit_prompts; 0: max_step_tokens
    results: Mapping[str, PromptComputation] = field(default_factory=lambda: {TOKENS.name: PromptComputation.CHUNKED})

    @property
    def max_length(self) -> int:
        """The most tokens that a sequence may have: the model's context, or what the blocks hold if it uses any."""
        if all(how is PromptComputation.INDIVISIBLE_WITHOUT_KV for how in self.results.values()):
            return self.context_length
        return min(self.context_length, self.num_blocks * self.block_size)

    def num_blocks_for(self, num_tokens: int) -> int:
        """Blocks that this many tokens fill or begin."""
        return -(-num_tokens // self.block_size)

    @property
    def forgets_sequences_with_values(self) -> bool:
        """Whether the worker forgets a sequence when it returns its value. Otherwise it waits for the sequence's id."""
        return self.protocol >= 3

    @property
    def has_usual_steps(self) -> bool:
        """Whether steps are usually smaller than the largest."""
        return 0 < self.usual_step_tokens < self.max_step_tokens

    def computes(self, request: Request) -> bool:
        """Whether the worker computes a request's kind of result, for a prompt of its length, with its parameters."""
        how = self.results.get(request.result.name)
        if how is None or request.protocol > self.protocol:
            return False
        return how is PromptComputation.CHUNKED or len(request.prompt) <= self.longest_indivisible

    @property
    def longest_indivisible(self) -> int:
        """The most tokens of a prompt that is computed in one step."""
        return max(self.max_step_tokens, self.max_indivisible_tokens)

    def is_indivisible(self, request: Request) -> bool:
        """Whether a request's prompt is computed in one step."""
        chunked = PromptComputation.CHUNKED
        return request.returns_value and self.results.get(request.result.name, chunked) is not chunked

    def is_without_kv(self, request: Request) -> bool:
        """Whether a request's sequence takes no blocks."""
        without_kv = PromptComputation.INDIVISIBLE_WITHOUT_KV
        return request.returns_value and self.results.get(request.result.name) is without_kv
