"""The plans of attention by Quire's own kernels, made on the host: which program of a step reads or computes what.

Sequences of one token are decodes, which have a plan for each window that layers have; others have tiles of queries.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from quire_kernels.decode_plan import DecodePlan, DecodeSplits
from quire_kernels.prefill_tiles import PrefillTiles, most_tiles, plan_tiles
from worker_svc.batch import Batch
from worker_svc.gpu.device_attention import Arrays
from worker_svc.gpu.inputs import ForwardInputs
from worker_svc.gpu.staging import ALIGNMENT

_ARRAYS_PER_DECODE_PLAN = 3
_TILE_BYTES = 2 * 4


@dataclass(frozen=True, slots=True)
class PlannedStep:
    """A step on the device. Decodes are its first sequences."""

    num_decodes: int
    decode_plans: dict[int | None, DecodePlan]
    """By window; none if there is no decode."""
    decodes: tuple[Tensor, Tensor]
    """Block tables and context lengths of the decodes."""
    longer: tuple[Tensor, Tensor, Tensor]
    """Block tables, query starts and context lengths of the other sequences."""
    tiles: PrefillTiles | None
    """Of the other sequences; None if there are none."""


class AttentionPlanner:
    """Plans steps of at most `max_step_tokens` tokens."""

    def __init__(self, splits: Sequence[DecodeSplits], queries_per_tile: int, max_step_tokens: int) -> None:
        """`splits`: how contexts of decodes are divided among programs, for each window that layers have. Without any,
        all sequences have tiles.
        """
        self._splits, self._queries, self._max_tokens = splits, queries_per_tile, max_step_tokens

    def num_bytes(self, num_seqs: int) -> int:
        """The most bytes of the plan of so many sequences."""
        num_tiles = most_tiles(max(self._max_tokens, num_seqs), num_seqs, self._queries)
        decodes = sum(splits.num_bytes(num_seqs) + _ARRAYS_PER_DECODE_PLAN * ALIGNMENT for splits in self._splits)
        return decodes + _TILE_BYTES * num_tiles + ALIGNMENT

    def plan(self, batch: Batch, num_single: int) -> Arrays:
        """The arrays of the plan, as `DeviceAttention.plan` says."""
        num_decodes = num_single if self._splits else 0
        decodes = self._splits if num_decodes else ()
        arrays = [array for splits in decodes for array in splits.plan(batch.context_lens[:num_decodes])]
        if num_decodes < len(batch.context_lens):
            longer = batch.query_starts[num_decodes:], batch.context_lens[num_decodes:]
            arrays.append(plan_tiles(*longer, len(batch.token_ids), self._queries))
        return arrays

    def on_device(self, inputs: ForwardInputs) -> PlannedStep:
        """The plan whose arrays are `inputs.plan`."""
        num_decodes = inputs.num_single if self._splits else 0
        plans, arrays = {}, list(inputs.plan)
        for splits in self._splits if num_decodes else ():
            plans[splits.window] = DecodePlan(splits, *arrays[:_ARRAYS_PER_DECODE_PLAN])
            del arrays[:_ARRAYS_PER_DECODE_PLAN]
        tables, contexts = inputs.block_tables, inputs.context_lens
        return PlannedStep(
            num_decodes,
            plans,
            (tables[:num_decodes], contexts[:num_decodes]),
            (tables[num_decodes:], inputs.query_starts[num_decodes:], contexts[num_decodes:]),
            PrefillTiles(self._queries, *arrays) if num_decodes < len(contexts) else None,
        )
