"""Measures the cost of grammars (`make bench-grammars`): the same steps with masks and without, in turns.

    python -m benchmarks.grammars [--rounds 100] [--output FILE]

This process loads the default model. Sequences decode together and are sampled: all of them with a grammar, or a half
of them, or none. A step returns when all are sampled, so with a half of them the cost is also that of the sequences
without a grammar. The grammar is that of a request with a JSON schema of objects, texts, numbers and enums, without an
end. Exits with 1 if it costs a step in which all 64 sequences have it more than 6 %.
"""

import json
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import count
from statistics import median
from typing import Any

from benchmarks.decoding import LONGEST, DecodingBatch
from benchmarks.record import RESULTS, describe_gpu, provenance
from benchmarks.report import Cells, origin
from benchmarks.runner import failures_exit, log, make_parser, publish
from gateway_svc.constraints import UnvalidatedConstraint, prepared_schema, schema_text
from gateway_svc.field_paths import Field
from svc_common.settings import read_settings
from worker_svc.instance import ModelInstance, load_instance
from worker_svc.runner import Runner
from worker_svc.settings import WorkerSettings
from worker_svc.step import SamplingParams

RESULT = RESULTS / "grammars.json"


@dataclass(frozen=True)
class Mix:
    """Sequences of a step."""

    num_plain: int
    num_constrained: int

    @property
    def size(self) -> int:
        return self.num_plain + self.num_constrained

    @property
    def title(self) -> str:
        if not self.num_plain:
            return f"decode, batch of {self.size}"
        return f"decode, {self.num_plain} without a grammar beside {self.num_constrained} with one"


JUDGED = Mix(0, 64)
CASES = (Mix(0, 1), Mix(0, 8), JUDGED, Mix(32, 32))
LARGEST = max(case.size for case in CASES)
SCHEMA = {
    "type": "array",
    "minItems": 10_000,
    "items": {
        "type": "object",
        "properties": {
            "name": {"type": "string"},
            "size": {"type": "integer"},
            "kind": {"enum": ["small", "medium", "large"]},
            "tags": {"type": "array", "items": {"type": "string", "maxLength": 20}},
            "price": {"type": "number"},
        },
        "required": ["name", "size", "kind", "tags", "price"],
        "additionalProperties": False,
    },
}
GRAMMAR = f"start: %json {schema_text(prepared_schema(UnvalidatedConstraint(Field.JSON_SCHEMA, json.dumps(SCHEMA))))}"
MAX_COST = 0.06
"""Of a step of JUDGED, in relation to one without grammars."""


def _sampled(grammar: str) -> SamplingParams:
    return SamplingParams(temperature=1.0, top_p=0.9, seed=1, grammar=grammar)


def measure(runner: Runner, cases: Sequence[Mix], rounds: int) -> Iterable[dict[str, Any]]:
    """The median step without and with masks in milliseconds, and the median of the pairs' relative differences."""
    ids = count()
    for case in cases:
        plain, masked = (
            DecodingBatch(
                runner,
                [next(ids) for _ in range(case.size)],
                [_sampled("")] * case.num_plain + [_sampled(grammar)] * case.num_constrained,
            )
            for grammar in ("", GRAMMAR)
        )
        pairs = [
            (plain.seconds(), masked.seconds()) if turn % 2 else (masked.seconds(), plain.seconds())[::-1]
            for turn in range(rounds)
        ]
        plain.end()
        masked.end()
        yield {
            "what": case.title,
            "plain_ms": 1e3 * median(first for first, _ in pairs),
            "masked_ms": 1e3 * median(second for _, second in pairs),
            "cost": median(second / first for first, second in pairs) - 1.0,
        }


def grammars_table(result: dict[str, Any]) -> Cells:
    """A row for each case."""
    rows = [
        [case["what"], f"{case['plain_ms']:.2f}", f"{case['masked_ms']:.2f}", f"{case['cost']:+.1%}"]
        for case in result["cases"]
    ]
    return Cells(("step", "without grammars, ms", "with grammars, ms", "cost"), rows)


def grammars_section(result: dict[str, Any]) -> str:
    """The section of docs/design/grammars.md."""
    head = f"Median of {result['rounds']} steps each, in turns, {result['dtype']}; {origin(result)}."
    return f"{head}\n\n{grammars_table(result).markdown()}"


def _load() -> ModelInstance:
    """The default model, as a worker serves it, with blocks for two of the largest batches."""
    blocks = 2 * LARGEST * LONGEST // 16
    return load_instance(read_settings(WorkerSettings, [f"--num-blocks={blocks}", "--swap-space=0"]), log)


def main() -> None:
    parser = make_parser(__doc__, RESULT)
    parser.add_argument("--rounds", type=int, default=100, help="steps of each in each case, 120 at most; default 100")
    options = parser.parse_args()
    with failures_exit("grammars"):
        instance = _load()
        result: dict[str, Any] = {
            **provenance("torch"),
            "gpu": describe_gpu(),
            "dtype": instance.description.dtype,
            "rounds": options.rounds,
            "cases": list(measure(instance.runner, CASES, min(options.rounds, 120))),
        }
    publish(result, options.output or RESULT, {"Grammars": grammars_table(result)})
    (cost,) = (each["cost"] for each in result["cases"] if each["what"] == JUDGED.title)
    if cost > MAX_COST:
        sys.exit(f"{JUDGED.title}: grammars cost {cost:.1%}, more than {MAX_COST:.0%}")


if __name__ == "__main__":
    main()
