"""Draws by compiled code on a processor: what `worker_svc.sampler` draws, in a fraction of the time."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from quire_kernels.cpu.sample import DRAW, draw, likeliest, rank
from quire_kernels.cpu.team import Team
from worker_svc.logprobs import tell_logprobs
from worker_svc.penalties import adjust_logits
from worker_svc.sampler import Draws, SamplingState, draw_numbers
from worker_svc.step import TokenLogprobs

Likeliest: TypeAlias = Callable[[Tensor], NDArray[np.int64]]


class CompiledSampler:
    """`draw_tokens` by a team of threads, each a row at a time."""

    def __init__(self, team: Team, find_likeliest: Likeliest | None = None) -> None:
        """`find_likeliest` stands in for the kernel of that name, for whoever has looked at the logits already."""
        self._team = team
        self._likeliest = find_likeliest or partial(likeliest, team)

    def __call__(self, logits: Tensor, states: Sequence[SamplingState]) -> Draws:
        """One token for each row of float32 logits [rows, vocab], which may be changed."""
        tokens = self._likeliest(logits)
        asked = [(row, state.params.logprobs) for row, state in enumerate(states) if state.params.logprobs is not None]
        reported = [row for row, _ in asked]
        raw = logits[reported] if reported else None
        adjusted = [row for row, state in enumerate(states) if state.adjustments.changes_logits]
        if adjusted:
            part = logits[adjusted]
            adjust_logits(part, [states[row].adjustments for row in adjusted])
            logits[adjusted] = part
            # A row that was no numbers before is none to draw from, whatever became of it.
            tokens[adjusted] = np.where(tokens[adjusted] < 0, -1, likeliest(self._team, part, suppressed=True))
        random = np.array([row for row, state in enumerate(states) if not state.greedy and tokens[row] >= 0], np.int64)
        if len(random):
            tokens[random] = draw(self._team, logits, random, _draws([states[row] for row in random]))
        drawn = [token if token >= 0 else None for token in tokens.tolist()]
        logprobs: list[TokenLogprobs | None] = [None] * len(states)
        if raw is not None:
            counts = [count for _, count in asked]
            measured = rank(self._team, raw, tokens[reported].clip(min=0), min(max(counts), raw.shape[1]))
            for row, told in zip(reported, tell_logprobs(*measured, counts), strict=True):
                logprobs[row] = told
        return Draws(drawn, logprobs)


def _draws(states: Sequence[SamplingState]) -> NDArray[np.void]:
    table = np.empty(len(states), DRAW)
    for name in ("top_p", "temperature", "min_p", "top_k"):
        table[name] = [getattr(state.params, name) for state in states]
    table["number"] = draw_numbers(states)
    return table
