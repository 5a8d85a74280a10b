"""A model of the waves of programs that decode ragged contexts."""

import heapq
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from benchmarks.aot.cases import MODELS
from benchmarks.aot.table import TABLE
from benchmarks.aot.targets import TARGETS, Target, intercepted_launches
from benchmarks.decode_balance.contexts import Ints, lognormal, one_long
from benchmarks.record import read_result
from benchmarks.report import Sense, target
from quire_kernels.decode_plan import ITEM_TILES, DecodeSplits, decode_splits

MODEL, MODEL_CONTEXT = "Llama 3 8B", 131_072
LEAST_BUSY = 0.85
_KERNEL = (f"decode: {MODEL}, bf16", "_decode_kernel")
_NUM_WARPS = 4
_MERGE_TILES = 1
# Of even splits
_MIN_KEYS, _MAX_SPLITS = 256, 128

CONTEXTS: dict[str, Ints] = {
    "64 of 8,192": np.full(64, 8192, np.int32),
    "64, lognormal, median 2,048": lognormal(64, 2048),
    "256, lognormal, median 1,024": lognormal(256, 1024),
    "16, lognormal, median 8,192": lognormal(16, 8192),
    "63 of 1,024 and one of 32,768": one_long(63, 1024, 32_768),
    "255 of 512 and one of 32,768": one_long(255, 512, 32_768),
    "7 of 1,024 and one of 131,072": one_long(7, 1024, 131_072),
}


def makespan(programs: Sequence[int], slots: int) -> int:
    """When the last program ends. They start in order, each in the slot that is free first."""
    ends = [0] * slots
    for duration in programs:
        heapq.heapreplace(ends, ends[0] + duration)
    return max(ends)


def busy(programs: Sequence[int], slots: int, num_tiles: int, *, merges: bool) -> float:
    """The share of the slots' time that tiles take."""
    return num_tiles / (slots * (makespan(programs, slots) + _MERGE_TILES * merges))


def planned_programs(splits: DecodeSplits, contexts: Ints, num_kv_heads: int) -> list[int]:
    """The time of each program, in the order in which they start."""
    plan = splits.plan(contexts)
    costs = _num_tiles(plan.items[:, 2] - plan.items[:, 1], splits.tile_keys) + ITEM_TILES
    shares = [int(costs[begin:end].sum()) for begin, end in zip(plan.starts[:-1], plan.starts[1:], strict=True)]
    return shares * num_kv_heads


def even_programs(contexts: Ints, num_splits: int, tile_keys: int, num_kv_heads: int) -> list[int]:
    """The same where each context is divided into as many splits, all but the last one of whole tiles."""
    share = np.maximum(_num_tiles(-(-contexts // num_splits), tile_keys) * tile_keys, _MIN_KEYS)
    programs = []
    for split in range(num_splits):
        keys = (contexts - split * share).clip(0, share)
        durations = np.where(keys > 0, _num_tiles(keys, tile_keys) + ITEM_TILES, 0)
        programs += durations.tolist() * num_kv_heads
    return programs


def choose_num_splits(num_programs: int, max_context_len: int, slots: int) -> int:
    """The fewest splits that fill waves nearly as well as the best number does: `num_splits_heuristic` of
    FlashAttention 2 (csrc/flash_attn/flash_api.cpp), which accepts 85 % of the best.
    """
    counts = range(1, max(1, min(_MAX_SPLITS, -(-max_context_len // _MIN_KEYS))) + 1)
    filled = [num_programs * count / (-(-num_programs * count // slots) * slots) for count in counts]
    return next(count for count, share in zip(counts, filled, strict=True) if share >= 0.85 * max(filled))


def resident_programs(gpu: Target) -> int:
    """How many programs of the decode kernel fit a multiprocessor, by its compiled code."""
    table = read_result(TABLE)
    if table is None:
        raise ValueError(f"{TABLE} is not there: run `python -m benchmarks.aot --update`")
    (row,) = (one for one in table["kernels"] if (one["target"], one["case"], one["kernel"]) == (gpu.name, *_KERNEL))
    return gpu.resident_programs(row["num_registers"], row["shared_bytes"], _NUM_WARPS)


def splits_on(gpu: Target) -> DecodeSplits:
    """How a worker on this GPU divides decodes."""
    heads, dtype = MODELS[MODEL], torch.bfloat16
    with intercepted_launches(gpu, lambda *_, **__: None):
        return decode_splits(
            heads.num_heads, heads.num_kv_heads, heads.head_dim, dtype, dtype, torch.device("meta"), heads.window
        )


def measure(gpu: Target, contexts: Ints) -> dict[str, float]:
    """`busy` by even splits and by the plan."""
    splits, num_kv_heads = splits_on(gpu), MODELS[MODEL].num_kv_heads
    slots = gpu.multiprocessors * resident_programs(gpu)
    num_tiles = num_kv_heads * int(_num_tiles(contexts, splits.tile_keys).sum())
    num_splits = choose_num_splits(len(contexts) * num_kv_heads, MODEL_CONTEXT, slots)
    even = even_programs(contexts, num_splits, splits.tile_keys, num_kv_heads)
    planned = planned_programs(splits, contexts, num_kv_heads)
    return {
        "even_splits": busy(even, slots, num_tiles, merges=num_splits > 1),
        "planned": busy(planned, slots, num_tiles, merges=True),
    }


def measure_all() -> dict[str, Any]:
    """The figures of each target and kind of contexts, and the least of all with its bound."""
    rows: list[dict[str, Any]] = [
        {"target": name, "contexts": contexts, **measure(gpu, CONTEXTS[contexts])}
        for contexts in CONTEXTS
        for name, gpu in TARGETS.items()
    ]
    least = min(row["planned"] for row in rows)
    return {
        "model": f"{MODEL} in bf16",
        "rows": rows,
        "targets": [target("least busy share by the plan", least, Sense.AT_LEAST, LEAST_BUSY)],
    }


def _num_tiles(keys: Ints, tile_keys: int) -> Ints:
    tiles: Ints = -(-keys // tile_keys)
    return tiles
