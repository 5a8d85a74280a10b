"""Bad words and allowed tokens, held against transformers' logits processors, with every sampler."""

import gc
import random
import time
import weakref

import numpy as np
import pytest
import torch
from transformers.generation.logits_process import NoBadWordsLogitsProcessor

import compiled
from worker_svc.bad_words import NOT_NEEDED, BadWords, bad_words_of
from worker_svc.compiled_sampler import CompiledSampler
from worker_svc.executor import Sampler
from worker_svc.gpu.sampling import bad_word_columns
from worker_svc.sampler import SamplingState, sample_tokens
from worker_svc.sequences import Sequence
from worker_svc.step import NewSequence, SamplingParams

VOCAB = 5
SAMPLERS = ["torch", "compiled"]


def sampler_of(kind: str) -> Sampler:
    return sample_tokens if kind == "torch" else CompiledSampler(compiled.thread_pool())


def reference(words: list[list[int]], output: list[int]) -> set[int]:
    """The tokens that transformers bars. It bars a word only after at least as many tokens as the word has."""
    processor = NoBadWordsLogitsProcessor(words)
    logits = processor(torch.tensor([[VOCAB] * 4 + output]), torch.zeros(1, VOCAB + 1))
    return set(logits[0].isinf().nonzero().flatten().tolist())


def test_barred_tokens_are_those_of_transformers() -> None:
    rng = random.Random(5)
    for _ in range(200):
        words = [[rng.randrange(VOCAB) for _ in range(rng.randint(1, 3))] for _ in range(rng.randint(1, 4))]
        output = [rng.randrange(VOCAB) for _ in range(rng.randint(0, 5))]
        bad_words = BadWords(words)
        expected = reference(words, output)
        assert set(bad_words.completing(output)) == expected
        assert {token for token, _ in bad_words.candidates(output)} == expected
        if output:
            late = bad_words.candidates([*output[:-1], -1])
            assert {token for token, last in late if last in (NOT_NEEDED, output[-1])} == expected


@pytest.mark.parametrize("kind", SAMPLERS)
def test_no_output_has_a_bad_word_and_the_prompt_does_not_count(kind: str) -> None:
    words = ((1, 2), (3,), (0, 0, 4))
    params = SamplingParams(temperature=1.0, seed=3, bad_words=words, min_tokens=4, suppressed_token_ids=(4,))
    prompt = np.array([2, 1], np.int32)
    state = SamplingState(params, 0, prompt, len(prompt))
    output: list[int] = []
    for _ in range(400):
        (token,) = sampler_of(kind)(torch.zeros(1, VOCAB), [state]).tokens
        assert token is not None
        assert token not in reference([list(word) for word in words], output)
        assert token != 4 or len(output) >= 4
        state.add(token)
        output.append(token)
    assert set(output) == {0, 1, 2, 4}
    # The word (1, 2) may begin in the prompt, whose last token is 1.
    first = {
        sampler_of(kind)(
            torch.zeros(1, VOCAB),
            [SamplingState(SamplingParams(temperature=1.0, seed=seed, bad_words=words), 0, prompt, 2)],
        ).tokens[0]
        for seed in range(64)
    }
    assert first == {0, 1, 2, 4}


@pytest.mark.parametrize("kind", SAMPLERS)
def test_a_draft_that_completes_a_bad_word_is_refused(kind: str) -> None:
    params = SamplingParams(bad_words=((1, 2),))
    state = SamplingState(params, 0, np.array([0], np.int32), 1)
    logits = torch.zeros(3, VOCAB)
    logits[0, 1] = logits[1, 2] = logits[2, 3] = 9.0
    logits[1, 3] = 4.0
    assert sampler_of(kind)(logits, state.ahead([1, 2])).tokens == [1, 3, 3]


@pytest.mark.parametrize("kind", SAMPLERS)
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_only_allowed_tokens_are_sampled(kind: str, temperature: float) -> None:
    torch.manual_seed(0)
    logits = torch.randn(80, VOCAB) * 3
    params = [
        SamplingParams(temperature=temperature, seed=row, allowed_token_ids=(1, 3) if row % 2 else ())
        for row in range(len(logits))
    ]
    states = [SamplingState(one, 0, np.array([0], np.int32), 1) for one in params]
    tokens = sampler_of(kind)(logits.clone(), states).tokens
    kept = logits.clone()
    kept[:, [0, 2, 4]] = float("-inf")
    assert set(tokens[1::2]) == {1, 3}
    assert set(tokens[::2]) == set(range(VOCAB))
    if temperature == 0.0:
        assert tokens[1::2] == kept.argmax(-1).tolist()[1::2]


@pytest.mark.parametrize("kind", SAMPLERS)
def test_a_row_without_an_allowed_token_has_none(kind: str) -> None:
    params = SamplingParams(allowed_token_ids=(1, 3), bad_words=((3,),), min_tokens=1, suppressed_token_ids=(1,))
    state = SamplingState(params, 0, np.array([0], np.int32), 1)
    assert sampler_of(kind)(torch.zeros(1, VOCAB), [state]).tokens == [None]


@pytest.mark.parametrize("kind", SAMPLERS)
def test_requested_log_probabilities_are_of_the_models_own_logits(kind: str) -> None:
    torch.manual_seed(1)
    logits = torch.randn(3, 257) * 4
    params = [
        SamplingParams(logprobs=2, logprob_token_ids=(7, 250, 7), temperature=0.5, seed=1, logit_bias={7: 5.0}),
        SamplingParams(logprobs=1),
        SamplingParams(logprobs=0, logprob_token_ids=(3,)),
    ]
    states = [SamplingState(one, 0, np.array([0], np.int32), 1) for one in params]
    expected = logits.double().log_softmax(-1)
    for row, reported in enumerate(sampler_of(kind)(logits.clone(), states).logprobs):
        assert reported is not None
        ids = list(params[row].logprob_token_ids)
        assert list(reported.requested) == pytest.approx(expected[row, ids].tolist(), abs=1e-5)
        assert len(reported.top) == params[row].logprobs


def test_columns_name_the_row_of_a_token_that_is_not_known_yet() -> None:
    words = ((1, 2), (3,), (0, 1, 4))
    sequence = Sequence(NewSequence(0, [0, 0, 0, 1], 2, 0, SamplingParams(bad_words=words)))
    other = Sequence(NewSequence(1, [0, 0], 2, 0, SamplingParams()))

    def columns(*drafts: list[int]) -> set[tuple[int, ...]]:
        found = bad_word_columns([other, sequence], drafts)
        assert found is not None
        return set(zip(*(getattr(found, name).tolist() for name in found.__slots__), strict=True))

    assert columns() == {(1, 2, -1, 0), (1, 3, -1, 0), (1, 4, -1, 0)}
    assert columns([2], [0, 1]) == {
        *{(2, 2, -1, 0), (2, 3, -1, 0), (2, 4, -1, 0)},
        (3, 3, -1, 0),
        *{(4, 2, -1, 0), (4, 3, -1, 0), (4, 4, -1, 0)},
    }
    sequence.append_placeholder(-6)
    assert columns() == {(1, 3, -1, 0), (1, 2, 5, 1)}
    assert bad_word_columns([other]) is None
    assert BadWords([]).candidates([]).tolist() == []
    assert BadWords([[4]]).candidates([-1]).tolist() == [[4, NOT_NEEDED]]


def test_columns_of_thousands_of_words_take_little_longer_than_those_of_one() -> None:
    def seconds(num_words: int) -> float:
        params = SamplingParams(bad_words=tuple((token, token + 1) for token in range(num_words)))
        sequences = [Sequence(NewSequence(place, [0, 0], 1, place, params)) for place in range(128)]
        for sequence in sequences:
            sequence.append_placeholder(-1)
        took = []
        for _ in range(5):
            started = time.thread_time()
            found = bad_word_columns(sequences)
            took.append(time.thread_time() - started)
        assert found is not None
        assert len(found.rows) == 128 * num_words
        return min(took)

    assert seconds(2048) < 80 * seconds(1)


def test_words_are_kept_while_a_sequence_has_them() -> None:
    words = ((1, 2), (3,))
    ours = bad_words_of(words)
    assert bad_words_of(((1, 2), (3,))) is ours
    is_kept = weakref.ref(ours)
    del ours
    gc.collect()
    assert is_kept() is None
