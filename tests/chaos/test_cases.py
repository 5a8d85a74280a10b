"""Each case has one correct response, that of transformers."""

from collections.abc import Sequence

import pytest

from reference import NEW_TOKENS, Reference
from tests.chaos.cases import Case, Protocol, make_cases, verify
from tests.chaos.histories import Expected, Usage
from tests.chaos.histories import Sequence as Answer

TIED = frozenset({5})


def reference(index: int) -> Reference:
    """A reference; every third one has a tie."""
    tokens = tuple(100 * index + offset for offset in range(NEW_TOKENS))
    return Reference((index,), tokens, frozenset() if index % 3 else TIED)


REFERENCES = [reference(index) for index in range(40)]


def detokenize(token_ids: Sequence[int]) -> str:
    return "".join(chr(0x1000 + token_id) for token_id in token_ids)


@pytest.mark.parametrize("is_small", [True, False])
def test_no_case_has_a_tie(is_small: bool) -> None:
    cases = make_cases(REFERENCES, detokenize, is_small)
    assert {case.protocol for case in cases} == set(Protocol)
    assert not any(case.reference.ties for case in cases)


def case(protocol: Protocol, **options: object) -> Case:
    greedy = {"temperature": 0, "max_tokens": NEW_TOKENS}
    return Case("case", protocol, (1,), greedy | options, REFERENCES[1])


def answer(num_tokens: int = NEW_TOKENS, text: str | None = None, prompt_tokens: int = 1) -> Expected:
    tokens = REFERENCES[1].tokens[:num_tokens]
    sequence = Answer(tokens, detokenize(tokens) if text is None else text, (), "length")
    return Expected({0: sequence}, Usage(prompt_tokens, num_tokens))


@pytest.mark.parametrize("protocol", Protocol)
def test_the_response_of_transformers_is_accepted_and_no_other(protocol: Protocol) -> None:
    verify(case(protocol), answer(), detokenize)
    wrong = [answer(text="else"), answer(NEW_TOKENS - 1), answer(prompt_tokens=2)]
    for other in wrong:
        with pytest.raises(AssertionError, match="case: "):
            verify(case(protocol), other, detokenize)


def test_a_stop_string_ends_the_text_before_it() -> None:
    stop = detokenize(REFERENCES[1].tokens[30:32])
    until = detokenize(REFERENCES[1].tokens[:30])
    verify(case(Protocol.GRPC, stop=[stop]), answer(32, until), detokenize)
    with pytest.raises(AssertionError, match="case: "):
        verify(case(Protocol.GRPC, stop=[stop]), answer(32, until + stop), detokenize)
