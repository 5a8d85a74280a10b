"""The plans of decodes by Quire's own kernels: made on the host, one for each window that layers have."""

from collections.abc import Sequence
from typing import Any

from numpy.typing import NDArray

from quire_kernels.decode_plan import DecodePlan, DecodeSplits
from worker_svc.batch import Batch
from worker_svc.gpu.inputs import ForwardInputs
from worker_svc.gpu.staging import ALIGNMENT

_ARRAYS_PER_PLAN = 3


class DecodePlanner:
    """Plans the sequences of one token that a batch begins with; without splits nothing is planned."""

    def __init__(self, splits: Sequence[DecodeSplits]) -> None:
        """`splits`: how contexts are divided among programs, for each window that layers have."""
        self._splits = splits

    @property
    def num_arrays(self) -> int:
        """Of the plans, if there are any."""
        return _ARRAYS_PER_PLAN * len(self._splits)

    def num_bytes(self, num_seqs: int) -> int:
        """The most bytes of the plans of so many sequences."""
        return sum(splits.num_bytes(num_seqs) + _ARRAYS_PER_PLAN * ALIGNMENT for splits in self._splits)

    def plan(self, batch: Batch, num_single: int) -> list[NDArray[Any]]:
        """The arrays of the plans, as `DeviceAttention.plan` says; none if nothing is planned."""
        if not num_single:
            return []
        contexts = batch.context_lens[:num_single]
        return [array for splits in self._splits for array in splits.plan(contexts)]

    def on_device(self, inputs: ForwardInputs) -> dict[int | None, DecodePlan]:
        """The plans by window, whose arrays are the first of `inputs.plan`; none if nothing was planned."""
        arrays = inputs.plan[: self.num_arrays]
        if len(arrays) < self.num_arrays:
            return {}
        plans = zip(self._splits, arrays[0::3], arrays[1::3], arrays[2::3], strict=True)
        return {splits.window: DecodePlan(splits, *tensors) for splits, *tensors in plans}
