"""Applies the sampled tokens of launched steps to their sequences."""

from itertools import islice

from worker_svc.block_hashes import BlockHashTable
from worker_svc.drafting import Drafting
from worker_svc.launched_step import LaunchedStep, ScheduledRun
from worker_svc.out_of_memory import OUT_OF_MEMORY
from worker_svc.sampler import SamplerOutput, num_accepted
from worker_svc.sequence_table import SequenceTable
from worker_svc.step import FailureReason, SequenceResult, TokenLogprobs

_NO_TOKEN = "there is no token to sample: the logits are not finite, or all tokens are suppressed"


class SampleApplier:
    """Waits for what launched steps sample, and makes results of it. For the runner's thread."""

    def __init__(
        self,
        sequences: SequenceTable,
        block_hashes: BlockHashTable,
        drafting: Drafting | None,
        max_scored_rows: int,
    ) -> None:
        """`max_scored_rows` is how many log-probabilities of a prompt one piece of a step computes."""
        self._sequences = sequences
        self._block_hashes = block_hashes
        self._drafting = drafting
        self._max_scored_rows = max_scored_rows

    def apply(self, launched: LaunchedStep) -> None:
        """Waits for a step's sampled tokens and adds them to their sequences, once.

        Raises only for an internal error or one of the device; then every sequence in it has failed.
        """
        if launched.is_applied:
            return
        with self._sequences.failing_all(launched.runs):
            output = SamplerOutput([], []) if launched.sample_handle is None else launched.sample_handle.result()
        prompt_logprobs, failed = launched.prompt_logprobs(output, self._max_scored_rows)
        left_out = self._fail_left_out(launched, output) if output.left_out else []
        self._apply_tokens(launched, output)
        for run in (*failed, *left_out):
            launched.results[run.schedule_index] = self._fail_without_token(run)
        launched.add_prompt_logprobs(prompt_logprobs)
        launched.is_applied = True

    def _fail_left_out(self, launched: LaunchedStep, output: SamplerOutput) -> list[ScheduledRun]:
        """The runs for which memory did not suffice."""
        left_out = [run for run in launched.runs if run.sequence_id in output.left_out]
        launched.num_left_out = sum(run.sequence.failure is None for run in left_out)
        for run in left_out:
            self._sequences.fail_run(run, OUT_OF_MEMORY)
        return left_out

    def _apply_tokens(self, launched: LaunchedStep, output: SamplerOutput) -> None:
        sampling = [run for run in launched.runs if run.samples]
        if launched.has_drafts:
            rows = zip(output.tokens, output.logprobs, strict=True)
            for run in sampling:
                result = self._apply_verified(run, list(islice(rows, 1 + len(run.draft))))
                launched.results[run.schedule_index] = result
        else:
            for run, token, logprobs in zip(sampling, output.tokens, output.logprobs, strict=True):
                launched.results[run.schedule_index] = self._apply_sample(run, token, logprobs)

    def _apply_sample(self, run: ScheduledRun, token: int | None, logprobs: TokenLogprobs | None) -> SequenceResult:
        """A sequence's result, from the token that it was promised."""
        if token is None or run.sequence.failure is not None:
            return self._fail_without_token(run)
        run.sequence.fill_placeholder(run.end, token)
        return SequenceResult(run.sequence_id, [token], () if logprobs is None else (logprobs,))

    def _apply_verified(self, run: ScheduledRun, rows: list[tuple[int | None, TokenLogprobs | None]]) -> SequenceResult:
        """A sequence's result, from the tokens sampled after its last known token and after each draft token."""
        sequence = run.sequence
        if sequence.failure is not None:
            return self._fail_without_token(run)
        num_rows = num_accepted([token for token, _ in rows], run.draft)
        sampled = [(token, logprobs) for token, logprobs in rows[:num_rows] if token is not None]
        if not sampled and run.draft and self._drafting is not None:
            # A draft that overflows invalidates the rows before it too: the next step computes them without a draft.
            self._drafting.stop(sequence)
            sequence.num_computed = run.start
            return SequenceResult(run.sequence_id, [])
        if not sampled:
            return self._fail_without_token(run)
        tokens = [token for token, _ in sampled]
        sequence.extend(tokens)
        return SequenceResult(run.sequence_id, tokens, [logprobs for _, logprobs in sampled if logprobs is not None])

    def _fail_without_token(self, run: ScheduledRun) -> SequenceResult:
        """The result of a sequence that has failed, or fails because it has no token."""
        if run.sequence.failure == OUT_OF_MEMORY:
            return SequenceResult(
                run.sequence_id, [], failure=OUT_OF_MEMORY, failure_reason=FailureReason.OUT_OF_MEMORY
            )
        matcher = run.sequence.matcher
        in_grammar = None if matcher is None else matcher.failure
        if run.sequence.failure is None:
            if in_grammar is None:  # its keys and values may not be finite either
                self._block_hashes.invalidate_written(run.sequence.blocks.values.tolist())
            self._sequences.fail_run(run, _NO_TOKEN if in_grammar is None else in_grammar.text)
        reason = FailureReason.INTERNAL if in_grammar is None else in_grammar.reason
        return SequenceResult(run.sequence_id, [], failure=run.sequence.failure, failure_reason=reason)
