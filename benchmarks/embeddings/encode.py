"""Computes texts by sentence-transformers. It runs in an environment of that package, without Quire.

    python encode.py MODEL_DIRECTORY

Prints a line of JSON with the package's version once the model is loaded. Then, for each line of JSON on standard input
{"batches": [[text, ...], ...]}, one with the seconds of each batch and the vectors of the last: {"seconds", "vectors"}.
"""

import json
import sys
import time

import sentence_transformers
from sentence_transformers import SentenceTransformer


def main() -> None:
    model = SentenceTransformer(sys.argv[1], device="cpu")
    model.encode(["hello"])
    print(json.dumps({"version": sentence_transformers.__version__}), flush=True)
    for line in sys.stdin:
        seconds = []
        for batch in json.loads(line)["batches"]:
            started = time.perf_counter()
            vectors = model.encode(batch, show_progress_bar=False)
            seconds.append(time.perf_counter() - started)
        print(json.dumps({"seconds": seconds, "vectors": vectors.tolist()}), flush=True)


if __name__ == "__main__":
    main()
