"""The text of a prompt, and the places of its tokens in it."""

import pytest

from gateway_svc.prompt_output import PromptOutput
from gateway_svc.validated_request import Echo, SpecialTokens
from gateway_values import KINDS, make_rendering, vocabulary_of
from quire.worker.v1 import worker_pb2 as worker_v1
from tiny_model import tiny_tokenizer


@pytest.mark.parametrize("special", [SpecialTokens.HIDDEN, SpecialTokens.KEPT])
@pytest.mark.parametrize("kind", KINDS)
def test_the_text_is_the_tokenizers_own(kind: str, special: SpecialTokens) -> None:
    tokenizer = KINDS[kind]()
    vocabulary = vocabulary_of(tokenizer)
    token_ids = [min(vocabulary.special_ids), *tokenizer.encode("a b ab", add_special_tokens=False).ids]
    rendering = make_rendering(vocabulary, prompt_token_ids=token_ids, special_tokens=special, echo=Echo.PRESENT)
    found = PromptOutput.of(rendering, [], vocabulary)
    assert found.text == tokenizer.decode(token_ids, skip_special_tokens=special is SpecialTokens.HIDDEN)
    assert found.token_ids == tuple(token_ids)
    assert len(found.text_offsets) == len(token_ids)
    assert list(found.text_offsets) == sorted(found.text_offsets)
    assert found.logprobs == ()


def test_log_probabilities_begin_with_the_second_token() -> None:
    vocabulary = vocabulary_of(KINDS["byte level"]())
    rendering = make_rendering(vocabulary, prompt_token_ids=[5, 6, 7], prompt_logprobs=1)
    top = [worker_v1.Logprob(token_id=8, logprob=-0.5), worker_v1.Logprob(token_id=9, logprob=-0.75)]
    logprobs = [worker_v1.TokenLogprobs(logprob=-1.5, top=top), worker_v1.TokenLogprobs(logprob=-2.5, top=top)]
    found = PromptOutput.of(rendering, logprobs, vocabulary)
    assert [(one.token_id, one.logprob, one.top) for one in found.logprobs] == [
        (6, -1.5, ((8, -0.5),)),
        (7, -2.5, ((8, -0.5),)),
    ]
    assert [one.text_offset for one in found.logprobs] == list(found.text_offsets[1:])


@pytest.mark.parametrize("special", [SpecialTokens.HIDDEN, SpecialTokens.KEPT])
def test_a_text_is_as_its_client_sent_it(special: SpecialTokens) -> None:
    tokenizer = tiny_tokenizer()
    vocabulary = vocabulary_of(tokenizer)
    text = "<|im_start|>a<|im_end|><|im_end|> b"
    of_text = tokenizer.encode(text, add_special_tokens=False).ids
    begins = [0, 12, 13, 23, 33, 34]
    # The tokenizer may add tokens around it.
    for before, after in ([], []), ([0], [2]):
        token_ids = [*before, *of_text, *after]
        rendering = make_rendering(vocabulary, prompt_token_ids=token_ids, special_tokens=special, echo=Echo.PRESENT)
        found = PromptOutput.of(rendering, [], vocabulary, text)
        assert found.text == text
        assert list(found.text_offsets) == [*([0] * len(before)), *begins, *([len(text)] * len(after))]


def test_a_text_that_stands_in_a_token_before_it_is_found_behind_that() -> None:
    tokenizer = tiny_tokenizer()
    vocabulary = vocabulary_of(tokenizer)
    token_ids = [0, *tokenizer.encode("<", add_special_tokens=False).ids]
    rendering = make_rendering(vocabulary, prompt_token_ids=token_ids, echo=Echo.PRESENT)
    found = PromptOutput.of(rendering, [], vocabulary, "<")
    assert (found.text, found.text_offsets) == ("<", (0, 0))


def test_a_text_that_a_normalizer_changes_is_as_its_client_sent_it() -> None:
    tokenizer = tiny_tokenizer()
    vocabulary = vocabulary_of(tokenizer)
    rendering = make_rendering(vocabulary, prompt_token_ids=tokenizer.encode("abcd").ids, echo=Echo.PRESENT)
    found = PromptOutput.of(rendering, [], vocabulary, "ABC")
    assert (found.text, found.text_offsets) == ("ABC", (0, 1, 2, 3))
