"""Layers of different heads: each is computed by the attention of its heads, with the plan of that attention."""

from collections.abc import Sequence

import numpy as np
import pytest
import torch
from torch import Tensor

from worker_svc.batch import Batch
from worker_svc.gpu.attention_by_heads import AttentionByHeads
from worker_svc.gpu.device_attention import Arrays, DeviceAttention, PlannedAttention
from worker_svc.gpu.inputs import ForwardInputs, empty_batch, forward_inputs, layout_arrays, token_arrays


class _Numbered:
    """A `DeviceAttention` whose outputs say which one it is, by which layer, and with which plan."""

    def __init__(self, number: int, num_arrays: int, problem: str | None = None) -> None:
        self._number, self._num_arrays, self.mixed_graph_problem = number, num_arrays, problem

    def num_plan_bytes(self, num_seqs: int) -> int:
        return 100 * self._number + num_seqs

    def plan(self, batch: Batch, num_single: int) -> Arrays:
        return [np.full(1, self._number) for _ in range(self._num_arrays + num_single)]

    def attend(self, inputs: ForwardInputs) -> PlannedAttention:
        planned = [int(array) for array in inputs.plan]

        def attend(layer: int, query: Tensor, sinks: Tensor | None = None) -> Tensor:
            assert (sinks is not None) == (layer == 1)
            return torch.tensor([self._number, layer, *planned])

        return attend


def _inputs(plan: Sequence[np.ndarray]) -> ForwardInputs:
    batch = empty_batch()
    groups = (token_arrays(batch), layout_arrays(batch), plan)
    return forward_inputs(batch, *([torch.from_numpy(array) for array in group] for group in groups))


@pytest.mark.parametrize("num_single", [0, 2])
def test_layers_are_computed_by_the_attention_of_their_heads(num_single: int) -> None:
    parts: dict[tuple[int, ...], DeviceAttention] = {
        (0, 2, 3): _Numbered(7, 2),
        (1,): _Numbered(8, 0),
        (4,): _Numbered(9, 1),
    }
    attention = AttentionByHeads(parts)
    assert attention.num_plan_bytes(5) == 2400 + 15
    attend = attention.attend(_inputs(attention.plan(empty_batch(), num_single)))
    query, sinks = torch.empty(0), torch.empty(0)
    outputs = [attend(layer, query, sinks) if layer == 2 else attend(layer, query) for layer in range(5)]
    sevens, eights, nines = [7] * (2 + num_single), [8] * num_single, [9] * (1 + num_single)
    expected = [[7, 0, *sevens], [8, 0, *eights], [7, 1, *sevens], [7, 2, *sevens], [9, 0, *nines]]
    assert [output.tolist() for output in outputs] == expected


def test_mixed_steps_run_as_graphs_where_all_of_them_can() -> None:
    def problem(*problems: str | None) -> str | None:
        return AttentionByHeads({(i,): _Numbered(i, 1, one) for i, one in enumerate(problems)}).mixed_graph_problem

    assert problem(None, None) is None
    assert problem(None, "plans on the device") == "plans on the device"
