"""The load: no prompt has a prefix that the server has seen, and every system gets the same prompts."""

from itertools import combinations

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from benchmarks.serving.loads import comparison_loads, renewed, shared_prefix_requests, sweep_loads
from quire_client.bench.mix import MixRequest

MIX = [MixRequest((7, number, *range(10)), 5 + number) for number in range(4)]


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    """A token for each byte."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({letter: place for place, letter in enumerate(alphabet)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def test_a_renewed_mix_differs_in_the_first_tokens_alone() -> None:
    requests = renewed(MIX, 3, 4)
    assert [r.prompt_token_ids[1:] for r in requests] == [r.prompt_token_ids[1:] for r in MIX]
    assert [r.output_tokens for r in requests] == [r.output_tokens for r in MIX]
    assert {r.prompt_token_ids[0] for r in requests}.isdisjoint(r.prompt_token_ids[0] for r in MIX)


def test_no_two_prompts_of_a_repeated_mix_are_alike() -> None:
    requests = renewed(MIX, 0, 11)
    assert len({request.prompt_token_ids for request in requests}) == len(requests) == 11


def test_no_prompt_of_the_comparison_comes_twice(tokenizer: Tokenizer) -> None:
    loads = comparison_loads(MIX, tokenizer)
    firsts = [{request.prompt_token_ids[:8] for request in load.requests} for load in loads]
    assert all(a.isdisjoint(b) for a, b in combinations(firsts, 2))
    sizes = [(load.concurrency, len(load.requests)) for load in loads]
    assert sizes == [(32, 48), (1, 8), (8, 48), (32, 48), (48, 48), (64, 128), (16, 48)]
    assert len({load.name for load in loads}) == len(loads)


def test_a_quick_pass_sends_fewer(tokenizer: Tokenizer) -> None:
    assert {len(load.requests) for load in comparison_loads(MIX, tokenizer, 3)} == {3}


def test_no_prompt_of_the_sweep_comes_twice() -> None:
    loads = sweep_loads(MIX, [1, 2, 4])
    prompts = [request.prompt_token_ids for load in loads for request in load.requests]
    assert len(set(prompts)) == len(prompts) == 8 + 8 + 12


def test_requests_share_their_prefix_and_nothing_more(tokenizer: Tokenizer) -> None:
    requests = shared_prefix_requests(tokenizer, 6)
    first = requests[0].prompt_token_ids
    text = tokenizer.decode(first)
    prefix = len(tokenizer.encode(" ".join(text.split()[:800])).ids)
    assert len(text.split()) > 800
    assert {request.prompt_token_ids[:prefix] for request in requests} == {first[:prefix]}
    suffixes = [request.prompt_token_ids[prefix:] for request in requests]
    assert len(set(suffixes)) == 6
    assert all(16 <= len(suffix) <= 48 for suffix in suffixes)
    assert requests == shared_prefix_requests(tokenizer, 6)
