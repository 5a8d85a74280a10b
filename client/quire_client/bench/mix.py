"""The requests of a load: prompts and output lengths, read from a file or made from a seed."""

import json
import math
import random
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import cycle, islice
from pathlib import Path
from typing import Any

PROMPT_TOKENS = (16, 800)
OUTPUT_TOKENS = (16, 256)

# Ids below are control characters and special tokens in many vocabularies.
_FIRST_ORDINARY_ID = 1_000
_COMMON_VOCAB_SIZE = 20_000
"""Ids below this are words in the vocabularies of all common language models."""


@dataclass(frozen=True, slots=True)
class MixRequest:
    """A prompt, and the exact number of tokens to generate."""

    prompt_token_ids: tuple[int, ...]
    output_tokens: int


class MixError(Exception):
    """A mix file that cannot be used. The text names file and problem."""


def log_uniform(rng: random.Random, low: int, high: int) -> int:
    """A length between `low` and `high`, both included, whose logarithm is uniform."""
    return round(math.exp(rng.uniform(math.log(low), math.log(high))))


def sample_lengths(seed: int, count: int) -> list[tuple[int, int]]:
    """Prompt and output lengths in tokens, log-uniform within PROMPT_TOKENS and OUTPUT_TOKENS."""
    rng = random.Random(seed)
    return [(log_uniform(rng, *PROMPT_TOKENS), log_uniform(rng, *OUTPUT_TOKENS)) for _ in range(count)]


def sample_mix(seed: int, count: int, vocab_size: int | None) -> list[MixRequest]:
    """Requests of `sample_lengths`, of random token ids; without `vocab_size`, of ids that all vocabularies have."""
    size = vocab_size or _COMMON_VOCAB_SIZE
    ids = range(_FIRST_ORDINARY_ID if size > 2 * _FIRST_ORDINARY_ID else 0, size)
    rng = random.Random(f"{seed} tokens")
    return [
        MixRequest(tuple(rng.choices(ids, k=prompt_tokens)), output_tokens)
        for prompt_tokens, output_tokens in sample_lengths(seed, count)
    ]


def read_mix(path: Path) -> list[MixRequest]:
    """Requests of a mix file, in its order.

    The file is JSON: {"requests": [{"prompt_token_ids": [int, …], "output_tokens": int}, …]}, and other keys are
    ignored. Raises MixError.
    """
    try:
        requests = json.loads(path.read_bytes())["requests"]
        mix = [_read_request(entry) for entry in requests]
    except OSError as error:
        raise MixError(f"{path}: {(error.strerror or 'cannot be read').lower()}") from error
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise MixError(f'{path}: not a mix: {{"requests": [{{"prompt_token_ids", "output_tokens"}}]}}') from error
    if not mix:
        raise MixError(f"{path}: holds no requests")
    return mix


def take(mix: Sequence[MixRequest], count: int | None) -> list[MixRequest]:
    """The first `count` requests, repeated where there are fewer; all of them where it is None."""
    return list(islice(cycle(mix), len(mix) if count is None else count))


def _read_request(entry: Any) -> MixRequest:
    ids, output_tokens = entry["prompt_token_ids"], entry["output_tokens"]
    whole = all(type(number) is int and number >= 0 for number in [*ids, output_tokens])
    if not ids or not whole or output_tokens < 1:
        raise ValueError
    return MixRequest(tuple(ids), output_tokens)
