"""Rotates a step's queries by their positions in a layer that reads the keys and values of another one.

It is `rotary_store` without anything to store.
"""

from typing import Any

import torch
from torch import Tensor

from quire_kernels._checks import require
from quire_kernels._rotate import HeadNorm, check_head_weight, check_rotation, launch_rotary, turned_by_torch
from quire_kernels._shapes import check_rows
from quire_kernels.row_norm import RowNorm


def rotate_queries(
    query: Tensor,
    positions: Tensor,
    frequencies: Tensor | None,
    head_dim: int,
    *,
    attention_factor: float = 1.0,
    norm: RowNorm | None = None,
    norm_after_rotation: bool = False,
) -> Tensor:
    """Normalizes and rotates queries, as `rotary_store` does.

    Args:
        query: [num_tokens, num_heads * head_dim], last dimension contiguous.
        positions, frequencies, attention_factor: those of `rotary_store`.
        norm: of each head, by its root mean square and without a bias; its weight is [head_dim] and contiguous. None:
            there is none.

    Returns:
        The queries [num_tokens, num_heads, head_dim], contiguous, of the dtype of `query`.

    Raises:
        ValueError: an argument, named, has a wrong shape, dtype, stride or device.
    """
    num_heads = _check(query, positions, frequencies, head_dim, norm)
    rotated = torch.empty((len(query), num_heads, head_dim), dtype=query.dtype, device=query.device)
    both, kv = _of_both(norm, after_rotation=norm_after_rotation), (None, None, None, None)
    how: dict[str, Any] = {"NUM_KV_HEADS": 0, "BLOCK_SIZE": 1, "VALUES_ARE_KEYS": False, "MAX_CODE": None}
    launch_rotary(rotated, query, positions, frequencies, kv, (0,) * 5, None, attention_factor, both, None, how)
    return rotated


def _of_both(norm: RowNorm | None, *, after_rotation: bool) -> HeadNorm | None:
    """That of queries, where there is no key."""
    return norm and HeadNorm(norm.weight, norm.weight, norm.epsilon, norm.epsilon, after_rotation)


def rotate_queries_reference(
    query: Tensor,
    positions: Tensor,
    frequencies: Tensor | None,
    head_dim: int,
    *,
    attention_factor: float = 1.0,
    norm: RowNorm | None = None,
    norm_after_rotation: bool = False,
) -> Tensor:
    """`rotate_queries` in plain torch, with sines and cosines in float64."""
    num_heads = _check(query, positions, frequencies, head_dim, norm)
    heads = query.float().view(len(query), num_heads, head_dim)
    turned = turned_by_torch(
        heads, positions, frequencies, attention_factor, norm, norm_after_rotation=norm_after_rotation
    )
    return turned.to(query.dtype)


def _check(query: Tensor, positions: Tensor, frequencies: Tensor | None, head_dim: int, norm: RowNorm | None) -> int:
    """The number of query heads, if all is well."""
    check_rows(query, "query")
    num_heads, rest = divmod(query.shape[1], head_dim)
    require(num_heads >= 1 and rest == 0, "query", "hold heads of head_dim")
    check_rotation(query, positions, frequencies, head_dim)
    if norm is not None:
        require(norm.bias is None and not norm.is_centered, "norm", "be by the root mean square, without a bias")
        check_head_weight(norm.weight, "norm.weight", head_dim, query.device)
    return num_heads
