"""A step in the making: what is in it, and how much more it may take."""

from dataclasses import dataclass, field

from scheduler_svc.core.costs import CostModel
from scheduler_svc.core.plan import NewSequence, ScheduledSequence
from scheduler_svc.core.sequence import Sequence

LONG_PROMPT = 1024  # tokens to compute from which on a prompt is held back for the sake of those who decode


@dataclass(slots=True)
class StepBuilder:
    """A step in the making: how many tokens it may still take, and how many seconds of long prompts."""

    budget: int
    costs: CostModel
    long_prompt_seconds: float | None = None  # None: as many as there are
    scheduled: list[ScheduledSequence] = field(default_factory=list)
    new_sequences: list[NewSequence] = field(default_factory=list)

    def num_prefill_tokens(self, sequence: Sequence) -> int:
        """How many tokens of a prompt the step takes."""
        num_tokens = min(sequence.num_uncomputed, self.budget)
        if len(sequence.tokens) - sequence.num_stored < LONG_PROMPT:
            return num_tokens
        if self.long_prompt_seconds is None:
            return num_tokens
        num_before = sequence.num_computed
        # One token goes on in any case, however far back it looks.
        fitting = max(
            self.costs.prefill_within(self.long_prompt_seconds, num_before), int(self.long_prompt_seconds > 0)
        )
        num_tokens = min(num_tokens, fitting)
        self.long_prompt_seconds -= self.costs.recompute_seconds(num_tokens, num_before)
        return num_tokens
