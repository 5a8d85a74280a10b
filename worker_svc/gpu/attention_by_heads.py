"""Attention of layers whose heads differ: one `DeviceAttention` for all layers of the same heads."""

from collections.abc import Mapping, Sequence
from dataclasses import replace

from torch import Tensor

from worker_svc.batch import Batch
from worker_svc.gpu.device_attention import Arrays, DeviceAttention, PlannedAttention
from worker_svc.gpu.inputs import ForwardInputs


class AttentionByHeads:
    """A `DeviceAttention` of several, whose plans lie side by side."""

    def __init__(self, parts: Mapping[tuple[int, ...], DeviceAttention]) -> None:
        """`parts`: each by the layers that it computes, which are layers 0, 1, ... to it."""
        self._parts = list(parts.values())
        places = [(part, place, layer) for part, layers in enumerate(parts) for place, layer in enumerate(layers)]
        self._of_layers = {layer: (part, place) for part, place, layer in places}
        # Of the step that was planned last, by part
        self._num_arrays: Sequence[int] = ()

    @property
    def mixed_graph_problem(self) -> str | None:
        problems = (part.mixed_graph_problem for part in self._parts)
        return next((problem for problem in problems if problem is not None), None)

    def num_plan_bytes(self, num_seqs: int) -> int:
        return sum(part.num_plan_bytes(num_seqs) for part in self._parts)

    def plan(self, batch: Batch, num_single: int) -> Arrays:
        plans = [part.plan(batch, num_single) for part in self._parts]
        self._num_arrays = [len(plan) for plan in plans]
        return [array for plan in plans for array in plan]

    def attend(self, inputs: ForwardInputs) -> PlannedAttention:
        """The step is the one that was planned last, or a graph of its shape."""
        planned, begin = [], 0
        for part, num_arrays in zip(self._parts, self._num_arrays, strict=True):
            arrays = inputs.plan[begin : begin + num_arrays]
            planned.append(part.attend(replace(inputs, plan=arrays)))
            begin += num_arrays

        def attend(layer: int, query: Tensor, sinks: Tensor | None = None) -> Tensor:
            part, place = self._of_layers[layer]
            return planned[part](place, query) if sinks is None else planned[part](place, query, sinks)

        return attend
