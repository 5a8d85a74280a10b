"""The experts of each token and their weights, from a router's scores.

The weights are a softmax over all experts, of which the largest are kept (arXiv:2101.03961); divided by their sum they
are a softmax over the chosen experts alone (arXiv:2401.04088). DeepSeek's may be sigmoids, chosen by their sum with a
bias, and within groups of experts (arXiv:2405.04434, section 2.2.2; arXiv:2412.19437, section 2.1.2).
"""

from dataclasses import dataclass
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from quire_kernels._checks import require
from quire_kernels._shapes import check_rows, check_vector, next_power_of_2

_MAX_EXPERTS = 1024


@dataclass(frozen=True, slots=True)
class Groups:
    """Groups of consecutive experts of equal number: a token's experts are of the groups with the largest sums of their
    best ranks; of equal groups the lower number first.
    """

    count: int
    num_chosen: int
    """Groups of each token."""
    num_summed: int
    """How many of a group's best ranks are summed."""


class Choices(NamedTuple):
    """The experts of each token, the one with the largest rank first; of equal ranks the lower number first."""

    experts: Tensor
    """int32 [num_tokens, num_chosen]"""
    weights: Tensor
    """float32 [num_tokens, num_chosen]"""


@triton.jit  # type: ignore[untyped-decorator]
def _choose_experts_kernel(  # type: ignore[no-untyped-def]
    p_experts,
    p_weights,
    p_scores,
    p_bias,
    scale,
    stride_scores,
    NUM_EXPERTS: tl.constexpr,
    NUM_CHOSEN: tl.constexpr,
    NORMALIZED: tl.constexpr,
    SIGMOID: tl.constexpr,
    NUM_GROUPS: tl.constexpr,
    GROUPS_CHOSEN: tl.constexpr,
    GROUP_SUMMED: tl.constexpr,
    TILE_EXPERTS: tl.constexpr,
    TILE_CHOSEN: tl.constexpr,
    TILE_GROUPS: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    o_expert = tl.arange(0, TILE_EXPERTS)
    o_place = tl.arange(0, TILE_CHOSEN)
    # [TILE_EXPERTS]; experts are chosen by their ranks
    b_ranks = tl.load(p_scores + token * stride_scores + o_expert, mask=o_expert < NUM_EXPERTS, other=float("-inf"))
    if SIGMOID:
        b_masses = tl.sigmoid(b_ranks)
        total = 1.0
    else:
        b_masses = tl.exp(b_ranks - tl.max(b_ranks))
        total = tl.sum(b_masses)
    if p_bias is not None or NUM_GROUPS > 1:
        # What is added must be the weights themselves
        b_ranks = tl.where(o_expert < NUM_EXPERTS, b_masses / total, float("-inf"))
    if p_bias is not None:
        b_ranks += tl.load(p_bias + o_expert, mask=o_expert < NUM_EXPERTS, other=0.0)
    if NUM_GROUPS > 1:
        b_ranks = _within_groups(b_ranks, o_expert, NUM_EXPERTS, NUM_GROUPS, GROUPS_CHOSEN, GROUP_SUMMED, TILE_GROUPS)
    # [TILE_CHOSEN] each
    b_chosen = tl.zeros([TILE_CHOSEN], tl.int32)
    b_weights = tl.zeros([TILE_CHOSEN], tl.float32)
    for place in range(NUM_CHOSEN):
        expert = _first_largest(b_ranks, o_expert, NUM_EXPERTS)
        b_chosen = tl.where(o_place == place, expert, b_chosen)
        b_weights = tl.where(o_place == place, tl.sum(tl.where(o_expert == expert, b_masses, 0.0)), b_weights)
        b_ranks = tl.where(o_expert == expert, float("-inf"), b_ranks)
    if NORMALIZED:
        total = tl.sum(b_weights)
    o_output = token * NUM_CHOSEN + o_place
    tl.store(p_experts + o_output, b_chosen, mask=o_place < NUM_CHOSEN)
    tl.store(p_weights + o_output, b_weights / total * scale, mask=o_place < NUM_CHOSEN)


@triton.jit  # type: ignore[untyped-decorator]
def _first_largest(b_values, o_place, COUNT: tl.constexpr):  # type: ignore[no-untyped-def]
    """The lowest place of the largest value. NaN equals nothing: the place must still be below COUNT."""
    return tl.minimum(tl.min(tl.where(b_values == tl.max(b_values), o_place, COUNT)), COUNT - 1)


@triton.jit  # type: ignore[untyped-decorator]
def _within_groups(  # type: ignore[no-untyped-def]
    b_ranks,
    o_expert,
    NUM_EXPERTS: tl.constexpr,
    NUM_GROUPS: tl.constexpr,
    GROUPS_CHOSEN: tl.constexpr,
    GROUP_SUMMED: tl.constexpr,
    TILE_GROUPS: tl.constexpr,
):
    """The same ranks, but -inf outside of the chosen groups."""
    o_group = tl.arange(0, TILE_GROUPS)
    o_own_group = o_expert // (NUM_EXPERTS // NUM_GROUPS)
    b_sums = tl.full([TILE_GROUPS], float("-inf"), tl.float32)
    for group in range(NUM_GROUPS):
        b_own = tl.where(o_own_group == group, b_ranks, float("-inf"))
        group_sum = 0.0
        for _ in range(GROUP_SUMMED):
            group_sum += tl.max(b_own)
            b_own = tl.where(o_expert == _first_largest(b_own, o_expert, NUM_EXPERTS), float("-inf"), b_own)
        b_sums = tl.where(o_group == group, group_sum, b_sums)
    b_within = tl.full(b_ranks.shape, float("-inf"), tl.float32)
    for _ in range(GROUPS_CHOSEN):
        best = _first_largest(b_sums, o_group, NUM_GROUPS)
        b_within = tl.where(o_own_group == best, b_ranks, b_within)
        b_sums = tl.where(o_group == best, float("-inf"), b_sums)
    return b_within


def choose_experts(
    scores: Tensor,
    num_experts: int,
    num_chosen: int,
    *,
    normalized: bool,
    scale: float = 1.0,
    sigmoid: bool = False,
    bias: Tensor | None = None,
    groups: Groups | None = None,
) -> Choices:
    """Chooses each token's experts. Nothing here waits for the device.

    Args:
        scores: float32 [num_tokens, num_experts or more], last dimension contiguous; further columns are not read.
        num_experts: at most 1,024.
        num_chosen: experts of each token.
        normalized: whether the weights of the chosen experts are divided by their sum.
        scale: factor of the weights.
        sigmoid: whether weights are sigmoids of scores, and otherwise a softmax.
        bias: float32 [num_experts]; a rank, by which an expert is chosen, is its weight and its bias.
        groups: from which experts are chosen; None: from all.

    Raises:
        ValueError: an argument, named, has a wrong value, shape, dtype or stride.
    """
    _check(scores, num_experts, num_chosen, bias, groups)
    shape = len(scores), num_chosen
    experts = torch.empty(shape, dtype=torch.int32, device=scores.device)
    weights = torch.empty(shape, dtype=torch.float32, device=scores.device)
    chosen_groups = groups or Groups(1, 1, 1)
    if len(scores):
        _choose_experts_kernel[(len(scores),)](
            experts,
            weights,
            scores,
            bias,
            scale,
            scores.stride(0),
            NUM_EXPERTS=num_experts,
            NUM_CHOSEN=num_chosen,
            NORMALIZED=normalized,
            SIGMOID=sigmoid,
            NUM_GROUPS=chosen_groups.count,
            GROUPS_CHOSEN=chosen_groups.num_chosen,
            GROUP_SUMMED=chosen_groups.num_summed,
            TILE_EXPERTS=next_power_of_2(num_experts),
            TILE_CHOSEN=next_power_of_2(num_chosen),
            TILE_GROUPS=next_power_of_2(chosen_groups.count),
            num_warps=1,
        )
    return Choices(experts, weights)


def choose_experts_reference(
    scores: Tensor,
    num_experts: int,
    num_chosen: int,
    *,
    normalized: bool,
    scale: float = 1.0,
    sigmoid: bool = False,
    bias: Tensor | None = None,
    groups: Groups | None = None,
) -> Choices:
    """`choose_experts` in plain torch."""
    _check(scores, num_experts, num_chosen, bias, groups)
    scores = scores[:, :num_experts]
    masses = scores.sigmoid() if sigmoid else scores.softmax(-1)
    ranks = masses if bias is None else masses + bias
    if groups is not None:
        grouped = ranks.view(len(ranks), groups.count, -1)
        sums = grouped.sort(dim=-1, descending=True).values[..., : groups.num_summed].sum(-1)
        outside = sums.sort(dim=-1, descending=True, stable=True).indices[:, groups.num_chosen :]
        hidden = torch.zeros_like(sums, dtype=torch.bool).scatter_(1, outside, value=True)
        ranks = grouped.masked_fill(hidden[..., None], float("-inf")).flatten(1)
    experts = ranks.sort(dim=-1, descending=True, stable=True).indices[:, :num_chosen]
    weights = masses.gather(1, experts)
    if normalized:
        weights = weights / weights.sum(-1, keepdim=True)
    return Choices(experts.int(), weights * scale)


def _check(scores: Tensor, num_experts: int, num_chosen: int, bias: Tensor | None, groups: Groups | None) -> None:
    check_rows(scores, "scores", [torch.float32])
    most = min(_MAX_EXPERTS, scores.shape[1])
    require(1 <= num_experts <= most, "num_experts", f"be 1 to {most}")
    if bias is not None:
        check_vector(bias, "bias", num_experts, torch.float32, scores.device)
    if groups is not None:
        size, rest = divmod(num_experts, groups.count)
        require(rest == 0, "groups", f"divide {num_experts} experts")
        require(1 <= groups.num_chosen <= groups.count, "groups", f"be chosen among {groups.count}")
        require(1 <= groups.num_summed <= size, "groups", f"have at least {groups.num_summed} experts")
        most = size * groups.num_chosen
    else:
        most = num_experts
    require(1 <= num_chosen <= most, "num_chosen", f"be 1 to {most}")
