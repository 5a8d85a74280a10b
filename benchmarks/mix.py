"""Writes mix.json: the requests that benchmarks of serving send, as token ids, so that every server gets the same ones.

    python -m benchmarks.mix

Lengths are log-uniform, seed 0. The text is generated, and no two prompts have the same beginning.
"""

import json
import random
from dataclasses import asdict
from pathlib import Path

from tokenizers import Tokenizer

from benchmarks.texts import write_tokens
from quire_client.bench.mix import MixRequest, sample_lengths
from svc_common.models import resolve_model

SEED = 0
NUM_REQUESTS = 48
PATH = Path(__file__).with_name("mix.json")


def main() -> None:
    model = resolve_model(None)
    tokenizer = Tokenizer.from_file(str(model.path / "tokenizer.json"))
    rng = random.Random(f"{SEED} text")
    requests = [
        MixRequest(tuple(write_tokens(rng, tokenizer, 101 + i, prompt_tokens)), output_tokens)
        for i, (prompt_tokens, output_tokens) in enumerate(sample_lengths(SEED, NUM_REQUESTS))
    ]
    lines = ",\n".join(json.dumps(asdict(request), separators=(",", ":")) for request in requests)
    PATH.write_text(f'{{"tokenizer":{json.dumps(model.name)},"seed":{SEED},"requests":[\n{lines}\n]}}\n')
    num_prompt = sum(len(request.prompt_token_ids) for request in requests)
    print(f"{PATH.name}: {len(requests)} requests, {num_prompt} prompt tokens")


if __name__ == "__main__":
    main()
