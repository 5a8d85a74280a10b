"""The loads of the comparison. No prompt begins like one that the same server has answered before."""

import random
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from tokenizers import Tokenizer

from benchmarks.texts import write_text, write_tokens
from quire_client.bench.mix import MixRequest, sample_mix

NUM_WARM_UPS = 2
PREFIX_WORDS = 800
SUFFIX_TOKENS = (16, 48)
SHARED_OUTPUT_TOKENS = 64

# From here on, ids are ordinary tokens in all common vocabularies.
_FIRST_MARK = 2_000


@dataclass(frozen=True)
class ServingLoad:
    """Requests, and how many of them are in flight at a time."""

    name: str
    title: str
    requests: tuple[MixRequest, ...]
    concurrency: int

    def describe(self) -> dict[str, Any]:
        """The load as a result holds it."""
        return {
            "title": self.title,
            "concurrency": self.concurrency,
            "num_requests": len(self.requests),
            "prompt_tokens": sum(len(request.prompt_token_ids) for request in self.requests),
            "output_tokens": sum(request.output_tokens for request in self.requests),
        }


def comparison_loads(mix: Sequence[MixRequest], tokenizer: Tokenizer, limit: int | None = None) -> list[ServingLoad]:
    """The loads of the comparison, each of at most `limit` requests, in the order that they are sent.

    The first one meets a server that has just started; the same comes again later, with other prompts.
    """
    counts = [(32, 48), (1, 8), (8, 48), (32, 48), (48, 48), (64, 128)]
    first, *loads = _mix_loads(mix, [(concurrency, min(count, limit or count)) for concurrency, count in counts])
    first = replace(first, name="mix-32-at-start", title=f"{first.title}, right after the start")
    shared = shared_prefix_requests(tokenizer, 48)[:limit]
    title = f"one prefix of {PREFIX_WORDS} words, 16 at a time"
    return [first, *loads, ServingLoad("shared-prefix", title, tuple(shared), 16)]


def sweep_loads(mix: Sequence[MixRequest], concurrencies: Sequence[int]) -> list[ServingLoad]:
    """The mix at each concurrency, three requests for each one in flight and at least eight."""
    return _mix_loads(mix, [(concurrency, max(8, 3 * concurrency)) for concurrency in concurrencies])


def _mix_loads(mix: Sequence[MixRequest], counts: Iterable[tuple[int, int]]) -> list[ServingLoad]:
    """A load for each concurrency and number of requests, no request twice."""
    loads: list[ServingLoad] = []
    place = 0
    for concurrency, count in counts:
        requests = renewed(mix, place, count)
        place += -(-count // len(mix))
        loads.append(ServingLoad(f"mix-{concurrency}", f"mix, {concurrency} at a time", requests, concurrency))
    return loads


def warm_up() -> list[MixRequest]:
    """Requests that are sent first and not measured."""
    return sample_mix(1, NUM_WARM_UPS, None)


def renewed(mix: Sequence[MixRequest], place: int, count: int) -> tuple[MixRequest, ...]:
    """`count` requests of the mix, repeated as needed, with another first token in each repetition.

    A prefix cache has none of their blocks, unless the same `place` was used before. Repetitions use the places behind
    it too.
    """
    renewals: list[MixRequest] = []
    while len(renewals) < count:
        mark = _FIRST_MARK + place
        renewals += [replace(request, prompt_token_ids=(mark, *request.prompt_token_ids[1:])) for request in mix]
        place += 1
    return tuple(renewals[:count])


def shared_prefix_requests(tokenizer: Tokenizer, count: int) -> list[MixRequest]:
    """Requests of one long prefix and a short suffix each; seed 0."""
    rng = random.Random("0 shared prefix")
    text = " ".join(write_text(rng, 900, PREFIX_WORDS).split()[:PREFIX_WORDS])
    prefix = tokenizer.encode(text, add_special_tokens=False).ids
    return [
        MixRequest((*prefix, *write_tokens(rng, tokenizer, 901 + i, rng.randint(*SUFFIX_TOKENS))), SHARED_OUTPUT_TOKENS)
        for i in range(count)
    ]
