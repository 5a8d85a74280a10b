"""The rules of beam search in transformers, with tensors of fixed shape over the whole vocabulary and masks for
finished beams.

Follows `GenerationMixin._beam_search` of transformers 5 and the functions that it calls, for a batch of one.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

import torch

_NEVER = -1e9  # added to a score, so that it is not chosen


@dataclass(frozen=True)
class Rules:
    """Parameters, with the names of `GenerationConfig`."""

    num_beams: int
    length_penalty: float
    early_stopping: bool | Literal["never"]
    max_new_tokens: int
    eos_token_ids: tuple[int, ...]
    min_new_tokens: int


def search(log_probs: Callable[[Sequence[int]], torch.Tensor], rules: Rules) -> list[tuple[list[int], float]]:
    """The finished sequences and their scores, best first. `log_probs` returns the log-probabilities of the next token:
    float64, [vocab]."""
    width, longest = rules.num_beams, rules.max_new_tokens
    eos = torch.tensor(rules.eos_token_ids, dtype=torch.int64)
    beams_to_keep = max(2, 1 + len(eos)) * width
    is_of_top = torch.arange(beams_to_keep) < width
    running = torch.full((width, longest), -1)
    running_scores = torch.tensor([0.0] + [_NEVER] * (width - 1), dtype=torch.float64)
    found = running.clone()
    found_scores = torch.full((width,), _NEVER, dtype=torch.float64)
    is_finished = torch.zeros(width, dtype=torch.bool)
    for length in range(longest):
        rows = torch.stack([log_probs(tokens[:length].tolist()) for tokens in running])
        if length < rules.min_new_tokens:
            rows[:, eos] = -torch.inf
        vocab_size = rows.shape[1]
        scores, places = torch.topk((rows + running_scores[:, None]).flatten(), beams_to_keep)
        tokens = running[places // vocab_size]
        tokens[:, length] = places % vocab_size
        ends = torch.isin(tokens[:, length], eos) | (length + 1 == longest)

        # Running beams.
        going_on = scores + ends * _NEVER
        chosen = torch.topk(going_on, width).indices
        running, running_scores = tokens[chosen], going_on[chosen]

        # Finished beams: only candidates among the best `width` of all.
        ends &= is_of_top
        ended_scores = scores / (length + 1) ** rules.length_penalty + ~ends * _NEVER
        all_scores = torch.cat([found_scores, ended_scores])
        best = torch.topk(all_scores, width).indices
        found, found_scores = torch.cat([found, tokens])[best], all_scores[best]
        is_finished = torch.cat([is_finished, ends])[best]

        # Stop condition.
        is_patient = rules.early_stopping == "never" and rules.length_penalty > 0
        best_possible = running_scores[0] / float(longest if is_patient else length + 1) ** rules.length_penalty
        worst = torch.where(is_finished, found_scores.min(), _NEVER)
        if not (best_possible > worst).any() or (is_finished.all() and rules.early_stopping is True):
            break
    return [
        ([token for token in tokens if token >= 0], score)
        for tokens, score in zip(found.tolist(), found_scores.tolist(), strict=True)
    ]
