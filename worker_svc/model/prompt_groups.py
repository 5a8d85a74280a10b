"""Prompts of similar lengths in groups, so that torch's attention computes each group in one call."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch
from torch import Tensor

# Prompts share one call of the attention while at least this share of its keys are tokens.
_LEAST_FILLED = 0.75


@dataclass(frozen=True, slots=True, eq=False)
class PromptGroup:
    """Prompts whose attention is one call.

    `rows` [num_prompts, longest] are the tokens' rows in the batch; those beyond a prompt's end repeat its last token,
    and `mask` [num_prompts, 1, 1, longest] hides them; None: there are none. The results at the places `sources`
    [num_tokens], None for all, are those of the rows `targets`.
    """

    rows: Tensor
    mask: Tensor | None
    sources: Tensor | None
    targets: Tensor


def prompt_groups(lengths: Sequence[int], device: torch.device) -> list[PromptGroup]:
    """Prompts of similar lengths together, the longest first."""
    starts = [0, *accumulate(lengths)]
    order = sorted(range(len(lengths)), key=lambda index: -lengths[index])
    groups: list[list[int]] = []
    num_tokens = 0
    for index in order:
        longest = lengths[groups[-1][0]] if groups else 0
        if groups and num_tokens + lengths[index] >= _LEAST_FILLED * longest * (len(groups[-1]) + 1):
            groups[-1].append(index)
            num_tokens += lengths[index]
        else:
            groups.append([index])
            num_tokens = lengths[index]
    return [_group([(starts[index], lengths[index]) for index in members], device) for members in groups]


def _group(members: Sequence[tuple[int, int]], device: torch.device) -> PromptGroup:
    """A group of prompts, each with its first row and its length; the first one is the longest."""
    longest = members[0][1]
    columns = torch.arange(longest)
    first, lengths = (torch.tensor(column)[:, None] for column in zip(*members, strict=True))
    rows = first + columns.minimum(lengths - 1)
    is_token = columns < lengths
    targets = rows[is_token].to(device)
    if bool(is_token.all()):
        return PromptGroup(rows.to(device), None, None, targets)
    sources = is_token.flatten().nonzero().flatten()
    return PromptGroup(rows.to(device), is_token[:, None, None].to(device), sources.to(device), targets)
