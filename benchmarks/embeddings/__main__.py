"""Measures the rate of embeddings beside sentence-transformers and infinity-emb (`make bench-embeddings`).

    python -m benchmarks.embeddings [--model encoder] [--runs 3] [--scale 1.0] [--systems quire-float32] [--output FILE]

The model is all-MiniLM-L6-v2, an encoder, or the default model, a decoder, which embeds by its last token. Texts are
short, of about 16 tokens, or long, of about 200. A batch of 1, 8 or 32 of them is one request or call, and the next one
is sent when it is answered. Libraries are measured in processes of their own. With the encoder, Quire's server is
measured beside infinity-emb's too, and 32 clients send single texts to both. Systems take turns, and each is started
for each run. Packages are pinned, in environments in build/benchmarks, made on first use.
"""

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

from benchmarks.embeddings.environments import DECODER, ENCODER
from benchmarks.embeddings.report import embeddings_table, targets
from benchmarks.embeddings.systems import SYSTEMS, SYSTEMS_WITH_DECODER, EmbeddingSystem, RunningSystem
from benchmarks.environments import python_with, version_of
from benchmarks.record import RESULTS, provenance
from benchmarks.runner import failures_exit, in_turns, log, make_parser, publish
from benchmarks.texts import write_text

RESULT = RESULTS / "embeddings.json"
DECODER_RESULT = RESULTS / "embeddings_of_decoder.json"
_WORDS = {"short": (4, 9), "long": (160, 180)}
"""Of a text; tokens are more, and each text has an opening beside them."""


@dataclass(frozen=True)
class Load:
    """Batches of equal size, some of them at a time. `num_batches` is for one run at scale 1."""

    length: str
    batch_size: int
    num_batches: int
    concurrency: int = 1

    @property
    def name(self) -> str:
        """As results have it."""
        clients = f", {self.concurrency} clients" if self.concurrency > 1 else ""
        return f"{self.length}, batch of {self.batch_size}{clients}"

    def batches(self, rng: random.Random, scale: float) -> list[list[str]]:
        """Texts that differ."""
        fewest, most = _WORDS[self.length]
        num_batches = max(self.concurrency, round(self.num_batches * scale))
        texts = [
            write_text(rng, 100 + number, rng.randint(fewest, most)) for number in range(num_batches * self.batch_size)
        ]
        return [texts[start : start + self.batch_size] for start in range(0, len(texts), self.batch_size)]


LOADS = (
    *(Load("short", size, count) for size, count in ((1, 300), (8, 120), (32, 60))),
    *(Load("long", size, count) for size, count in ((1, 120), (8, 30), (32, 10))),
    Load("short", 1, 1000, concurrency=32),
    Load("long", 1, 200, concurrency=32),
)


def measure(system: EmbeddingSystem, running: RunningSystem, run: int, scale: float) -> Iterator[tuple[Load, float]]:
    """Each load that a system can have, and its rate in texts per second. The same run has the same texts in each."""
    for load in LOADS:
        if load.concurrency > 1 and not system.is_server:
            continue
        rng = random.Random(f"{run} {load.name}")
        batches = load.batches(rng, scale)
        running.seconds(load.batches(rng, 0.1 * scale), load.concurrency)  # not counted
        rate = sum(map(len, batches)) / running.seconds(batches, load.concurrency)
        log(f"run {run}, {system.title}, {load.name}: {rate:.0f} texts/s")
        yield load, rate


def summarize(rates: dict[tuple[str, str], list[float]], systems: Sequence[EmbeddingSystem]) -> list[dict[str, Any]]:
    """The medians of each load that one of the systems had, by system."""
    return [
        {
            "load": load.name,
            "texts_per_second": {
                system.name: median(found) for system in systems if (found := rates.get((load.name, system.name)))
            },
        }
        for load in LOADS
        if any((load.name, system.name) in rates for system in systems)
    ]


def main() -> None:
    parser = make_parser(__doc__, RESULT, ", if all systems are measured")
    parser.add_argument("--model", choices=("encoder", "decoder"), default="encoder", help="default: %(default)s")
    parser.add_argument("--systems", help="by their names; default: all that have the model")
    parser.add_argument("--runs", type=int, default=3, help="runs of each system; default %(default)s")
    parser.add_argument(
        "--scale", type=float, help="factor of the numbers of batches; default 1 with the encoder, 0.1 with the decoder"
    )
    options = parser.parse_args()
    is_encoder = options.model == "encoder"
    model, path = (ENCODER, RESULT) if is_encoder else (DECODER, DECODER_RESULT)
    known = {system.name: system for system in (SYSTEMS if is_encoder else SYSTEMS_WITH_DECODER)}
    wanted = options.systems.split(",") if options.systems else list(known)
    scale = options.scale or model.scale
    if unknown := [name for name in wanted if name not in known]:
        parser.error(f"argument --systems: no system named {unknown[0]!r}")
    systems = [known[name] for name in wanted]
    with failures_exit("embeddings"):
        # Made before anything is measured.
        model.directory()
        if "infinity" in wanted:
            python_with("infinity")
        rates: dict[tuple[str, str], list[float]] = {}
        for run, system in in_turns(systems, options.runs):
            with system.running() as running:
                for load, rate in measure(system, running, run, scale):
                    rates.setdefault((load.name, system.name), []).append(rate)
        result: dict[str, Any] = {
            **provenance("torch", "transformers"),
            "runs": options.runs,
            "scale": scale,
            "versions": {
                "sentence-transformers": version_of("sentence-transformers", "sentence-transformers"),
                **({"infinity-emb": version_of("infinity", "infinity-emb")} if is_encoder else {}),
            },
            "systems": {system.name: system.title for system in systems},
            "cases": summarize(rates, systems),
        }
        result["targets"] = targets(result)
    output = options.output or (path if wanted == list(known) else None)
    publish(result, output, {"Texts per second": embeddings_table(result)})


if __name__ == "__main__":
    main()
