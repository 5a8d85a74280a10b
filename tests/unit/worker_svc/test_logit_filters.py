"""Filters drop the tokens that their parameter selects, with every sampler."""

import numpy as np
import pytest
import torch
from transformers.generation.logits_process import TemperatureLogitsWarper, TypicalLogitsWarper

import compiled
from worker_svc.compiled_sampler import CompiledSampler
from worker_svc.executor import Sampler
from worker_svc.logit_filters import FILTERS, filters_of
from worker_svc.logit_filters.typical_p import TypicalFilter
from worker_svc.model.host_waits import first_host_wait
from worker_svc.penalties import filter_logits
from worker_svc.sampler import SamplingState, sample_tokens
from worker_svc.step import SamplingParams

VOCAB = 257


def random_logits(rows: int) -> torch.Tensor:
    return torch.randn(rows, VOCAB, generator=torch.Generator().manual_seed(3)) * 4


@pytest.mark.parametrize("temperature", [0.5, 1.0, 1.5])
@pytest.mark.parametrize("mass", [1e-6, 0.2, 0.5, 0.9, 0.999])
def test_typical_tokens_are_those_of_transformers(mass: float, temperature: float) -> None:
    logits = random_logits(9)
    logits[0] = 0.0  # all alike
    logits[1, 7] = 60.0  # one alone
    logits[2, 5:100] = float("-inf")  # suppressed
    ids = torch.zeros(9, 1, dtype=torch.long)
    expected = TypicalLogitsWarper(mass)(ids, TemperatureLogitsWarper(temperature)(ids, logits.clone()))
    found = logits.clone()
    TypicalFilter()(found, [SamplingParams(temperature=temperature, typical_p=mass)] * 9)
    assert torch.equal(found.isinf(), expected.isinf())
    assert torch.equal(found[~found.isinf()], logits[~found.isinf()])
    assert (~found.isinf()).any(-1).all()


@pytest.mark.parametrize(
    ("params", "applies"),
    [
        (SamplingParams(temperature=1.0, typical_p=0.5), True),
        (SamplingParams(temperature=1.0), False),
        (SamplingParams(temperature=0.0, typical_p=0.5), False),
    ],
    ids=["typical", "all", "greedy"],
)
def test_a_filter_applies_to_requests_that_set_its_parameter(params: SamplingParams, applies: bool) -> None:
    assert len(FILTERS) >= 1
    assert bool(filters_of(params)) is applies


def test_filters_do_not_wait_for_a_device() -> None:
    params = SamplingParams(temperature=1.0, typical_p=0.5, allowed_token_ids=(3, 9))
    assert filters_of(params) == FILTERS
    logits = random_logits(4)
    assert first_host_wait(lambda: filter_logits(logits, [(0, params), (2, params)])) is None


def test_a_row_that_is_filtered_alone_is_filtered_so_beside_others() -> None:
    """To the last bit, also where torch sums one row by several threads, as it does on a GPU."""
    params = SamplingParams(temperature=1.0, typical_p=0.5)
    num_threads = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        for seed in (19, 20):
            logits = torch.randn(4, 50257, generator=torch.Generator().manual_seed(seed))
            together = logits.clone()
            filter_logits(together, [(row, params) for row in range(4)], one_by_one=True)
            for row in range(4):
                alone = logits[row : row + 1].clone()
                filter_logits(alone, [(0, params)])
                assert torch.equal(together[row], alone[0])
    finally:
        torch.set_num_threads(num_threads)


@pytest.mark.parametrize("kind", ["torch", "compiled"])
def test_only_kept_tokens_are_sampled_and_each_row_depends_on_itself(kind: str) -> None:
    sampler: Sampler = sample_tokens if kind == "torch" else CompiledSampler(compiled.thread_pool())
    logits = random_logits(40)
    params = [
        SamplingParams(temperature=2.0, seed=row, typical_p=0.3 if row % 2 else 0.0, logit_bias={row: 3.0})
        for row in range(len(logits))
    ]

    def sampled(rows: list[int]) -> list[int | None]:
        states = [SamplingState(params[row], 0, np.array([1], np.int32), 1) for row in rows]
        return sampler(logits[rows].clone(), states).tokens

    tokens = sampled(list(range(len(logits))))
    biased = logits + 3.0 * torch.eye(len(logits), VOCAB)
    kept = biased.clone()
    TypicalFilter()(kept, [SamplingParams(temperature=2.0, typical_p=0.3)] * len(kept))
    for row, token in enumerate(tokens):
        assert token is not None
        assert row % 2 == 0 or not kept[row, token].isinf()
        assert sampled([row]) == [token]
    assert any(kept[row, token].isinf() for row, token in enumerate(tokens) if row % 2 == 0 and token is not None)
