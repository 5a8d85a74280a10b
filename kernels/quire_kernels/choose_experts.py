"""The experts of each token and their weights, from a router's scores.

The weights are a softmax over all experts, of which the largest are kept (arXiv:2101.03961); divided by their sum they
are a softmax over the chosen experts alone (arXiv:2401.04088).
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from quire_kernels._checks import require
from quire_kernels._shapes import check_rows

_MAX_EXPERTS = 1024


class Choices(NamedTuple):
    """The experts of each token, the one with the largest score first; of equal scores the lower number first."""

    experts: Tensor
    """int32 [num_tokens, num_chosen]"""
    weights: Tensor
    """float32 [num_tokens, num_chosen]"""


@triton.jit  # type: ignore[untyped-decorator]
def _choose_experts_kernel(  # type: ignore[no-untyped-def]
    p_experts,
    p_weights,
    p_scores,
    scale,
    stride_scores,
    NUM_EXPERTS: tl.constexpr,
    NUM_CHOSEN: tl.constexpr,
    NORMALIZED: tl.constexpr,
    TILE_EXPERTS: tl.constexpr,
    TILE_CHOSEN: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    o_expert = tl.arange(0, TILE_EXPERTS)
    o_place = tl.arange(0, TILE_CHOSEN)
    # [TILE_EXPERTS]
    b_scores = tl.load(p_scores + token * stride_scores + o_expert, mask=o_expert < NUM_EXPERTS, other=float("-inf"))
    peak = tl.max(b_scores)
    b_masses = tl.exp(b_scores - peak)
    # [TILE_CHOSEN] each
    b_chosen = tl.zeros([TILE_CHOSEN], tl.int32)
    b_weights = tl.zeros([TILE_CHOSEN], tl.float32)
    for place in range(NUM_CHOSEN):
        top = tl.max(b_scores)
        # NaN equals nothing: the number must still be an expert's
        expert = tl.minimum(tl.min(tl.where(b_scores == top, o_expert, TILE_EXPERTS)), NUM_EXPERTS - 1)
        b_chosen = tl.where(o_place == place, expert, b_chosen)
        b_weights = tl.where(o_place == place, tl.sum(tl.where(o_expert == expert, b_masses, 0.0)), b_weights)
        b_scores = tl.where(o_expert == expert, float("-inf"), b_scores)
    total = tl.sum(b_weights) if NORMALIZED else tl.sum(b_masses)
    o_output = token * NUM_CHOSEN + o_place
    tl.store(p_experts + o_output, b_chosen, mask=o_place < NUM_CHOSEN)
    tl.store(p_weights + o_output, b_weights / total * scale, mask=o_place < NUM_CHOSEN)


def choose_experts(
    scores: Tensor, num_experts: int, num_chosen: int, *, normalized: bool, scale: float = 1.0
) -> Choices:
    """Chooses each token's experts. Nothing here waits for the device.

    Args:
        scores: float32 [num_tokens, num_experts or more], last dimension contiguous; further columns are not read.
        num_experts: at most 1,024.
        num_chosen: experts of each token.
        normalized: whether the weights of the chosen experts are divided by their sum.
        scale: factor of the weights.

    Raises:
        ValueError: an argument, named, has a wrong value, shape, dtype or stride.
    """
    _check(scores, num_experts, num_chosen)
    shape = len(scores), num_chosen
    experts = torch.empty(shape, dtype=torch.int32, device=scores.device)
    weights = torch.empty(shape, dtype=torch.float32, device=scores.device)
    if len(scores):
        _choose_experts_kernel[(len(scores),)](
            experts,
            weights,
            scores,
            scale,
            scores.stride(0),
            NUM_EXPERTS=num_experts,
            NUM_CHOSEN=num_chosen,
            NORMALIZED=normalized,
            TILE_EXPERTS=triton.next_power_of_2(num_experts),
            TILE_CHOSEN=triton.next_power_of_2(num_chosen),
            num_warps=1,
        )
    return Choices(experts, weights)


def choose_experts_reference(
    scores: Tensor, num_experts: int, num_chosen: int, *, normalized: bool, scale: float = 1.0
) -> Choices:
    """`choose_experts` in plain torch."""
    _check(scores, num_experts, num_chosen)
    masses = scores[:, :num_experts].softmax(-1)
    weights, experts = masses.sort(dim=-1, descending=True, stable=True)
    weights, experts = weights[:, :num_chosen], experts[:, :num_chosen]
    if normalized:
        weights = weights / weights.sum(-1, keepdim=True)
    return Choices(experts.int(), weights * scale)


def _check(scores: Tensor, num_experts: int, num_chosen: int) -> None:
    check_rows(scores, "scores", [torch.float32])
    most = min(_MAX_EXPERTS, scores.shape[1])
    require(1 <= num_experts <= most, "num_experts", f"be 1 to {most}")
    require(1 <= num_chosen <= num_experts, "num_chosen", f"be 1 to {num_experts}")
