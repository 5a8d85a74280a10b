"""Rows by expert, in tiles of one expert each: experts without a row, with one, with all, with more than a chunk."""

import pytest
import torch
from torch import Tensor

from quire_kernels.group_by_expert import ExpertGroups, group_by_expert, group_by_expert_reference, most_tiles


def _rows_of_experts(groups: ExpertGroups) -> dict[int, list[int]]:
    """The rows of each expert, in their places; every tile but an expert's last one is full."""
    rows: dict[int, list[int]] = {}
    places = groups.order.view(-1, groups.tile_rows).tolist()
    for expert, tile in zip(groups.tile_experts.tolist(), places, strict=True):
        if expert < 0:
            continue
        held = [row for row in tile if row >= 0]
        assert held == tile[: len(held)], "what is not used is at the end"
        assert len(rows.get(expert, [])) % groups.tile_rows == 0
        rows.setdefault(expert, []).extend(held)
    return rows


def _check(experts: Tensor, num_experts: int, tile_rows: int) -> None:
    groups = group_by_expert(experts, num_experts, tile_rows)
    expected = group_by_expert_reference(experts, num_experts, tile_rows)
    assert torch.equal(groups.tile_experts, expected.tile_experts)
    flat = experts.flatten().tolist()
    by_hand = {e: [row for row, chosen in enumerate(flat) if chosen == e] for e in sorted(set(flat))}
    assert _rows_of_experts(groups) == by_hand == _rows_of_experts(expected)


@pytest.mark.parametrize("tile_rows", [16, 64])
@pytest.mark.parametrize(("num_tokens", "num_chosen", "num_experts"), [(1, 2, 4), (17, 4, 40), (1100, 1, 3)])
def test_groups(num_tokens: int, num_chosen: int, num_experts: int, tile_rows: int, device: str) -> None:
    torch.manual_seed(0)
    experts = torch.rand(num_tokens, num_experts).argsort(-1)[:, :num_chosen].int().contiguous()
    _check(experts.to(device), num_experts, tile_rows)


@pytest.mark.parametrize("expert", [0, 2, 4])
@pytest.mark.parametrize("num_tokens", [1, 15, 16, 17, 63])
def test_one_expert_may_have_all_rows(num_tokens: int, expert: int, device: str) -> None:
    _check(torch.full((num_tokens, 1), expert, dtype=torch.int32, device=device), 5, 16)


def test_there_are_enough_tiles_for_the_worst_case() -> None:
    assert most_tiles(1, 8, 16) == 1
    # Seven experts with one row, and one with the rest
    assert most_tiles(7 + 17, 8, 16) == 7 + 2
    assert most_tiles(0, 8, 16) == 0


def test_no_tokens(device: str) -> None:
    groups = group_by_expert(torch.empty(0, 2, dtype=torch.int32, device=device), 4, 16)
    assert groups.order.shape == groups.tile_experts.shape == (0,)


@pytest.mark.parametrize(
    ("argument", "change"),
    [
        ("experts", {"experts": torch.zeros(4, 2, dtype=torch.int64)}),
        ("experts", {"experts": torch.zeros(4, 4, dtype=torch.int32)[:, :2]}),
        ("num_experts", {"num_experts": 0}),
        ("tile_rows", {"tile_rows": 24}),
    ],
)
def test_a_wrong_argument_is_named(argument: str, change: dict[str, object]) -> None:
    arguments: dict[str, object] = {
        "experts": torch.zeros(4, 2, dtype=torch.int32), "num_experts": 4, "tile_rows": 16,
    } | change  # fmt: skip
    with pytest.raises(ValueError, match=f"^{argument}: "):
        group_by_expert(**arguments)  # type: ignore[arg-type]
