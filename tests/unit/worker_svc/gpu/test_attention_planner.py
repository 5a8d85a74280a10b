"""A step's plan is on the device what it was on the host, whatever the step holds."""

import numpy as np
import pytest
import torch

from quire_kernels.decode_plan import DecodeSplits
from worker_svc.batch import Batch, SequenceChunk, make_batch
from worker_svc.gpu.attention_planner import AttentionPlanner
from worker_svc.gpu.inputs import count_single, forward_inputs, layout_arrays, token_arrays

SPLITS = (DecodeSplits(4, 16), DecodeSplits(4, 16, window=20))
STEPS = {"decodes": [(70, 1), (9, 1)], "both": [(70, 1), (9, 1), (0, 33), (5, 2)], "prompts": [(0, 40), (3, 17)]}
MAX_TOKENS = 64


def _batch(parts: list[tuple[int, int]]) -> Batch:
    blocks = np.arange(8, dtype=np.int32)
    return make_batch([SequenceChunk(np.zeros(n, np.int32), start, blocks, 0, True) for start, n in parts], 16)


@pytest.mark.parametrize("splits", [SPLITS, ()], ids=["planned decodes", "tiles alone"])
@pytest.mark.parametrize("name", STEPS)
def test_decodes_have_plans_and_all_others_tiles(name: str, splits: tuple[DecodeSplits, ...]) -> None:
    planner, batch = AttentionPlanner(splits, 8, MAX_TOKENS), _batch(STEPS[name])
    arrays = planner.plan(batch, count_single(batch))
    num_seqs = len(batch.context_lens)
    assert sum(array.nbytes for array in arrays) <= planner.num_bytes(num_seqs)

    groups = (token_arrays(batch), layout_arrays(batch), arrays)
    step = planner.on_device(forward_inputs(batch, *([torch.from_numpy(one) for one in group] for group in groups)))

    num_decodes = count_single(batch) if splits else 0
    assert step.num_decodes == num_decodes
    assert list(step.decode_plans) == ([one.window for one in splits] if num_decodes else [])
    assert [len(one) for one in step.decodes] == [num_decodes] * 2
    assert [len(one) for one in step.longer] == [
        num_seqs - num_decodes,
        num_seqs - num_decodes + 1,
        num_seqs - num_decodes,
    ]
    for number, plan in enumerate(step.decode_plans.values()):
        for ours, theirs in zip((plan.starts, plan.items, plan.merges), arrays[3 * number :], strict=False):
            assert np.array_equal(ours.numpy(), theirs)
    assert (step.tiles is None) == (num_decodes == num_seqs)
    if step.tiles is not None:
        assert np.array_equal(step.tiles.places.numpy(), arrays[-1])
