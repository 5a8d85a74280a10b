"""The requests that clients send, and the checks of their responses."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Any

from reference import NEW_TOKENS, Reference
from tests.chaos.histories import Expected

_SAMPLED_TOKENS = 120
PRIORITIES = (0, 1, -1)
DEADLINE = 8.0
"""Seconds: enough for most requests between two faults, and too few for some."""


class Protocol(StrEnum):
    """The API that a case uses."""

    GRPC = "grpc"
    HTTP = "http"


@dataclass(frozen=True)
class Case:
    """A request. `options` are options of the Python client; the HTTP API has the same names."""

    name: str
    protocol: Protocol
    prompt: tuple[int, ...]
    options: Mapping[str, Any]
    reference: Reference
    """The greedy continuation of the prompt by transformers."""
    deadline: float | None = None
    """In seconds. The request may end by it."""
    is_named: bool = True
    """Without a name, a request may end where its connection or its gateway does."""

    @property
    def is_greedy(self) -> bool:
        """Whether the tokens equal those of the reference."""
        return bool(self.options.get("temperature") == 0)

    @property
    def is_beam_search(self) -> bool:
        """Whether the response comes at once, at the end."""
        return "beam_width" in self.options

    @property
    def may_end_early(self) -> bool:
        """Whether a fault, or a slow machine, may end the request."""
        return self.deadline is not None or not self.is_named

    def that_ends(self) -> "Case":
        """The same request, with a name and all the time that it needs."""
        return replace(self, deadline=None, is_named=True)


Detokenize = Callable[[Sequence[int]], str]


def make_cases(references: Sequence[Reference], detokenize: Detokenize, is_small: bool) -> list[Case]:
    """Requests of every kind over both protocols; with `is_small`, one of each kind.

    Only references without ties are used, because their continuation is unique. The prompts of `references` alternate
    between text and random tokens.
    """
    greedy = {"temperature": 0, "max_tokens": NEW_TOKENS, "ignore_eos": True}
    beams = {"beam_width": 3, "n": 2, "max_tokens": NEW_TOKENS, "ignore_eos": True}
    sampled = {"temperature": 0.9, "top_p": 0.95, "max_tokens": _SAMPLED_TOKENS, "ignore_eos": True}
    found: list[Case] = []

    def add(kind: str, protocol: Protocol, index: int, options: Mapping[str, Any], **more: Any) -> None:
        reference = reference_without_ties(references, index)
        found.append(Case(f"{protocol}-{kind}-{index}", protocol, reference.prompt, options, reference, **more))

    for protocol, num_cases in ((Protocol.GRPC, 14), (Protocol.HTTP, 6)):
        for index in range(1 if is_small else num_cases):
            add("greedy", protocol, 3 * index + 12, greedy | {"priority": PRIORITIES[index % len(PRIORITIES)]})
        for index in range(1 if is_small else 2):
            text_index = 2 * (9 + index)  # prompts with an even index are text, so the continuation is text
            stop = stop_string(text_after(reference_without_ties(references, text_index), detokenize))
            add("two", protocol, text_index + 4, greedy | {"n": 2})
            add("stop", protocol, text_index, greedy | {"stop": [stop]})
            add("logprobs", protocol, text_index + 6, greedy | {"logprobs": 2})
            add("sampled", protocol, text_index + 8, sampled | {"seed": 100 + index})
            # At each token the output so far says which tokens may follow. No text that matches ends before max_tokens.
            add(
                "regex",
                protocol,
                text_index + 9,
                sampled | {"regex": "[a-z ]{4000}", "seed": 200 + index, "ignore_eos": False},
            )
            penalties = {"presence_penalty": 0.4, "frequency_penalty": 0.2, "n": 2, "logprobs": 0, "seed": 7 + index}
            add("penalized", protocol, text_index + 10, sampled | penalties)
            add("unnamed", protocol, text_index + 12, greedy, is_named=False)
            if protocol is Protocol.GRPC:
                add("deadline", protocol, text_index + 14, greedy, deadline=DEADLINE)
                add("beams", protocol, text_index + 2, beams)
    return found


def reference_without_ties(references: Sequence[Reference], index: int) -> Reference:
    """The first reference without ties at or after `index`, of the same kind (text or random tokens). Wraps around."""
    indices = range(index, index + len(references), 2)
    return next(one for i in indices if not (one := references[i % len(references)]).ties)


def text_after(reference: Reference, detokenize: Detokenize) -> str:
    """The text of the continuation."""
    return detokenize((*reference.prompt, *reference.tokens))[len(detokenize(reference.prompt)) :]


def stop_string(text: str) -> str:
    """Six characters, at three fifths of a text."""
    middle = len(text) * 3 // 5
    return text[middle : middle + 6]


def verify(case: Case, expected: Expected, detokenize: Detokenize) -> None:
    """Raises AssertionError if a response in a run without faults is not that of transformers.

    For sampled cases only the number of sequences and the usage are checked.
    """
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
    continuation = text_after(case.reference, detokenize)
    wanted = continuation.partition(stops[0])[0] if stops else continuation
    for sequence in expected.sequences.values():
        assert sequence.text == wanted, f"{case.name}: {sequence.text!r} instead of {wanted!r}"
        if case.protocol is Protocol.GRPC:
            # A stop string may end within a token.
            tokens = case.reference.tokens[: len(sequence.items)] if stops else case.reference.tokens
            assert sequence.items == tokens, f"{case.name}: {sequence.items} instead of {tokens}"
