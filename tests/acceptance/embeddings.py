"""Vectors of all-MiniLM-L6-v2 beside those of sentence-transformers, for texts of all lengths around a border.

    python -m tests.acceptance.embeddings

sentence-transformers has an environment of its own, with pinned packages, made on first use. Quire runs as `make run`
starts it, with the compiled kernels and with torch. A text beyond the context is refused, or cut as asked.

The last line is JSON: the largest difference of a number, by kernels and dtype. The exit status is 1 if one in float32
is above 1e-3, or a text that is too long has another answer.
"""

import json
import random
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import httpx

from benchmarks.embeddings.environments import model_directory
from benchmarks.embeddings.systems import SENTENCE_TRANSFORMERS
from deployment import deployment

# Each is one token of the model.
_WORDS = ("house", "river", "the", "green", "under", "morning", "seven", "walked", "quiet", "stone", "letter", "music")
_LENGTHS = (0, 1, 2, 13, 14, 15, 16, 17, 30, 31, 62, 63, 126, 253, 254)
"""Words of texts; the tokenizer adds two tokens. The context has 256."""
_TOO_LONG = 300
_BOUND = 1e-3
_RUNS = (("compiled", "float32"), ("torch", "float32"), ("compiled", "bfloat16"))
_TIMEOUT = 120  # seconds


def make_text(num_words: int) -> str:
    """A text of so many tokens beside the special ones."""
    rng = random.Random(num_words)
    return " ".join(rng.choice(_WORDS) for _ in range(num_words)) or " "


def reference(texts: Sequence[str]) -> list[list[float]]:
    """The vectors of sentence-transformers, which cuts texts to the context."""
    with SENTENCE_TRANSFORMERS.running() as process:
        vectors: list[list[float]] = process.encode([texts])["vectors"]
    return vectors


def check(url: str, texts: Sequence[str], expected: Sequence[Sequence[float]]) -> tuple[float, list[str]]:
    """The largest difference of a number, and what was wrong."""
    errors = []
    with httpx.Client(base_url=url, trust_env=False, timeout=_TIMEOUT) as client:

        def post(**body: Any) -> httpx.Response:
            return client.post("/v1/embeddings", json={"model": "minilm", **body})

        answer = post(input=list(texts), truncate_prompt_tokens=-1).raise_for_status().json()
        refused = post(input=texts[-1])
        if refused.status_code != httpx.codes.BAD_REQUEST or "256" not in refused.text:
            errors.append(f"a text beyond the context: {refused.status_code} {refused.text}")
    differences = [
        abs(found - wanted)
        for row, vector in zip(answer["data"], expected, strict=True)
        for found, wanted in zip(row["embedding"], vector, strict=True)
    ]
    return max(differences), errors


def run(directory: Path) -> tuple[dict[str, float], list[str]]:
    """The largest difference of each run, and what was wrong."""
    texts = [make_text(length) for length in (*_LENGTHS, _TOO_LONG)]
    expected = reference(texts)
    found, errors = {}, []
    for kernels, dtype in _RUNS:
        settings = {"model": str(directory), "served_model_name": "minilm", "kernels": kernels, "dtype": dtype}
        with deployment(**settings) as running:
            difference, wrong = check(running.http, texts, expected)
        found[f"{kernels}, {dtype}"] = difference
        errors += [f"{kernels}, {dtype}: {error}" for error in wrong]
        if dtype == "float32" and difference > _BOUND:
            errors.append(f"{kernels}, {dtype}: a number differs by {difference}")
    return found, errors


def main() -> None:
    differences, errors = run(model_directory())
    for error in errors:
        print(error)
    print(json.dumps({"differences": differences, "errors": len(errors)}))
    sys.exit(1 if errors else 0)


if __name__ == "__main__":
    main()
