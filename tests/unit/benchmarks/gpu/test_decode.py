"""Decoding through the runner, with a model small enough for a CPU."""

from typing import Any

import pytest
import torch

from benchmarks.gpu import decode
from benchmarks.gpu.random_model import LLAMA_8B, RandomModel
from worker_svc.attention import AttentionKind

SMALL: dict[str, Any] = LLAMA_8B | {
    "vocab_size": 96,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}


@pytest.fixture(scope="module", params=AttentionKind)
def model(request: pytest.FixtureRequest) -> RandomModel:
    """Runs torch's operators, and the GPU kernels in the interpreter."""
    return RandomModel(SMALL, torch.float32, torch.device("cpu"), request.param)


def test_the_embedding_is_not_counted_among_the_weights_of_a_step(model: RandomModel) -> None:
    attention, mlp, norms = (64 + 2 * 32 + 64) * 64, 3 * 64 * 96, 2 * 64
    assert model.weight_bytes == 4 * (2 * (attention + mlp + norms) + 64 + 96 * 64)


@pytest.mark.parametrize("num_seqs", [1, 2])
def test_a_step_is_held_against_the_bytes_it_reads(
    model: RandomModel, num_seqs: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in {"CONTEXT": 17, "WARM_UP_STEPS": 1, "TIMED_STEPS": 2, "PROFILED_STEPS": 0}.items():
        monkeypatch.setattr(decode, name, value)
    case = decode.measure(model, num_seqs, copy_rate=1.0)
    kv_bytes = num_seqs * (17 + 1 + 1) * 2 * 2 * 2 * 16 * 4
    assert case["floor_ms"] == pytest.approx((model.weight_bytes + kv_bytes) / 1e6)
    assert case["of_floor"] == pytest.approx(case["ms"] / case["floor_ms"])


def test_bounds_are_not_to_be_passed() -> None:
    case = {"num_seqs": 1, "of_floor": 1.2, "idle_share": 0.05}
    assert [target["holds"] for target in decode.judge([case])] == [True, False]
