"""A step under construction."""

from scheduler_svc.core.costs import CostModel
from scheduler_svc.core.limits import SchedulerLimits
from scheduler_svc.core.planning.new_request_reserve import PromptLimit
from scheduler_svc.core.replica import Replica
from scheduler_svc.core.request import Sequence
from scheduler_svc.core.step import NewSequence, ScheduledSequence

LONG_PROMPT = 1024  # tokens to compute from which on a prompt is limited, so that decodes do not wait for it
MAX_NEW_TOKENS = 1 << 22
"""Known tokens of the sequences that a step sends to a worker that does not know them, at most, unless it is one
sequence. They are sent whole, whatever is cached of them. They take up to 20 MiB of a message of at most 64 MiB.
"""
# The prompts of a step that computes more tokens than usual take at most 2 to 5 times as long as its decodes: 2.5 times
# the mean ratio of the last steps, if that is within these. With more than 5 they would hardly be computed faster.
_LEAST_FACTOR, _MOST_FACTOR = 2.0, 5.0
_HEADROOM = 2.5


def is_long(sequence: Sequence) -> bool:
    """Whether a prompt has many tokens to compute."""
    return len(sequence.tokens) - sequence.num_cached_tokens >= LONG_PROMPT


class _TimeLimit:
    """Seconds of a step that are left to some of its prompts."""

    def __init__(self, seconds: float, costs: CostModel) -> None:
        self._seconds = seconds
        self._costs = costs

    def num_fitting(self, num_before: int) -> int:
        """Tokens that fit after so many of their sequence: at least one if any time is left."""
        return max(self._costs.prefill_within(self._seconds, num_before), int(self._seconds > 0))

    def takes(self, num_tokens: int) -> bool:
        """Whether a whole prompt fits."""
        return self._costs.recompute_seconds(num_tokens) <= self._seconds

    def take(self, num_tokens: int, num_before: int = 0) -> None:
        """A prompt takes time for so many tokens after others of its sequence."""
        self._seconds -= self._costs.recompute_seconds(num_tokens, num_before)


class StepBuilder:
    """What a step computes so far, and how much more it may take: tokens, and seconds of some prompts."""

    def __init__(self, replica: Replica, limits: SchedulerLimits) -> None:
        self.replica = replica
        self.num_tokens = 0
        self.budget = min(limits.max_step_tokens, replica.shape.max_step_tokens)
        self.scheduled: list[ScheduledSequence] = []
        self.new_sequences: list[NewSequence] = []
        self._num_new_tokens = 0  # of these
        self.is_closed = False  # nothing is admitted: blocks are short, or an indivisible prompt did not fit
        self.begins_with_due = False  # with an indivisible prompt that did not fit into the step before
        self._long_prompts: _TimeLimit | None = None
        self._some_prompts: tuple[PromptLimit, _TimeLimit] | None = None  # which, and their time together
        self._due_seconds = 0.0  # that the due prompt takes

    # What a step may take.

    def halve_rest(self) -> None:
        """Halves what is left of the budget of tokens, but not below one."""
        self.budget = -(-self.budget // 2)

    def limit_prompts(self, decode_seconds: float, *, many_decode: bool) -> None:
        """Leaves prompts the usual tokens of a step, or half of them, or more beside decodes that take long.

        The decodes of a step wait for its prompts, and half of the usual tokens are computed at almost the same rate:
        half are enough while as many sequences decode as wait for their prompts (`many_decode`). But each step computes
        all decodes anew. Where they take long, the fewer steps it takes to compute the prompts that wait, the sooner
        their first tokens are there. Where prompts take most of the device's time, twice the time of the decodes is too
        little, and they would queue up: so a step may compute more of them than come on average while its decodes are
        computed.
        """
        usual, costs = self.replica.shape.usual_step_tokens, self.replica.costs
        # Of prompts that are not long: those that are have a limit of their own.
        tokens_per_second = usual / costs.recompute_seconds(usual)
        factor = min(max(_LEAST_FACTOR, _HEADROOM * costs.prompt_factor), _MOST_FACTOR)
        fitting = int(factor * decode_seconds * tokens_per_second)
        least = usual // 2 if many_decode else usual
        self.budget = min(self.budget, max(1, least - self.num_tokens, fitting))

    def limit_long_prompts(self, seconds: float) -> None:
        """Gives long prompts at most `seconds` of the step's time, a due indivisible prompt included."""
        self._long_prompts = _TimeLimit(seconds - self._due_seconds, self.replica.costs)

    def limit_some_prompts(self, limit: PromptLimit, seconds: float) -> None:
        """Gives the prompts to which a limit applies at most `seconds` of the step's time in total."""
        self._some_prompts = limit, _TimeLimit(seconds, self.replica.costs)

    def num_prefill_tokens(self, sequence: Sequence, most: int | None = None) -> int:
        """How many of a prompt's tokens fit, at most `most`; they are taken from the time for such prompts."""
        num_tokens = min(sequence.num_uncomputed, self.budget if most is None else most)
        limits, num_before = self._time_limits(sequence), sequence.num_computed
        for limit in limits:
            num_tokens = min(num_tokens, limit.num_fitting(num_before))
        for limit in limits:
            limit.take(num_tokens, num_before)
        return num_tokens

    def can_send(self, sequence: Sequence) -> bool:
        """Whether the worker knows a sequence, or the step's message has room for its tokens. Else it waits for the
        next step.
        """
        if sequence.num_sent_blocks is not None or not self.new_sequences:
            return True
        return self._num_new_tokens + len(sequence.tokens) <= MAX_NEW_TOKENS

    def takes_whole(self, sequence: Sequence) -> bool:
        """Whether an indivisible prompt fits. The first of a step fits however long it is."""
        num_tokens = len(sequence.tokens)
        if not self.scheduled:
            return True
        limits = self._time_limits(sequence)
        if num_tokens > self.budget or not all(limit.takes(num_tokens) for limit in limits):
            return False
        for limit in limits:
            limit.take(num_tokens)
        return True

    def _time_limits(self, sequence: Sequence) -> list[_TimeLimit]:
        limits = []
        if self._long_prompts is not None and is_long(sequence):
            limits.append(self._long_prompts)
        if self._some_prompts is not None and self._some_prompts[0].applies_to(sequence):
            limits.append(self._some_prompts[1])
        return limits

    # What it takes.

    def add(self, sequence: Sequence, num_tokens: int) -> None:
        """Computes the next `num_tokens` tokens of a sequence. There is room for their blocks."""
        start = sequence.num_computed
        num_missing = self.replica.kv.num_missing_blocks(sequence, num_tokens)
        if num_missing > 0:
            self.replica.kv.allocate(sequence, num_missing)
        samples = start + num_tokens == sequence.num_known
        num_extra = 0
        if samples and self.replica.shape.max_sampled_tokens > 1:
            num_extra = self._num_extra_tokens(sequence, num_tokens)
            sequence.num_extra += num_extra
        if samples and sequence.charge is not None:
            sequence.charge.reserve(1 + num_extra)
        sequence.num_computed += num_tokens
        sequence.num_promised += samples
        sequence.num_steps_in_flight += 1
        sequence.num_steps += 1
        if sequence.num_sent_blocks is None:
            self._add_new(NewSequence(sequence, list(sequence.tokens), sequence.needs_prompt_logprobs))
        new_block_ids = sequence.block_ids[sequence.num_sent_blocks or 0 :]
        sequence.num_sent_blocks = len(sequence.block_ids)
        num_cached_tokens = max(start, sequence.num_cached_tokens)
        self.scheduled.append(
            ScheduledSequence(sequence, start, num_tokens, new_block_ids, num_cached_tokens, samples, num_extra)
        )
        self.num_tokens += num_tokens
        self.budget -= num_tokens

    def _add_new(self, new: NewSequence) -> None:
        self.new_sequences.append(new)
        self._num_new_tokens += len(new.tokens)

    def _num_extra_tokens(self, sequence: Sequence, num_tokens: int) -> int:
        """How many tokens a step that samples may return beyond the first: none that would take another block."""
        request, shape = sequence.request, self.replica.shape
        if request.beam is not None or num_tokens > 1:  # a worker drafts for decodes only
            return 0
        num_output = sequence.num_known - len(request.prompt) + sequence.num_extra + 1
        end = sequence.num_computed + sequence.num_extra + num_tokens
        num_slots = shape.num_blocks_for(end) * shape.block_size - end
        most = min(shape.max_sampled_tokens - 1, sequence.max_tokens - num_output, num_slots)
        charge = sequence.charge
        return most if charge is None or charge.pays_ahead else min(most, charge.budget.available - 1)

    def add_indivisible(self, sequence: Sequence) -> None:
        """Computes all of a prompt. Its sequence ends with that."""
        num_tokens = len(sequence.tokens)
        if not self.replica.shape.is_without_kv(sequence.request):
            sequence.num_computed = num_tokens
        sequence.num_promised = 1
        sequence.num_steps_in_flight = 1
        sequence.num_steps = 1
        sequence.num_sent_blocks = len(sequence.block_ids)
        self._add_new(NewSequence(sequence, list(sequence.tokens)))
        self.scheduled.append(ScheduledSequence(sequence, 0, num_tokens, list(sequence.block_ids), 0, True))
        self.num_tokens += num_tokens
        self.budget = max(0, self.budget - num_tokens)

    def add_due(self, sequence: Sequence) -> None:
        """Begins with an indivisible prompt that did not fit into the step before."""
        self.begins_with_due = True
        self._due_seconds = self.replica.costs.recompute_seconds(len(sequence.tokens))
        self.add_indivisible(sequence)
