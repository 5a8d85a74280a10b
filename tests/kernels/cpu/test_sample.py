"""The compiled sampler samples the same tokens as the one in torch."""

from typing import Any

import numpy as np
import pytest
import torch

import compiled
from quire_kernels.cpu.sample import SAMPLING_PARAMS_DTYPE, argmax, mask_logits, sample, top_logprobs
from worker_svc.philox import uniforms
from worker_svc.sampler import SamplingState, sample_tokens
from worker_svc.step import SamplingParams

KINDS: dict[str, dict[str, Any]] = {
    "temperature": {"temperature": 0.7},
    "hot": {"temperature": 2.0},
    "cold": {"temperature": 0.01},
    "top_k": {"top_k": 5},
    "top_k of one": {"top_k": 1},
    "top_k beyond": {"top_k": 10**9},
    "top_p": {"top_p": 0.8},
    "top_p of little": {"top_p": 1e-9},
    "min_p": {"min_p": 0.05},
    "all": {"temperature": 0.9, "top_k": 40, "top_p": 0.9, "min_p": 0.01},
}


@pytest.mark.parametrize("vocab", [1, 7, 63, 97, 1000, 5003])
@pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)
def test_draws_are_the_samplers(kind: dict[str, Any], vocab: int) -> None:
    torch.manual_seed(vocab)
    logits = torch.randn(24, vocab).mul_(3)
    logits[3] = 0.5  # all alike
    logits[4, vocab // 2 :] = logits[4, : vocab - vocab // 2].clone()  # ties
    states = [
        SamplingState(SamplingParams(**({"temperature": 1.0} | kind), seed=row), 0, np.zeros(3, np.int32), 3)
        for row in range(len(logits))
    ]
    numbers = uniforms(np.arange(24, dtype=np.uint64), np.zeros(24, np.uint32), np.full(24, 3, np.uint32))
    params = np.zeros(24, SAMPLING_PARAMS_DTYPE)
    for name, value in ({"temperature": 1.0, "top_p": 1.0} | kind).items():
        params[name] = value
    params["number"] = numbers
    sampled = sample(compiled.thread_pool(), logits, np.arange(24), params)
    assert sampled.tolist() == sample_tokens(logits.clone(), states).tokens


def test_draws_follow_the_weights() -> None:
    weights = torch.tensor([0.5, 0.0, 0.3, 0.2])
    params = np.zeros(2000, SAMPLING_PARAMS_DTYPE)
    params["temperature"] = params["top_p"] = 1.0
    params["number"] = (np.arange(2000) + 0.5) / 2000
    sampled = sample(compiled.thread_pool(), weights.log()[None], np.zeros(2000, np.int64), params)
    assert np.bincount(sampled, minlength=4).tolist() == [1000, 0, 600, 400]
    assert sampled.tolist() == sorted(sampled)


@pytest.mark.parametrize("place", [0, 40, 96])
@pytest.mark.parametrize("fault", [float("nan"), float("inf")])
def test_a_row_with_a_fault_has_no_token(fault: float, place: int) -> None:
    logits = torch.zeros(3, 97)
    logits[:, 50] = 1.0
    logits[1, place] = fault
    params = np.zeros(3, SAMPLING_PARAMS_DTYPE)
    params["temperature"] = params["top_p"] = 1.0
    assert argmax(compiled.thread_pool(), logits).tolist() == [50, -1, 50]
    assert (sample(compiled.thread_pool(), logits, np.arange(3), params) < 0).tolist() == [False, True, False]


def test_argmax_takes_the_first_of_equals() -> None:
    logits = torch.zeros(4, 97)
    for row, token in enumerate((0, 15, 16, 96)):
        logits[row, token:] = 2.5
    assert argmax(compiled.thread_pool(), logits).tolist() == [0, 15, 16, 96]
    logits[2, 3] = float("-inf")
    assert argmax(compiled.thread_pool(), logits).tolist() == [0, 15, -1, 96]


def test_suppressed_tokens_are_never_sampled() -> None:
    logits = torch.full((2, 97), float("-inf"))
    logits[0, 33] = -5.0
    params = np.zeros(2, SAMPLING_PARAMS_DTYPE)
    params["temperature"], params["top_p"], params["number"] = 1.0, 0.5, 0.999
    assert sample(compiled.thread_pool(), logits, np.arange(2), params).tolist() == [33, -1]
    assert argmax(compiled.thread_pool(), logits, suppressed=True).tolist() == [33, -1]
    assert argmax(compiled.thread_pool(), logits).tolist() == [-1, -1]


@pytest.mark.parametrize("vocab", [1, 7, 63, 97, 1000, 5003])
def test_ranks_are_the_log_probabilities(vocab: int) -> None:
    torch.manual_seed(vocab)
    logits, tokens = torch.randn(24, vocab).mul_(3), torch.randint(vocab, (24,))
    count = min(vocab, 20)
    logprobs, ids = top_logprobs(compiled.thread_pool(), logits, tokens.numpy(), count)
    expected = logits.double().log_softmax(-1)
    values, order = expected.sort(dim=-1, descending=True, stable=True)
    assert ids.tolist() == order[:, :count].tolist()
    computed = torch.cat((expected.gather(-1, tokens[:, None]), values[:, :count]), 1)
    assert np.allclose(logprobs, computed.numpy(), atol=1e-5)


def test_of_equally_likely_tokens_the_first_rank_first_for_any_count() -> None:
    logits = torch.zeros(3, 1000)
    logits[1, 500:] = 1.0
    logits[2] = -torch.arange(1000.0).div(2, rounding_mode="floor")
    tokens = np.zeros(3, np.int64)
    logprobs, ids = top_logprobs(compiled.thread_pool(), logits, tokens, 20)
    assert ids.tolist() == [list(range(20)), list(range(500, 520)), list(range(20))]
    for count in (0, 1, 5):
        fewer, first = top_logprobs(compiled.thread_pool(), logits, tokens, count)
        assert first.tolist() == ids[:, :count].tolist()
        assert fewer.tolist() == logprobs[:, : 1 + count].tolist()


def test_a_row_of_no_numbers_leaves_the_ranks_of_others_alone() -> None:
    logits = torch.randn(3, 100)
    expected = top_logprobs(compiled.thread_pool(), logits, np.zeros(3, np.int64), 3)[0]
    logits[1] = float("nan")
    computed = top_logprobs(compiled.thread_pool(), logits, np.zeros(3, np.int64), 3)[0]
    assert computed[::2].tolist() == expected[::2].tolist()


@pytest.mark.parametrize(
    ("tokens", "count", "name"), [([0, 100], 1, "tokens"), ([0], 1, "tokens"), ([0, 0], 101, "count")]
)
def test_ranks_that_do_not_exist_are_refused_by_name(tokens: list[int], count: int, name: str) -> None:
    with pytest.raises(ValueError, match=f"^{name}: "):
        top_logprobs(compiled.thread_pool(), torch.zeros(2, 100), np.array(tokens, np.int64), count)


@pytest.mark.parametrize("vocab", [1, 31, 32, 33, 97, 1000])
def test_masked_rows_lose_the_tokens_without_a_bit(vocab: int) -> None:
    torch.manual_seed(vocab)
    logits = torch.randn(9, vocab)
    rows = np.array([7, 0, 3, 5], np.int64)
    rng = np.random.default_rng(vocab)
    allowed = rng.random((4, vocab)) < 0.3
    allowed[1], allowed[2] = True, False
    allowed[0, vocab - 1] = allowed[3, vocab // 2] = True
    packed = np.zeros((4, -(-vocab // 32) * 4), np.uint8)
    bits = np.packbits(allowed, axis=1, bitorder="little")
    packed[:, : bits.shape[1]] = bits
    masked = logits.clone()
    tokens = mask_logits(compiled.thread_pool(), masked, rows, packed.view(np.int32))
    expected = logits.clone()
    expected[rows] = logits[rows].masked_fill(~torch.from_numpy(allowed), float("-inf"))
    assert torch.equal(masked, expected)
    assert tokens.tolist() == [*expected[rows[:2]].argmax(-1).tolist(), -1, int(expected[5].argmax())]


def test_a_mask_has_a_bit_for_each_token() -> None:
    logits, rows = torch.zeros(2, 97), np.array([0], np.int64)
    with pytest.raises(ValueError, match="bits"):
        mask_logits(compiled.thread_pool(), logits, rows, np.zeros((1, 3), np.int32))
    with pytest.raises(ValueError, match="rows"):
        mask_logits(compiled.thread_pool(), logits, rows + 2, np.zeros((1, 4), np.int32))


def test_rows_are_a_list() -> None:
    with pytest.raises(ValueError, match="rows"):
        mask_logits(compiled.thread_pool(), torch.zeros(2, 32), np.zeros((1, 2), np.int64), np.zeros((1, 1), np.int32))
