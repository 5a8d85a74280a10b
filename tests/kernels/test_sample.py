"""Sampled tokens are those of the CPU's sampler, for any batch and split of a row."""

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from quire_kernels.adjust_logits import SUPPRESSED, Penalties, fill_token_counts
from quire_kernels.sample import sample, sample_reference, uniform
from sampling_rows import make_states, make_tensors
from worker_svc.philox import uniforms
from worker_svc.sampler import sample_tokens
from worker_svc.step import SamplingParams

KINDS = [
    SamplingParams(temperature=1.0),
    SamplingParams(temperature=0.3),
    SamplingParams(temperature=0.0, top_k=3, top_p=0.5),
    SamplingParams(temperature=2.0, top_k=1),
    SamplingParams(temperature=2.0, top_k=7),
    SamplingParams(temperature=2.0, top_k=2**31 - 1),
    SamplingParams(temperature=1.0, top_k=-1),
    SamplingParams(temperature=2.0, top_p=0.9),
    SamplingParams(temperature=2.0, top_p=1e-9),
    SamplingParams(temperature=2.0, top_p=1.0 - 1e-16),
    SamplingParams(temperature=2.0, min_p=0.2),
    SamplingParams(temperature=2.0, min_p=1.0),
    SamplingParams(temperature=1.5, top_k=40, top_p=0.7, min_p=0.01),
    SamplingParams(temperature=0.7, top_k=3, top_p=0.99),
    SamplingParams(temperature=1.0, top_k=50, min_p=0.3),
]


def random_logits(rows: int, vocab_size: int, spread: float = 3.0) -> torch.Tensor:
    return torch.randn(rows, vocab_size, generator=torch.Generator().manual_seed(1)) * spread


@pytest.mark.parametrize(
    ("vocab_size", "spread"), [(97, 3.0), (300, 0.01), (1024, 60.0), (1025, 3.0), (3001, 1.0), (2049, 0.3)]
)
def test_draws_are_the_processors(vocab_size: int, spread: float, device: str) -> None:
    params = [replace(kind, seed=seed - 2**63) for seed, kind in enumerate(KINDS)]
    logits = random_logits(len(params), vocab_size + 3, spread)[:, :vocab_size]
    expected = sample_tokens(logits.clone(), make_states(params)).tokens
    sampling = make_tensors(params, device)
    assert sample(logits.to(device), sampling).tolist() == expected
    assert sample_reference(logits.to(device), sampling).tolist() == expected


@pytest.mark.skipif(not torch.cuda.is_available(), reason="the interpreter takes minutes for such a vocabulary")
@pytest.mark.parametrize("vocab_size", [128_256, 200_019])
@pytest.mark.parametrize("spread", [1.0, 3.0])
def test_large_vocabularies(vocab_size: int, spread: float, device: str) -> None:
    params = [replace(kind, seed=seed) for seed, kind in enumerate(KINDS * 3)]
    logits, sampling = random_logits(len(params), vocab_size, spread).to(device), make_tensors(params, device)
    same = sample(logits, sampling) == sample_reference(logits, sampling)
    # With probabilities of 1e-5, rounding in float32 sometimes selects a neighbouring token.
    assert int(same.sum()) >= len(params) - 2


def test_many_samples_of_one_row_are_the_references(device: str) -> None:
    params = [SamplingParams(temperature=0.8, top_k=20, top_p=0.95, seed=seed) for seed in range(8)]
    logits = random_logits(1, 500).repeat(len(params), 1).to(device)
    sampling = make_tensors(params, device, index=3, position=77)
    sampled = sample(logits, sampling).tolist()
    assert sampled == sample_reference(logits, sampling).tolist()
    assert len(set(sampled)) > 3


@pytest.mark.parametrize("limit", [{"top_k": 2}, {"top_p": 0.51}])
def test_ties_at_a_limit_are_all_kept(limit: dict[str, Any], device: str) -> None:
    # One token has half of the probability mass, 16 equal tokens the other half.
    logits = torch.full((10, 300), -50.0)
    logits[:, 7] = math.log(16.0)
    logits[:, 30:286:16] = 0.0
    params = [SamplingParams(temperature=1.0, seed=seed, **limit) for seed in range(10)]
    sampled = sample(logits.to(device), make_tensors(params, device)).tolist()
    assert set(sampled) <= {7, *range(30, 286, 16)}
    assert len(set(sampled)) > 3


def test_greedy_takes_the_first_of_equals(device: str) -> None:
    logits = torch.full((3, 3001), -2.0)
    for row, places in enumerate([(70, 71, 2900), (1023, 1024), (3000,)]):
        logits[row, list(places)] = 3.0
    assert sample(logits.to(device), make_tensors([SamplingParams()] * 3, device)).tolist() == [70, 1023, 3000]


def test_a_row_has_the_same_token_alone_and_in_a_batch(device: str) -> None:
    # A large batch is split into other chunks than a small one
    params = [replace(KINDS[row % len(KINDS)], seed=row) for row in range(16)]
    logits = random_logits(16, 1500, 0.5).to(device)
    together = sample(logits, make_tensors(params, device)).tolist()
    for first in (0, 7):
        part = slice(first, first + 7)
        assert sample(logits[part], make_tensors(params[part], device)).tolist() == together[part]


def test_index_and_position_change_the_token(device: str) -> None:
    params = [SamplingParams(temperature=1.0, seed=seed) for seed in range(4)]
    logits = torch.zeros(4, 3000, device=device)
    places = [(0, 1), (1, 1), (0, 2)]
    sampled = [sample(logits, make_tensors(params, device, index, position)).tolist() for index, position in places]
    assert sampled[0] != sampled[1] != sampled[2] != sampled[0]


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_faulty_rows_fail_alone(bad: float, device: str) -> None:
    logits = torch.zeros(6, 1500, device=device)
    logits[:, 9] = 50.0
    logits[1, 3] = logits[4, 1400] = bad
    logits[2] = logits[5] = SUPPRESSED.value
    params = [SamplingParams()] * 3 + [SamplingParams(temperature=1.0, top_k=5, top_p=0.5)] * 3
    assert sample(logits, make_tensors(params, device)).tolist() == [9, -1, -1, 9, -1, -1]
    assert sample_reference(logits, make_tensors(params, device)).tolist() == [9, -1, -1, 9, -1, -1]


def test_suppressed_tokens_are_not_sampled(device: str) -> None:
    logits = torch.zeros(8, 40, device=device)
    logits[:, [0, 3, 39]] = SUPPRESSED.value
    logits[:, 4:39] = -30.0
    params = [SamplingParams(temperature=2.0, top_k=30, seed=seed) for seed in range(8)]
    assert set(sample(logits, make_tensors(params, device)).tolist()) == {1, 2}


def test_logits_are_left_as_they_are(device: str) -> None:
    logits = random_logits(2, 100).to(device)
    before = logits.clone()
    sample(logits, make_tensors(KINDS[-2:], device))
    assert torch.equal(logits, before)


def test_the_sampled_token_is_counted_in_its_slot(device: str) -> None:
    ones = torch.ones(3, device=device)
    counts = torch.zeros((4, 5), dtype=torch.int32, device=device)
    fill_token_counts(counts, 2, torch.tensor([1], device=device), torch.tensor([1, 1], device=device))
    penalties = Penalties(torch.tensor([2, -1, 0], device=device), ones, ones, ones, counts)
    logits = torch.tensor([[0.0, 9.0, 0.0, 0.0, 0.0]], device=device).repeat(3, 1)
    logits[2] = math.nan
    assert sample(logits, make_tensors([SamplingParams()] * 3, device), penalties).tolist() == [1, 1, -1]
    assert (counts & 0x7FFFFFFF).tolist() == [[0] * 5, [0] * 5, [0, 3, 0, 0, 0], [0] * 5]
    assert counts[2, 1] < 0


def test_uniform_numbers_are_the_processors() -> None:
    seeds = np.array([0, 1, 2**64 - 1, 0x0123456789ABCDEF], np.uint64)
    indices, positions = np.array([0, 127, 5, 1], np.uint32), np.array([0, 1, 2**31 - 1, 4096], np.uint32)
    expected = uniforms(seeds, indices, positions).tolist()
    signed = seeds.astype(np.int64).tolist()
    places = zip(signed, indices.tolist(), positions.tolist(), strict=True)
    assert [uniform(*place) for place in places] == expected


def test_tokens_lie_in_vocabulary_order_along_the_uniform_numbers(device: str) -> None:
    params = [SamplingParams(temperature=1.0, seed=seed) for seed in range(-8, 8)]
    size = 4096
    sampled = sample(torch.zeros(16, size, device=device), make_tensors(params, device)).tolist()
    assert sampled == [int(uniform(p.seed, 0, 1) * size) for p in params]


def test_no_rows(device: str) -> None:
    assert sample(torch.zeros((0, 5), device=device), make_tensors([], device)).shape == (0,)


@pytest.mark.parametrize(
    ("argument", "change"),
    [
        ("logits", lambda logits: logits.half()),
        ("logits", lambda logits: logits[0]),
        ("logits", lambda logits: logits[:, ::2]),
        ("logits", lambda logits: logits.expand(3, 9)[:, :0]),
        ("sampling.temperature", lambda values: values.double()),
        ("sampling.top_k", lambda values: values.long()),
        ("sampling.top_p", lambda values: values.float()),
        ("sampling.min_p", lambda values: values[1:]),
        ("sampling.seeds", lambda values: values.int()),
        ("sampling.indices", lambda values: values.long()),
        ("sampling.positions", lambda values: values[:, None]),
    ],
)
def test_a_wrong_argument_is_named(argument: str, change: Callable[[Any], Any], device: str) -> None:
    logits, sampling = torch.zeros(3, 9, device=device), make_tensors([SamplingParams()] * 3, device)
    owner, _, name = argument.rpartition(".")
    if owner:
        sampling = replace(sampling, **{name: change(getattr(sampling, name))})
    else:
        logits = change(logits)
    with pytest.raises(ValueError, match=f"^{argument}: "):
        sample(logits, sampling)
