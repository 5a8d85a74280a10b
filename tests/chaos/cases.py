"""The requests that clients ask again and again, and what their answers must be."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from reference import NEW_TOKENS, Reference
from tests.chaos.histories import Expected

_SAMPLED_TOKENS = 120


class Protocol(StrEnum):
    """How a case is asked."""

    GRPC = "grpc"
    HTTP = "http"


@dataclass(frozen=True)
class Case:
    """A request. `options` are those of the Python client, by the names that the HTTP API has too."""

    name: str
    protocol: Protocol
    prompt: tuple[int, ...]
    options: Mapping[str, Any]
    reference: Reference
    """What transformers continues the prompt with, greedily."""

    @property
    def is_greedy(self) -> bool:
        """Its tokens are those of the reference, as far as they go."""
        return bool(self.options["temperature"] == 0)


Detokenize = Callable[[Sequence[int]], str]


def make_cases(references: Sequence[Reference], detokenize: Detokenize, is_small: bool) -> list[Case]:
    """Requests of every kind over both protocols; `is_small` leaves one of each kind.

    Of references, which alternate between text and random tokens, those are taken that have no ties: their continuation
    is the only right one.
    """
    greedy = {"temperature": 0, "max_tokens": NEW_TOKENS, "ignore_eos": True}
    sampled = {"temperature": 0.9, "top_p": 0.95, "max_tokens": _SAMPLED_TOKENS, "ignore_eos": True}
    found: list[Case] = []

    def add(kind: str, protocol: Protocol, place: int, options: Mapping[str, Any]) -> None:
        reference = clear_reference(references, place)
        found.append(Case(f"{protocol}-{kind}-{place}", protocol, reference.prompt, options, reference))

    for protocol, most in ((Protocol.GRPC, 14), (Protocol.HTTP, 6)):
        for place in range(1 if is_small else most):
            add("greedy", protocol, 3 * place + 12, greedy)
        for place in range(1 if is_small else 2):
            with_text = 2 * (9 + place)  # prompts at even places are text, so what follows is text
            stop = stop_string(text_after(clear_reference(references, with_text), detokenize))
            add("two", protocol, with_text + 4, greedy | {"n": 2})
            add("stop", protocol, with_text, greedy | {"stop": [stop]})
            add("logprobs", protocol, with_text + 6, greedy | {"logprobs": 2})
            add("sampled", protocol, with_text + 8, sampled | {"seed": 100 + place})
            penalties = {"presence_penalty": 0.4, "frequency_penalty": 0.2, "n": 2, "logprobs": 0, "seed": 7 + place}
            add("penalized", protocol, with_text + 10, sampled | penalties)
    return found


def clear_reference(references: Sequence[Reference], place: int) -> Reference:
    """The first without ties from a place on, in a circle, of those that are as it is: text, or random tokens."""
    places = range(place, place + len(references), 2)
    return next(one for at in places if not (one := references[at % len(references)]).ties)


def text_after(reference: Reference, detokenize: Detokenize) -> str:
    """The text of its continuation."""
    return detokenize((*reference.prompt, *reference.tokens))[len(detokenize(reference.prompt)) :]


def stop_string(text: str) -> str:
    """A few characters from beyond the middle of a text, across words."""
    middle = len(text) * 3 // 5
    return text[middle : middle + 6]


def verify(case: Case, expected: Expected, detokenize: Detokenize) -> None:
    """Raises AssertionError where an undisturbed answer is not what transformers says, as far as that can be known."""
    num_sequences = case.options.get("n", 1)
    found = sorted(expected.sequences)
    assert found == list(range(num_sequences)), f"{case.name}: sequences {found}"
    assert expected.usage.prompt_tokens == len(case.prompt), f"{case.name}: {expected.usage}"
    most_tokens = num_sequences * case.options["max_tokens"]
    stops = case.options.get("stop")
    if stops:
        assert 0 < expected.usage.completion_tokens < most_tokens, f"{case.name}: {expected.usage}"
    else:
        assert expected.usage.completion_tokens == most_tokens, f"{case.name}: {expected.usage}"
    if not case.is_greedy:
        return
    whole = text_after(case.reference, detokenize)
    right = whole.partition(stops[0])[0] if stops else whole
    for sequence in expected.sequences.values():
        assert sequence.text == right, f"{case.name}: {sequence.text!r} instead of {right!r}"
        if case.protocol is Protocol.GRPC:
            # A stop string may end within a token.
            tokens = case.reference.tokens[: len(sequence.items)] if stops else case.reference.tokens
            assert sequence.items == tokens, f"{case.name}: {sequence.items} instead of {tokens}"
