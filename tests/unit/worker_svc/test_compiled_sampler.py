"""Compiled sampling and log-probabilities depend only on the row, to the last bit."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

import compiled
from worker_svc.compiled_sampler import CompiledSampler
from worker_svc.sampler import SamplingState
from worker_svc.step import SamplingParams

VOCAB = 5003
PARAMS = [
    SamplingParams(temperature=1.0, top_p=0.9, seed=1, logprobs=1),
    SamplingParams(temperature=0.0, logprobs=20),
    SamplingParams(temperature=0.7, top_k=40, seed=2),
    SamplingParams(temperature=1.3, min_p=0.01, seed=3, logprobs=0, frequency_penalty=0.5, repetition_penalty=1.2),
    SamplingParams(temperature=1.5, seed=5, typical_p=0.6, logprobs=2),
    SamplingParams(temperature=1.0, seed=4, logprobs=5, logit_bias={7: 3.0, 11: -1.5}),
]


def state(row: int) -> SamplingState:
    return SamplingState(PARAMS[row % len(PARAMS)], 0, np.arange(9, dtype=np.int32), 4)


def test_a_row_has_the_same_bits_alone_and_in_a_batch() -> None:
    torch.manual_seed(0)
    logits = torch.randn(33, VOCAB) * 4
    logits[:, 1000:1040] = logits[:, :1].clone() + 20  # ties among the largest logits
    sampler = CompiledSampler(compiled.thread_pool())
    crowd = sampler(logits.clone(), [state(row) for row in range(len(logits))])
    for row in range(len(logits)):
        alone = sampler(logits[row : row + 1].clone(), [state(row)])
        assert alone.tokens == [crowd.tokens[row]]
        assert alone.logprobs == [crowd.logprobs[row]]


def test_log_probabilities_are_those_of_the_logits_as_they_came() -> None:
    torch.manual_seed(1)
    logits = torch.randn(10, VOCAB) * 4
    sampled = CompiledSampler(compiled.thread_pool())(logits.clone(), [state(row) for row in range(len(logits))])
    expected = logits.double().log_softmax(-1)
    for row, (token, reported) in enumerate(zip(sampled.tokens, sampled.logprobs, strict=True)):
        count = state(row).params.logprobs
        if count is None:
            assert reported is None
            continue
        assert token is not None
        assert reported is not None
        assert abs(reported.logprob - float(expected[row, token])) < 1e-5
        assert [t for t, _ in reported.top] == expected[row].topk(count).indices.tolist()


@pytest.mark.parametrize("logprobs", [0, 2, VOCAB + 7])
@pytest.mark.parametrize("requested", [(7, 3, 11), (3, 7, 11), (3,)])
def test_requested_log_probabilities_do_not_depend_on_each_other(logprobs: int, requested: tuple[int, ...]) -> None:
    torch.manual_seed(2)
    logits = torch.randn(2, VOCAB) * 4
    logits[:, 3] = -3e38  # as some models have for tokens that they never sample
    params = [
        SamplingParams(temperature=0.0, logprobs=logprobs, logprob_token_ids=requested),
        SamplingParams(temperature=0.0, logprobs=0),
    ]
    states = [SamplingState(one, 0, np.arange(9, dtype=np.int32), 4) for one in params]
    sampled = CompiledSampler(compiled.thread_pool())(logits.clone(), states)
    expected = logits.double().log_softmax(-1)
    first, second = sampled.logprobs
    assert first is not None
    assert second is not None
    assert first.requested == pytest.approx(expected[0, list(requested)].tolist(), rel=1e-5)
    assert (len(first.top), len(second.top), len(second.requested)) == (min(logprobs, VOCAB), 0, 0)
    assert first.logprob == pytest.approx(float(expected[0].max()), rel=1e-5)


@pytest.mark.parametrize(
    "change",
    [
        {},
        {"temperature": 0.7},
        {"logprobs": 0},
        {"logit_bias": {3: -50.0}},
        {"presence_penalty": 1.9},
        {"min_tokens": 20, "suppressed_token_ids": (3,)},
        {"bad_words": ((3,),)},
        {"allowed_token_ids": (1, 2)},
        {"typical_p": 0.5, "temperature": 1.0},
    ],
    ids=lambda change: next(iter(change), "greedy"),
)
def test_only_rows_that_need_logits_are_read(change: dict[str, Any]) -> None:
    params = replace(SamplingParams(temperature=0.0), **change)
    state = SamplingState(params, 0, np.array([3, 3], np.int32), 1)
    assert state.needs_logits == bool(change)
    logits = torch.zeros(1, 50)
    logits[0, 3] = 1.0
    sampler = CompiledSampler(compiled.thread_pool(), lambda _: np.array([3]))
    seen = logits.clone() if state.needs_logits else torch.full_like(logits, float("nan"))
    assert sampler(seen, [state]) == CompiledSampler(compiled.thread_pool())(logits, [state])
