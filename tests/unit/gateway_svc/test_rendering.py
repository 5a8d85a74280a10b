"""Rendering options that gateways exchange through the scheduler."""

from typing import Any

import pytest

from gateway_svc.output import Chunk, TokenLogprob
from gateway_svc.rendering import Rendering
from gateway_svc.validated_request import BeamSearchParams, EarlyStopping, Echo, OnDisconnect, SpecialTokens, StopText
from gateway_values import make_generation, make_rendering, vocabulary_of
from quire.scheduler.v1 import scheduler_pb2 as scheduler_v1
from tiny_model import EOS, tiny_tokenizer

VOCABULARY = vocabulary_of(tiny_tokenizer())

CASES: list[dict[str, Any]] = [
    {},
    {"stop": ("ab", "c"), "min_tokens": 3, "stop_text": StopText.INCLUDED, "stop_token_ids": (9, 8)},
    {"special_tokens": SpecialTokens.KEPT, "prompt_token_ids": [5, 6, EOS, 7, 8, 9]},
    {"n": 2, "best_of": 5, "seed": -4},
    {"logprobs": 0, "logprob_token_ids": (3, 7)},
    {"special_tokens": SpecialTokens.JOINED},
    {"prompt_logprobs": 2, "prompt_token_ids": [5, 6, 7]},
    {"echo": Echo.PRESENT, "omits_output": True},
    {"logprobs": 3, "on_disconnect": OnDisconnect.DETACH, "request_id": "mine"},
]


@pytest.mark.parametrize("fields", CASES)
def test_any_gateway_renders_alike(fields: dict[str, Any]) -> None:
    generation = make_generation(**fields)
    rendering = Rendering.of(generation, VOCABULARY)
    submit = generation.to_proto(rendering.to_proto())
    attached = scheduler_v1.Attached(
        render_options=submit.render_options,
        prompt_length=len(submit.prompt_token_ids),
        detachable=submit.detachable,
        seed=submit.sampling.seed,
        num_sequences=submit.n,
        prompt_token_ids=rendering.prompt_token_ids,
    )
    assert Rendering.from_proto(scheduler_v1.Attached.FromString(attached.SerializeToString())) == rendering


def test_the_tail_of_a_prompt_is_what_is_seen_of_it() -> None:
    prompt = [5, 6, 7, EOS, 8, EOS, 9]
    assert make_rendering(VOCABULARY, prompt_token_ids=prompt).prompt_tail == (6, 7, 8, 9)
    kept = make_rendering(VOCABULARY, prompt_token_ids=prompt, special_tokens=SpecialTokens.KEPT)
    assert kept.prompt_tail == (EOS, 8, EOS, 9)
    assert make_rendering(VOCABULARY, prompt_token_ids=[EOS]).prompt_tail == ()


def digest(**fields: Any) -> bytes:
    generation = make_generation(**fields)
    return generation.to_proto(Rendering.of(generation, VOCABULARY).to_proto()).body_digest


def test_the_digest_depends_on_the_body() -> None:
    search = BeamSearchParams(2, 1.0, EarlyStopping.HEURISTIC)
    others = [*CASES[1:8], {"seed": 8}, {"prompt_token_ids": [6]}, {"beam_search": search, "n": 2}, {"logprobs": 1}]
    assert len({digest(**fields) for fields in [{}, *others]}) == len(others) + 1
    assert len(digest()) == 32


def test_what_a_client_calls_its_request_makes_it_no_other() -> None:
    assert digest(request_id="a") == digest(request_id="b")


@pytest.mark.parametrize("num_top", [0, 20, 128])
def test_a_chunk_of_the_longest_tokens_fits_a_message(num_top: int) -> None:
    """A client takes messages of 4 MiB unless it is set up otherwise."""
    rendering = make_rendering(
        VOCABULARY, logprobs=num_top, logprob_token_ids=(0, 1), special_tokens=SpecialTokens.KEPT
    )
    longest = max(range(3), key=lambda token: len(VOCABULARY.piece(token)))
    one = TokenLogprob(longest, -0.5, ((longest, -0.5),) * num_top, 0, ((longest, -0.5),) * 2)
    num_tokens = rendering.max_chunk_tokens(VOCABULARY)
    text = VOCABULARY.token_text(longest) * num_tokens
    chunk = Chunk(0, 0, text, [longest] * num_tokens, [one] * num_tokens)
    assert 2**18 < chunk.to_proto(VOCABULARY).ByteSize() < 4 * 2**20
