"""Sampling follows the documented order and depends only on a row's logits, parameters, seed, index and position."""

import math
from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
import torch

from worker_svc.philox import uniforms
from worker_svc.sampler import SamplerOutput, SamplingState, num_accepted, sample_tokens
from worker_svc.step import SamplingParams

VOCAB = 300


def _state(
    params: SamplingParams, tokens: list[int] | None = None, prompt_length: int = 1, index: int = 0
) -> SamplingState:
    known = np.array([0] if tokens is None else tokens, np.int32)
    return SamplingState(params, index, known, prompt_length)


def _logits(*rows: list[float]) -> torch.Tensor:
    return torch.tensor(rows, dtype=torch.float32)


def _sample(logits: torch.Tensor, states: list[SamplingState]) -> SamplerOutput:
    return sample_tokens(logits.clone(), states)


def _expected(logits: np.ndarray, params: SamplingParams, number: float) -> int:
    """The documented rule, one token at a time in float64."""
    probabilities = np.exp((logits - logits.max()) / params.temperature)
    kept = probabilities >= params.min_p * probabilities.max()
    if 0 < params.top_k < len(logits):
        kept &= probabilities >= np.sort(probabilities)[-params.top_k]
    probabilities = np.where(kept, probabilities, 0.0)
    if params.top_p < 1.0:
        ranked = np.sort(probabilities)[::-1]
        place = int(np.searchsorted(ranked.cumsum(), params.top_p * ranked.sum()))
        probabilities[probabilities < ranked[min(place, len(ranked) - 1)]] = 0.0
    ends = probabilities.cumsum()
    return int(np.searchsorted(ends, number * ends[-1], side="right"))


def test_rows_of_a_draft_sample_as_after_its_tokens() -> None:
    params = SamplingParams(
        temperature=1.0, repetition_penalty=1.5, frequency_penalty=0.7, presence_penalty=0.3, seed=5,
        min_tokens=4, suppressed_token_ids=(1, 2, 3), logprobs=2,
    )  # fmt: skip
    draft = [9, 7, 9, 250]
    logits = torch.randn(len(draft) + 1, VOCAB, generator=torch.Generator().manual_seed(0)) * 3
    known = [4, 9, 11]
    state = _state(params, known, prompt_length=1, index=2)
    rows = state.ahead(draft)
    assert rows[0] is state
    expected = [_state(params, known + draft[:count], prompt_length=1, index=2) for count in range(len(draft) + 1)]
    assert _sample(logits, rows) == _sample(logits, expected)
    state.add(13)
    assert _sample(logits[1:], rows[1:]) == _sample(logits[1:], expected[1:]), "the rows are values of their own"
    assert _sample(logits[:1], [state]) == _sample(logits[:1], [_state(params, [*known, 13], index=2)])


@pytest.mark.parametrize(
    ("tokens", "draft", "count"),
    [
        ([1], [], 1),
        ([1, 2, 3], [1, 2], 3),
        ([1, 2, 3], [1, 5], 2),
        ([1, 2, 3], [5, 2], 1),
        ([None, 2, 3], [1, 2], 1),
        ([1, None, 3], [1, 2], 2),
        ([1, 2, None], [1, 2], 3),
    ],
)
def test_tokens_count_up_to_the_first_that_was_not_drafted(
    tokens: list[int | None], draft: list[int], count: int
) -> None:
    assert num_accepted(tokens, draft) == count


@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(temperature=1.0),
        SamplingParams(temperature=0.3),
        SamplingParams(temperature=2.0, top_k=1),
        SamplingParams(temperature=2.0, top_k=7),
        SamplingParams(temperature=2.0, top_k=VOCAB + 5),
        SamplingParams(temperature=2.0, top_p=0.9),
        SamplingParams(temperature=2.0, top_p=1e-9),
        SamplingParams(temperature=2.0, top_p=1.0 - 1e-16),
        SamplingParams(temperature=2.0, min_p=0.2),
        SamplingParams(temperature=2.0, min_p=1.0),
        SamplingParams(temperature=1.5, top_k=40, top_p=0.7, min_p=0.01),
    ],
)
@pytest.mark.parametrize("vocab_size", [VOCAB, 320])
@pytest.mark.parametrize("spread", [3.0, 0.01, 60.0])
def test_sampling_is_the_inverse_cdf_over_the_kept_tokens(
    params: SamplingParams, vocab_size: int, spread: float
) -> None:
    rows = 100
    logits = torch.randn(rows, vocab_size, generator=torch.Generator().manual_seed(1)) * spread
    states = [_state(replace(params, seed=seed)) for seed in range(rows)]
    numbers = uniforms(np.arange(rows, dtype=np.uint64), np.zeros(rows, np.uint32), np.ones(rows, np.uint32))
    expected = [_expected(row, params, u) for row, u in zip(logits.double().numpy(), numbers, strict=True)]
    assert _sample(logits, states).tokens == expected


def test_sampled_tokens_have_the_probabilities_of_the_logits() -> None:
    probabilities = [0.5, 0.25, 0.125, 0.125]
    logits = _logits([math.log(p) for p in probabilities]).repeat(4000, 1)
    sampled = Counter(_sample(logits, [_state(SamplingParams(temperature=1.0, seed=s)) for s in range(4000)]).tokens)
    squared = sum((sampled[t] - 4000 * p) ** 2 / (4000 * p) for t, p in enumerate(probabilities))
    assert squared < 16.3  # chi-square with 3 degrees of freedom, 0.1 %


def test_sampling_does_not_depend_on_the_rest_of_the_batch() -> None:
    logits = torch.randn(40, VOCAB, generator=torch.Generator().manual_seed(2)) * 3
    kinds = [
        SamplingParams(temperature=1.0),
        SamplingParams(temperature=0.8, top_p=0.9),
        SamplingParams(temperature=1.0, top_k=5, logprobs=3),
        SamplingParams(temperature=0.0, repetition_penalty=1.3),
        SamplingParams(temperature=0.7, presence_penalty=1.0, min_p=0.05),
    ]

    def states() -> list[SamplingState]:
        return [_state(replace(kinds[row % 5], seed=row), [1, 2, 3], index=row % 3) for row in range(40)]

    together = _sample(logits, states())
    alone = [_sample(logits[row : row + 1], [state]) for row, state in enumerate(states())]
    assert together.tokens == [output.tokens[0] for output in alone]
    assert together.logprobs == [output.logprobs[0] for output in alone]


def test_sampling_depends_on_index_and_position() -> None:
    logits = torch.zeros(1, VOCAB)
    params = SamplingParams(temperature=1.0, seed=-3)
    first = _sample(logits, [_state(params)]).tokens
    assert _sample(logits, [_state(params)]).tokens == first
    assert _sample(logits, [_state(params, index=1)]).tokens != first
    assert _sample(logits, [_state(params, tokens=[0, 5], prompt_length=1)]).tokens != first


def test_a_state_that_grew_samples_as_one_made_of_all_tokens() -> None:
    params = SamplingParams(temperature=1.0, seed=9, repetition_penalty=1.5, frequency_penalty=0.5, min_tokens=3,
                            suppressed_token_ids=(0, 1, 2))  # fmt: skip
    logits = torch.randn(1, VOCAB, generator=torch.Generator().manual_seed(3))
    grown = _state(params, [4, 4, 7], prompt_length=2)
    for token in (7, 8, 7, 200):
        grown.add(token)
        reported = [4, 4, 7, 7, 8, 7, 200]
    assert _sample(logits, [grown]).tokens == _sample(logits, [_state(params, reported, prompt_length=2)]).tokens


@pytest.mark.parametrize("vocab_size", [192, 193])
def test_greedy_takes_the_first_of_the_top_tokens(vocab_size: int) -> None:
    logits = torch.full((3, vocab_size), -2.0)
    for row, places in enumerate([(70, 71, 190), (5, 130), (191,)]):
        logits[row, list(places)] = 3.0
    assert _sample(logits, [_state(SamplingParams())] * 3).tokens == [70, 5, 191]


@pytest.mark.parametrize("temperature", [1e-320, 1e-30, 1e-6])
def test_a_temperature_next_to_nothing_is_greedy(temperature: float) -> None:
    logits = _logits([80.0, 80.001, -80.0])
    assert _sample(logits, [_state(SamplingParams(temperature=temperature, seed=5))]).tokens == [1]


def test_repetition_penalty_looks_at_prompt_and_output() -> None:
    logits = _logits([3.0, 2.9, -1.0, 2.0])
    params = SamplingParams(repetition_penalty=2.0)
    assert _sample(logits, [_state(params, [0], prompt_length=1)]).tokens == [1]
    assert _sample(logits, [_state(params, [0, 1], prompt_length=1)]).tokens == [3]
    # A negative logit is multiplied: being seen never helps a token.
    assert _sample(_logits([-2.0, -3.0]), [_state(params, [0], prompt_length=1)]).tokens == [1]


def test_presence_and_frequency_penalties_look_at_the_output_alone() -> None:
    logits = _logits([3.0, 2.5, 0.0])
    for params in (SamplingParams(presence_penalty=1.0), SamplingParams(frequency_penalty=1.0)):
        assert _sample(logits, [_state(params, [0, 0, 0], prompt_length=3)]).tokens == [0]
        assert _sample(logits, [_state(params, [0, 0], prompt_length=1)]).tokens == [1]


def test_frequency_penalty_counts_and_presence_penalty_does_not() -> None:
    logits = _logits([3.0, 1.5, 0.0])
    tokens = [9, 0, 0]
    assert _sample(logits, [_state(SamplingParams(presence_penalty=1.0), tokens, 1)]).tokens == [0]
    assert _sample(logits, [_state(SamplingParams(frequency_penalty=1.0), tokens, 1)]).tokens == [1]


def test_logit_bias_is_added_before_penalties() -> None:
    params = SamplingParams(logit_bias={2: 4.0}, repetition_penalty=2.0)
    # Token 2 stands at (1 + 4) / 2 = 2.5.
    assert _sample(_logits([2.4, 0.0, 1.0]), [_state(params, [2], 1)]).tokens == [2]
    assert _sample(_logits([2.6, 0.0, 1.0]), [_state(params, [2], 1)]).tokens == [0]


def test_suppressed_tokens_come_only_after_min_tokens() -> None:
    params = SamplingParams(suppressed_token_ids=(1,), min_tokens=2, logit_bias={1: 100.0})
    state = _state(params, [0], prompt_length=1)
    sampled = []
    for _ in range(3):
        (token,) = _sample(_logits([1.0, 9.0, 0.5]), [state]).tokens
        assert token is not None
        sampled.append(token)
        state.add(token)
    assert sampled == [0, 0, 1]


def test_logprobs_are_of_the_logits_before_any_change() -> None:
    logits = _logits([2.0, 1.0, 0.0, -1.0])
    params = SamplingParams(temperature=0.5, top_k=1, logit_bias={3: 50.0}, logprobs=2)
    output = _sample(logits, [_state(params)])
    expected = torch.log_softmax(logits.double()[0], -1).tolist()
    assert output.tokens == [3]
    assert output.logprobs[0] is not None
    assert output.logprobs[0].logprob == pytest.approx(expected[3], abs=1e-6)
    assert [token for token, _ in output.logprobs[0].top] == [0, 1]
    assert [value for _, value in output.logprobs[0].top] == pytest.approx(expected[:2], abs=1e-6)


def test_logprobs_are_returned_only_as_requested() -> None:
    logits = _logits([2.0, 1.0, 0.0]).repeat(3, 1)
    wanted = [None, 0, 2]
    output = _sample(logits, [_state(SamplingParams(logprobs=count)) for count in wanted])
    assert [None if reported is None else len(reported.top) for reported in output.logprobs] == wanted


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("params", [SamplingParams(), SamplingParams(temperature=1.0, top_p=0.5, top_k=2)])
def test_logits_that_are_no_numbers_fail_their_row_alone(bad: float, params: SamplingParams) -> None:
    logits = _logits([0.0, 9.0, 0.0], [0.0, bad, 0.0])
    assert _sample(logits, [_state(params), _state(params)]).tokens == [1, None]
    assert _sample(logits[1:], [_state(params)]).tokens == [None]


@pytest.mark.parametrize("params", [SamplingParams(logprobs=1), SamplingParams(temperature=1.0, top_p=0.5, top_k=2)])
def test_several_tokens_may_have_the_least_number_as_their_logit(params: SamplingParams) -> None:
    least = torch.finfo(torch.float32).min
    output = _sample(_logits([least, least, 9.0, least], [0.0, 9.0, 0.0, 0.0]), [_state(params), _state(params)])
    assert output.tokens == [2, 1]
    assert output.logprobs[0] is None or output.logprobs[0].logprob == 0.0


def test_bfloat16_logits_sample_as_their_values_in_float32() -> None:
    logits = torch.randn(50, VOCAB, generator=torch.Generator().manual_seed(4)).bfloat16()
    states = [_state(SamplingParams(temperature=1.0, top_p=0.8, seed=seed)) for seed in range(50)]
    assert _sample(logits, states).tokens == _sample(logits.float(), states).tokens


def test_a_penalty_next_to_nothing_leaves_the_others_of_its_batch_alone() -> None:
    wild = _state(SamplingParams(temperature=1.0, top_p=0.5, top_k=2, repetition_penalty=1e-40), tokens=[1, 2])
    plain = _state(SamplingParams())
    output = _sample(_logits([1.0, 2.0, 3.0, -1.0], [1.0, 2.0, 3.0, -1.0]), [wild, plain])
    assert output.tokens[0] in (1, 2)
    assert output.tokens[1] == 2


def test_a_row_whose_tokens_are_all_suppressed_fails_alone() -> None:
    params = SamplingParams(temperature=1.0, top_p=0.5, suppressed_token_ids=(0, 1, 2, 3), min_tokens=1)
    output = _sample(_logits([1.0, 2.0, 3.0, -1.0], [1.0, 2.0, 3.0, -1.0]), [_state(params), _state(SamplingParams())])
    assert output.tokens == [None, 2]
