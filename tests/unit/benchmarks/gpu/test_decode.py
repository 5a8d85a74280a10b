"""Decoding through the runner, with a model small enough for a CPU."""

import pytest
import torch

from benchmarks.gpu import decode
from benchmarks.gpu.random_model import TINY, RandomModel
from worker_svc.attention import AttentionKind


@pytest.fixture(scope="module", params=AttentionKind)
def model(request: pytest.FixtureRequest) -> RandomModel:
    """Runs torch's operators, and the GPU kernels in the interpreter."""
    return RandomModel(TINY, torch.float32, torch.device("cpu"), request.param)


def test_the_embedding_is_not_counted_among_the_weights_of_a_step(model: RandomModel) -> None:
    attention, mlp, norms = (64 + 2 * 32 + 64) * 64, 3 * 64 * 96, 2 * 64
    assert model.weight_bytes == 4 * (2 * (attention + mlp + norms) + 64 + 96 * 64)


@pytest.mark.parametrize("num_seqs", [1, 2])
def test_a_step_is_held_against_the_bytes_it_reads(model: RandomModel, num_seqs: int) -> None:
    case = decode.measure(model, num_seqs, 1.0, decode.DRY)
    kv_bytes = num_seqs * (17 + 1 + 1) * 2 * 2 * 2 * 16 * 4
    assert case["floor_ms"] == pytest.approx((model.weight_bytes + kv_bytes) / 1e6)
    assert case["of_floor"] == pytest.approx(case["ms"] / case["floor_ms"])


def test_the_host_is_timed_in_steps_of_decodes_beside_a_prompt(model: RandomModel) -> None:
    (row,) = decode.measure_mixed(model, decode.DRY)
    assert (row["num_decodes"], row["chunk"], row["num_tokens"]) == (2, 3, 5)
    assert 0 < row["host_ms"] <= row["ms"]


def test_bounds_are_not_to_be_passed() -> None:
    case = {"num_seqs": 1, "of_floor": 1.2, "idle_share": 0.05}
    assert [target["holds"] for target in decode.judge([case])] == [True, False]
