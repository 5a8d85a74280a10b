"""Computes texts by a library, in its own process and without a server.

    python encode.py {sentence-transformers,quire} {float32,bfloat16} MODEL_DIRECTORY

It runs in an environment of that library: the other one need not be there.

Prints a line of JSON with the library's version once the model is loaded. Then, for each line of JSON on standard input
{"batches": [[text, ...], ...]}, one with the seconds of each batch and the vectors of the last: {"seconds", "vectors"}.
"""

import json
import sys
import time
from collections.abc import Callable
from importlib.metadata import version
from typing import Any

Encode = Callable[[list[str]], list[Any]]
"""Returns the vector of each text."""


def sentence_transformers(directory: str, dtype: str) -> Encode:
    import torch
    from sentence_transformers import SentenceTransformer

    model = SentenceTransformer(directory, device="cpu", model_kwargs={"torch_dtype": getattr(torch, dtype)})
    if model.tokenizer.pad_token is None:
        model.tokenizer.pad_token = model.tokenizer.eos_token
    return lambda texts: list(model.encode(texts, show_progress_bar=False))


def quire(directory: str, dtype: str) -> Encode:
    from quire import LLM

    llm = LLM(directory, dtype=dtype)
    return lambda texts: [output.outputs.embedding for output in llm.embed(texts, use_tqdm=False)]


LIBRARIES = {"sentence-transformers": sentence_transformers, "quire": quire}


def main() -> None:
    library, dtype, directory = sys.argv[1:]
    encode = LIBRARIES[library](directory, dtype)
    encode(["hello"])
    print(json.dumps({"version": version(library)}), flush=True)
    for line in sys.stdin:
        seconds, vectors = [], []
        for batch in json.loads(line)["batches"]:
            started = time.perf_counter()
            vectors = encode(batch)
            seconds.append(time.perf_counter() - started)
        print(json.dumps({"seconds": seconds, "vectors": [list(map(float, vector)) for vector in vectors]}), flush=True)


if __name__ == "__main__":
    main()
