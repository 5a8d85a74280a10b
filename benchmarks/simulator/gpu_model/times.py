"""How long a GPU takes for a kernel: the larger of its bytes and its operations, each at the GPU's rate.

Attention depends on contexts, and on the compiled kernel: its instructions, and how many of its programs run at the
same time (`benchmarks/results/aot.json`).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from benchmarks.aot.table import TABLE
from benchmarks.aot.targets import TARGETS, intercepted_launches
from benchmarks.decode_balance.waves import busy, planned_programs
from benchmarks.record import read_result
from benchmarks.simulator.gpu_model.hardware import Hardware
from benchmarks.simulator.gpu_model.launches import StepTrace
from quire_kernels._attend import launch_options, prefill_tile_keys, tile_dims, tile_queries
from quire_kernels.decode_plan import decode_splits

META = torch.device("meta")
DTYPE = torch.bfloat16


@dataclass(frozen=True)
class AttentionShape:
    """The heads of a model, in the table of compiled kernels under `case`."""

    case: str
    num_heads: int
    num_kv_heads: int
    head_dim: int


LLAMA_8B_HEADS = AttentionShape("Llama 3 8B, bf16", 32, 8, 128)


class AttentionTimes:
    """The times of one layer's attention on a GPU."""

    def __init__(self, shape: AttentionShape, hardware: Hardware) -> None:
        self._shape, self._hardware, self._target = shape, hardware, TARGETS[hardware.target]
        kernels = {
            (row["case"], row["kernel"]): row
            for row in (read_result(TABLE) or {"kernels": []})["kernels"]
            if row["target"] == hardware.target
        }
        self._decode_row = kernels[f"decode: {shape.case}", "_decode_kernel"]
        self._prefill_row = kernels[f"prefill: {shape.case}", "_paged_attention_kernel"]
        heads = shape.num_heads, shape.num_kv_heads, shape.head_dim
        how = shape.head_dim, DTYPE, DTYPE, META
        # Tiles as the wrappers choose them there
        with intercepted_launches(self._target, lambda *args, **options: None):
            self._splits = decode_splits(*heads, DTYPE, DTYPE, META)
            self._tile_m = tile_queries(*how)
            self._tile_n = prefill_tile_keys(self._tile_m, *how)
            options = launch_options(self._tile_m, self._tile_n, tile_dims(shape.head_dim), DTYPE, DTYPE, META)
        self._prefill_warps = options["num_warps"]

    def kv_bytes(self, contexts: Sequence[int]) -> int:
        return 2 * sum(contexts) * self._shape.num_kv_heads * self._shape.head_dim * DTYPE.itemsize

    def decode(self, contexts: Sequence[int]) -> float:
        """Seconds of a decode. Reading keys and values is the bound, for the share of the time that programs are busy;
        or issuing the instructions of all tiles.
        """
        hardware, row = self._hardware, self._decode_row
        lengths = np.array(contexts, np.int32)
        resident = self._target.resident_programs(row["num_registers"], row["shared_bytes"], 4)
        num_tiles = int((-(-lengths // self._splits.tile_keys)).sum()) * self._shape.num_kv_heads
        programs = planned_programs(self._splits, lengths, self._shape.num_kv_heads)
        share = busy(programs, self._target.multiprocessors * resident, num_tiles, merges=True)
        reading = self.kv_bytes(contexts) / hardware.bytes_per_second
        return max(reading, num_tiles * self._tile_issue_seconds(row, 4)) / share

    def prefill(self, lengths: Sequence[tuple[int, int]]) -> float:
        """Seconds for sequences of so many tokens at the end of contexts of so many. Where one program fits a
        multiprocessor, products and other instructions of a tile follow each other.
        """
        hardware, row = self._hardware, self._prefill_row
        resident = self._target.resident_programs(row["num_registers"], row["shared_bytes"], self._prefill_warps)
        group = self._shape.num_heads // self._shape.num_kv_heads
        queries = self._tile_m // group
        num_tiles = 0
        for num_tokens, context in lengths:
            lasts = np.minimum(np.arange(0, num_tokens, queries) + queries, num_tokens) + context - num_tokens
            num_tiles += int((-(-lasts // self._tile_n)).sum())
        num_tiles *= self._shape.num_kv_heads
        multiplied = 4 * self._tile_m * self._tile_n * self._shape.head_dim / hardware.peak_operations_per_second
        issued = self._tile_issue_seconds(row, self._prefill_warps)
        return num_tiles * (max(multiplied, issued) if resident > 1 else multiplied + issued)

    def prefill_operations(self, lengths: Sequence[tuple[int, int]]) -> int:
        """Of both products, over pairs of a query and a key that it sees."""
        pairs = sum(num * (context - num) + num * (num + 1) // 2 for num, context in lengths)
        return 4 * pairs * self._shape.num_heads * self._shape.head_dim

    def _tile_issue_seconds(self, row: dict[str, Any], num_warps: int) -> float:
        """That all multiprocessors take together to issue the instructions of a tile, with those of the mask, which
        most tiles skip.
        """
        instructions = row["num_loop_instructions"] * num_warps
        per_second = self._hardware.issues_per_cycle * self._hardware.cycles_per_second * self._target.multiprocessors
        return float(instructions / per_second)


@dataclass(frozen=True)
class StepTime:
    """Seconds of a step: of its kernels, of the pauses between them, and of the host."""

    kernels: float
    pauses: float
    host: float
    num_launches: int

    @property
    def seconds(self) -> float:
        """The device waits for the host where that takes longer."""
        return max(self.kernels + self.pauses, self.host)


def step_time(
    trace: StepTrace,
    lengths: Sequence[tuple[int, int]],
    attention: AttentionTimes,
    hardware: Hardware,
    *,
    in_graphs: bool,
) -> StepTime:
    """The time of a step of such sequences, whose kernels were recorded."""
    contexts = [context for num_tokens, context in lengths if num_tokens == 1]
    longer = [one for one in lengths if one[0] > 1]
    by_name = {
        "_decode_kernel": attention.decode(contexts) if contexts else 0.0,
        "_paged_attention_kernel": attention.prefill(longer) if longer else 0.0,
    }
    kernels = 0.0
    for launch in trace.launches:
        if launch.is_attention:
            kernels += by_name[launch.name]
        else:
            moved = launch.num_bytes / hardware.bytes_per_second
            kernels += max(moved, launch.operations / hardware.operations_per_second)
    count = len(trace.launches)
    enqueued = 2 * hardware.replay_seconds if in_graphs else trace.launch_seconds + count * hardware.host_launch_seconds
    return StepTime(kernels, count * hardware.graph_launch_seconds, trace.layout_seconds + enqueued, count)
