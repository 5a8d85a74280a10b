"""Sampling by compiled code on a CPU: the tokens of `worker_svc.sampler` in a fraction of the time."""

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from quire_kernels.cpu.sample import SAMPLING_PARAMS_DTYPE, argmax, mask_logits, sample, top_logprobs
from quire_kernels.cpu.thread_pool import ThreadPool
from worker_svc.logprobs import to_token_logprobs
from worker_svc.penalties import adjust_logits, filter_logits, filtered_rows
from worker_svc.sampler import SamplerOutput, SamplingState, uniform_numbers
from worker_svc.step import SamplingParams, TokenLogprobs
from worker_svc.token_masks import TokenMasks

Argmax: TypeAlias = Callable[[Tensor], NDArray[np.int64]]


class CompiledSampler:
    """Samples with a thread pool, one row per thread at a time."""

    def __init__(self, thread_pool: ThreadPool, find_argmax: Argmax | None = None) -> None:
        """`find_argmax` replaces the kernel of that name if the caller has computed the argmax already. Then only the
        logits of rows whose state needs them are read.
        """
        self._thread_pool = thread_pool
        self._argmax = find_argmax or partial(argmax, thread_pool)

    def __call__(
        self, logits: Tensor, states: Sequence[SamplingState], masks: TokenMasks | None = None
    ) -> SamplerOutput:
        """One token for each row of float32 logits [rows, vocab], which may be changed."""
        tokens = self._argmax(logits)
        reported = [row for row, state in enumerate(states) if state.params.logprobs is not None]
        raw = logits[reported] if reported else None
        adjusted = [row for row, state in enumerate(states) if state.adjustments.changes_logits]
        if adjusted:
            part = logits[adjusted]
            adjust_logits(part, [states[row].adjustments for row in adjusted])
            logits[adjusted] = part
        if masks is not None:
            _replace(tokens, masks.rows, mask_logits(self._thread_pool, logits, masks.rows, masks.bits))
        filtered = filtered_rows([state.adjustments for state in states])
        filter_logits(logits, filtered)
        # Of masked rows the argmax is known, unless a filter may have dropped it.
        masked = () if masks is None else masks.rows
        changed = sorted(set(adjusted).difference(masked).union(row for row, _ in filtered))
        if changed:
            rows = np.array(changed, np.int64)
            _replace(tokens, rows, argmax(self._thread_pool, logits[rows], suppressed=True))
        random = np.array(
            [row for row, state in enumerate(states) if not state.is_greedy and tokens[row] >= 0], np.int64
        )
        if len(random):
            tokens[random] = sample(self._thread_pool, logits, random, _sampling_table([states[row] for row in random]))
        sampled = [token if token >= 0 else None for token in tokens.tolist()]
        logprobs: list[TokenLogprobs | None] = [None] * len(states)
        if raw is not None:
            measured = self._measure(raw, tokens[reported].clip(min=0), [states[row].params for row in reported])
            for row, found in zip(reported, measured, strict=True):
                logprobs[row] = found
        return SamplerOutput(sampled, logprobs)

    def _measure(
        self, logits: Tensor, tokens: NDArray[np.int64], params: Sequence[SamplingParams]
    ) -> Iterator[TokenLogprobs]:
        """What is reported of each row of logits [rows, vocab]: its token, its top tokens, and requested ones."""
        vocab = logits.shape[1]
        counts = [min(one.logprobs or 0, vocab) for one in params]
        # The first of the top tokens has the row's largest logit. Another one may be a mask such as -3e38, whose
        # difference to its log-probability is not the norm.
        num_top = max([1 if one.logprob_token_ids else 0 for one in params] + counts)
        values, ids = top_logprobs(self._thread_pool, logits, tokens, num_top)
        for row, (count, one) in enumerate(zip(counts, params, strict=True)):
            found, requested = values[row], list(one.logprob_token_ids)
            if requested:
                norm = logits[row, int(ids[row, 0])] - float(found[1])
                found = np.concatenate([found, (logits[row, requested] - norm).numpy()])
            yield to_token_logprobs(found[None], ids[row : row + 1], [count], [len(requested)])[0]


def _replace(tokens: NDArray[np.int64], rows: NDArray[np.int64], found: NDArray[np.int64]) -> None:
    """Sets the tokens of these rows. A row that held NaN has no token, whatever the kernels made of it."""
    tokens[rows] = np.where(tokens[rows] < 0, -1, found)


def _sampling_table(states: Sequence[SamplingState]) -> NDArray[np.void]:
    table = np.empty(len(states), SAMPLING_PARAMS_DTYPE)
    for name in ("top_p", "temperature", "min_p", "top_k"):
        table[name] = [getattr(state.params, name) for state in states]
    table["number"] = uniform_numbers(states)
    return table
