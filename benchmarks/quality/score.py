"""How likely a model finds a text, through the worker's runner: tokens are drawn as for any request, and steered."""

from collections.abc import Sequence
from dataclasses import dataclass

from worker_svc.runner import Runner
from worker_svc.step import NewSequence, SamplingParams, ScheduledSequence, Step

# The most that a request may add to a logit: the token is drawn, whatever the model makes of it. Log-probabilities are
# of the model's own logits.
_CERTAIN = 100.0


@dataclass(frozen=True)
class Window:
    """A stretch of the text: the tokens from `num_given` on are scored, each after all before it in the window."""

    tokens: Sequence[int]
    num_given: int


def windows_of(tokens: Sequence[int], size: int) -> list[Window]:
    """Windows that overlap by half: each token beyond the first half is scored once, after half a window or more."""
    half = size // 2
    starts = range(0, max(1, len(tokens) - half), half)
    return [Window(tokens[start : start + size], half) for start in starts if start + half < len(tokens)]


def score(runner: Runner, windows: Sequence[Window]) -> list[float]:
    """The natural logarithms of the probabilities of all tokens to score.

    Prompts are computed as prefill, then a token of each window at a time as decode. Each draw is a sequence of its
    own, which takes over the blocks of the last. Raises RuntimeError where the runner fails.
    """
    limits = runner.limits
    pages = -(-max(len(window.tokens) for window in windows) // limits.block_size)
    tables = [list(range(row * pages, (row + 1) * pages)) for row in range(len(windows))]
    for row, window in enumerate(windows):
        for start in range(0, window.num_given - 1, limits.max_step_tokens):
            count = min(limits.max_step_tokens, window.num_given - 1 - start)
            new = NewSequence(row, list(window.tokens[: window.num_given]), window.num_given, 0, SamplingParams())
            _run(runner, Step([], [new], [ScheduledSequence(row, start, count, tables[row])]))
            _run(runner, Step([row], [], []))
    logprobs: list[float] = []
    next_id = len(windows)
    for place in range(max(len(window.tokens) for window in windows)):
        new_sequences, scheduled = [], []
        for window, table in zip(windows, tables, strict=True):
            if not window.num_given <= place < len(window.tokens):
                continue
            params = SamplingParams(logit_bias={window.tokens[place]: _CERTAIN}, logprobs=0)
            new_sequences.append(NewSequence(next_id, list(window.tokens[:place]), 1, 0, params))
            scheduled.append(ScheduledSequence(next_id, place - 1, 1, table))
            next_id += 1
        if scheduled:
            logprobs += _run(runner, Step([], new_sequences, scheduled))
            _run(runner, Step([new.sequence_id for new in new_sequences], [], []))
    return logprobs


def _run(runner: Runner, step: Step) -> list[float]:
    wanted = [next(iter(new.sampling.logit_bias), None) for new in step.new_sequences]
    results = runner.step(step).sequences
    if failure := next((result.failure for result in results if result.failure is not None), None):
        raise RuntimeError(failure)
    for result, token in zip(results, wanted, strict=True):
        if token is not None and result.token_ids != [token]:
            raise RuntimeError(f"token {token} was to be drawn, and {result.token_ids} was")
    return [told.logprob for result in results for told in result.logprobs]
