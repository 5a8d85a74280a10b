"""Takes in what a step returned for its sequences."""

from scheduler_svc.core.beams import BeamSearches
from scheduler_svc.core.events import (
    End,
    Event,
    Failure,
    MaxTokens,
    PromptLogprobsEvent,
    StopToken,
    TokensEvent,
    ValueComputed,
)
from scheduler_svc.core.policy.waiting import WaitingSequences
from scheduler_svc.core.replica import Replica
from scheduler_svc.core.request import Phase, Request
from scheduler_svc.core.request_table import RequestTable
from scheduler_svc.core.step import (
    FailureCause,
    SampledSequence,
    ScheduledSequence,
    StepOutcome,
    StepPlan,
    ValueResult,
)
from scheduler_svc.core.totals import Totals


class Committer:
    """Commits one sequence's part of a step at a time."""

    def __init__(
        self,
        requests: RequestTable,
        waiting: WaitingSequences,
        beams: BeamSearches,
        totals: Totals,
    ) -> None:
        self._requests = requests
        self._waiting = waiting
        self._beams = beams
        self._totals = totals

    def commit(self, replica: Replica, part: ScheduledSequence, result: SampledSequence, events: list[Event]) -> int:
        """Takes in the result for a sequence that has not ended; returns how many tokens are new."""
        sequence, samples, tokens = part.sequence, part.samples, result.token_ids
        request, num_new = sequence.request, len(tokens)
        if result.failure is not None and result.failure_cause is FailureCause.GRAMMAR_TOO_COMPLEX:
            text = "the constraint on the output takes more work for one token than the limits allow"
            self._fail(request, events, Failure.GRAMMAR_TOO_COMPLEX, text)
            return 0
        if result.failure is not None and result.failure_cause is FailureCause.OUT_OF_MEMORY:
            text = "the worker ran out of memory in a step whose newest request this was"
            self._fail(request, events, Failure.UNAVAILABLE, text)
            return 0
        if result.failure is not None or (num_new != samples and not _may_return(replica, part, num_new)):
            # Numbers that are not finite in one block spoil earlier ones that were computed with it: other requests
            # must not find any of them.
            replica.kv.forget_contents(sequence)
            self._fail(request, events)
            return 0
        if samples and not num_new and request.returns_value:
            self._commit_value(replica, part, result, events)
            return 0
        if request.beam is not None:
            return self._commit_beam(replica, part, result, events)
        offset = sequence.num_output
        if num_new > 1:
            tokens = tokens[: request.num_until_end(offset, tokens)]
        num_kept = len(tokens)
        # A step that samples is planned for one token; what it returned beyond that is computed, too. What is after
        # an end is not published.
        sequence.num_computed += num_new - samples
        sequence.num_committed += part.num_tokens + num_kept - samples
        if tokens:
            sequence.append(tokens)
        if sequence.phase is Phase.RUNNING:
            replica.publish(sequence)
        self._waiting.release_ready(sequence)
        if not num_kept:
            return 0
        self._totals.generation_tokens += num_kept
        num_output, last = offset + num_kept, tokens[-1]
        end: End | None = None
        if last in request.stop_token_ids and num_output > request.min_tokens:
            end = StopToken(last)
        elif num_output >= sequence.max_tokens:
            end = MaxTokens()
        if end is not None:
            self._waiting.admission.observe_end(request, num_output)
            self._requests.end(sequence, replica)
        events.append(TokensEvent(sequence, offset, tokens, result.logprobs[:num_kept], end))
        return num_kept

    def _commit_beam(
        self, replica: Replica, part: ScheduledSequence, result: SampledSequence, events: list[Event]
    ) -> int:
        """A beam is computed. Which tokens follow is for its search to decide, not for what was sampled.

        Returns the new tokens of all beams with the last one of them.
        """
        sequence = part.sequence
        sequence.num_committed += part.num_tokens
        if sequence.phase is Phase.RUNNING:
            replica.publish(sequence)
        self._waiting.release_ready(sequence)
        if not part.samples:
            return 0
        advanced = self._beams.commit(part, result)
        if advanced is None:
            self._fail(sequence.request, events)
            return 0
        num_beams, found = advanced
        self._totals.generation_tokens += sum(len(event.token_ids) for event in found)
        events.extend(found)
        return num_beams

    def _commit_value(
        self, replica: Replica, part: ScheduledSequence, result: SampledSequence, events: list[Event]
    ) -> None:
        """A prompt is computed to its end, and its value ends the sequence."""
        sequence = part.sequence
        sequence.num_committed += part.num_tokens
        if not isinstance(result, ValueResult):
            self._fail(sequence.request, events)
            return
        if sequence.phase is Phase.RUNNING and sequence.block_ids:
            replica.publish(sequence)
        if replica.shape.forgets_sequences_with_values:
            sequence.num_sent_blocks = None
        self._requests.end(sequence, replica)
        events.append(TokensEvent(sequence, 0, (), end=ValueComputed(result.value)))

    def _fail(
        self,
        request: Request,
        events: list[Event],
        reason: Failure = Failure.INTERNAL,
        message: str = "the worker could not compute this request",
    ) -> None:
        failed = self._requests.cancel(request.key, reason, message)
        if failed is not None:
            events.append(failed)


def prompt_logprobs_events(plan: StepPlan, outcome: StepOutcome) -> list[Event]:
    """Takes in log-probabilities of prompts. Tokens that are computed again return none a second time."""
    events: list[Event] = []
    for schedule_index, logprobs in outcome.prompt_logprobs.items():
        part = plan.scheduled[schedule_index]
        sequence = part.sequence
        if sequence.phase is Phase.ENDED or outcome.results[schedule_index].failure is not None:
            continue
        num_known = sequence.num_prompt_logprobs
        assert part.start <= num_known, "log-probabilities of a prompt leave a gap"
        if new := logprobs[num_known - part.start :]:
            sequence.num_prompt_logprobs += len(new)
            events.append(PromptLogprobsEvent(sequence.request, num_known + 1, new))
    return events


def _may_return(replica: Replica, part: ScheduledSequence, num_tokens: int) -> bool:
    """Whether a step may return `num_tokens` tokens for a sequence: one if it samples, or none and the last known token
    is computed again; with speculation more.

    With a value there are none.
    """
    if not part.samples or part.sequence.request.returns_value:
        return num_tokens == 0
    may_be_none = part.sequence.request.beam is None
    return 1 - may_be_none <= num_tokens <= 1 + part.max_extra_tokens
