"""Sampled tokens beside the distributions of transformers' logits processors, an independent reference."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any, cast

import numpy as np
import pytest
import torch
from transformers import (
    LogitsProcessor,
    LogitsProcessorList,
    MinNewTokensLengthLogitsProcessor,
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    SequenceBiasLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

import compiled
from worker_svc.compiled_sampler import CompiledSampler
from worker_svc.philox import uniforms
from worker_svc.sampler import SamplerOutput, SamplingState, sample_tokens
from worker_svc.step import SamplingParams

VOCAB, NUM_ROWS = 300, 200
KNOWN, PROMPT_LENGTH = [3, 9, 250, 9, 17], 2
Sampler = Callable[[torch.Tensor, list[SamplingState]], SamplerOutput]


@pytest.fixture(params=["torch", "compiled"])
def sampler(request: pytest.FixtureRequest) -> Sampler:
    return sample_tokens if request.param == "torch" else CompiledSampler(compiled.thread_pool())


def processors(params: SamplingParams) -> LogitsProcessorList:
    """Those of transformers, in the documented order: what changes logits, temperature, min_p, top_k, top_p."""
    found: list[LogitsProcessor] = []
    if params.logit_bias:
        found.append(SequenceBiasLogitsProcessor([[[token], bias] for token, bias in params.logit_bias.items()]))
    if params.repetition_penalty != 1.0:
        found.append(RepetitionPenaltyLogitsProcessor(params.repetition_penalty))
    if params.min_tokens:
        ends = list(params.suppressed_token_ids)
        found.append(MinNewTokensLengthLogitsProcessor(PROMPT_LENGTH, params.min_tokens, ends))
    found.append(TemperatureLogitsWarper(params.temperature))
    if params.min_p:
        found.append(MinPLogitsWarper(params.min_p))
    if params.top_k:
        found.append(TopKLogitsWarper(params.top_k))
    if params.top_p < 1.0:
        found.append(TopPLogitsWarper(params.top_p))
    return LogitsProcessorList(found)


def assert_drawn_from(
    scores: torch.Tensor, logits: torch.Tensor, known: list[int], params: SamplingParams, sampler: Sampler
) -> None:
    """The tokens of all rows are those of the inverse distribution function of `scores`, in float64."""
    ends = scores.softmax(-1).cumsum(-1)
    position = np.full(NUM_ROWS, len(known), np.uint32)
    numbers = uniforms(np.arange(NUM_ROWS, dtype=np.uint64), np.zeros(NUM_ROWS, np.uint32), position)
    expected = torch.searchsorted(ends, torch.tensor(numbers)[:, None] * ends[:, -1:], right=True)[:, 0]
    tokens = np.array(known, np.int32)
    states = [SamplingState(replace(params, seed=seed), 0, tokens, PROMPT_LENGTH) for seed in range(NUM_ROWS)]
    assert sampler(logits.clone(), states).tokens == expected.tolist()


@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(temperature=0.7),
        SamplingParams(temperature=2.0, top_k=7),
        SamplingParams(temperature=2.0, top_p=0.6),
        SamplingParams(temperature=2.0, min_p=0.15),
        SamplingParams(temperature=1.5, top_k=40, top_p=0.7, min_p=0.01),
        SamplingParams(temperature=1.0, repetition_penalty=1.8),
        SamplingParams(temperature=1.0, repetition_penalty=0.5, top_p=0.9),
        SamplingParams(temperature=1.0, logit_bias={7: 6.0, 17: -4.0}),
        SamplingParams(temperature=1.0, min_tokens=4, suppressed_token_ids=(1, 2, 3), top_k=20),
        SamplingParams(temperature=1.0, min_tokens=3, suppressed_token_ids=(1, 2, 3), top_k=20),
    ],
    ids=str,
)
def test_tokens_are_drawn_from_the_distribution_of_transformers(params: SamplingParams, sampler: Sampler) -> None:
    logits = torch.randn(NUM_ROWS, VOCAB, generator=torch.Generator().manual_seed(1)) * 3
    logits[:, :20] += 2.0  # of tokens that penalties and biases change
    ids: Any = torch.tensor([KNOWN]).expand(NUM_ROWS, -1)
    scores = processors(params)(ids, cast(Any, logits.double()))
    assert_drawn_from(scores, logits, KNOWN, params, sampler)


@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(temperature=1.0, presence_penalty=1.5),
        SamplingParams(temperature=1.0, frequency_penalty=-0.8),
        SamplingParams(temperature=1.0, frequency_penalty=1.2, presence_penalty=-0.5),
    ],
    ids=str,
)
def test_penalties_are_those_of_openais_formula(params: SamplingParams, sampler: Sampler) -> None:
    """mu[j] - c[j] × frequency - (c[j] > 0) × presence, with c the counts of output tokens; transformers has none."""
    logits = torch.randn(NUM_ROWS, VOCAB, generator=torch.Generator().manual_seed(2)) * 2
    known = [3, 9, 250, 9, 17, 9]
    counts = torch.bincount(torch.tensor(known[PROMPT_LENGTH:]), minlength=VOCAB).double()
    logits[:, known] += 4.0
    changed = logits.double() - counts * params.frequency_penalty - (counts > 0) * params.presence_penalty
    assert_drawn_from(changed, logits, known, params, sampler)
