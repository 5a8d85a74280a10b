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

    @property
    def ties(self) -> frozenset[int]:
        """Places at which the next best token is right too."""
        return self.reference.ties if self.is_greedy else frozenset()


Detokenize = Callable[[Sequence[int]], str]


def make_cases(references: Sequence[Reference], detokenize: Detokenize, is_small: bool) -> list[Case]:
    """Requests of every kind over both protocols; `is_small` leaves one of each kind."""
    greedy = {"temperature": 0, "max_tokens": NEW_TOKENS, "ignore_eos": True}
    sampled = {"temperature": 0.9, "top_p": 0.95, "max_tokens": _SAMPLED_TOKENS, "ignore_eos": True}
    found: list[Case] = []

    def add(kind: str, protocol: Protocol, place: int, options: Mapping[str, Any]) -> None:
        reference = references[place % len(references)]
        found.append(Case(f"{protocol}-{kind}-{place}", protocol, reference.prompt, options, reference))

    for protocol, most in ((Protocol.GRPC, 14), (Protocol.HTTP, 6)):
        for place in range(1 if is_small else most):
            add("greedy", protocol, 3 * place + 12, greedy)
        for place in range(1 if is_small else 2):
            with_text = 2 * (9 + place)  # prompts at even places are text, so what follows is text
            stop = stop_string(text_after(references[with_text], detokenize))
            add("two", protocol, with_text + 4, greedy | {"n": 2})
            add("stop", protocol, with_text, greedy | {"stop": [stop]})
            add("logprobs", protocol, with_text + 6, greedy | {"logprobs": 2})
            add("sampled", protocol, with_text + 8, sampled | {"seed": 100 + place})
            penalties = {"presence_penalty": 0.4, "frequency_penalty": 0.2, "n": 2, "logprobs": 0, "seed": 7 + place}
            add("penalized", protocol, with_text + 10, sampled | penalties)
    return found


def text_after(reference: Reference, detokenize: Detokenize) -> str:
    """The text of its continuation."""
    return detokenize((*reference.prompt, *reference.tokens))[len(detokenize(reference.prompt)) :]


def stop_string(text: str) -> str:
    """A few characters from beyond the middle of a text, across words."""
    middle = len(text) * 3 // 5
    return text[middle : middle + 6]


def verify(case: Case, expected: Expected, detokenize: Detokenize) -> None:
    """Raises AssertionError where an undisturbed answer is not what transformers says, as far as that can be known."""
    assert set(expected) == set(range(case.options.get("n", 1))), f"{case.name}: sequences {sorted(expected)}"
    if not case.is_greedy:
        return
    whole = text_after(case.reference, detokenize)
    for sequence in expected.values():
        if stops := case.options.get("stop"):
            right = whole.partition(stops[0])[0]
            assert sequence.text == right or case.ties, f"{case.name}: {sequence.text!r} instead of {right!r}"
        elif case.protocol is Protocol.GRPC:
            case.reference.judge(tuple(int(str(item)) for item in sequence.items))
        else:
            assert sequence.text == whole or case.ties, f"{case.name}: {sequence.text!r} instead of {whole!r}"
