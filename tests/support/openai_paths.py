"""Paths of OpenAI's API, which a gateway serves with and without /v1."""

import re

_OF_OPENAI = re.compile(r"/v1/(models|completions|chat|embeddings|responses)\b.*")


def is_of_openai(path: str) -> bool:
    """Whether a path with /v1 is also served without it."""
    return _OF_OPENAI.fullmatch(path) is not None
