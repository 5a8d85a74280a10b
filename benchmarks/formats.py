"""Measures the steps of one model with its weights in several formats (`make bench-formats`).

    python -m benchmarks.formats [--rounds 60] [--formats bfloat16,w8a8] [--output FILE]

This process loads the default model, or that of QUIRE_MODEL, once for each format. For each number of sequences that
decode together, and for a chunk of a prompt, the formats compute the same step in turns. With the default model, a
Llama of 1.1 billion random weights follows, in bfloat16 and two formats of integers. The formats' quality is measured
by `benchmarks.quality`.
"""

import os
from collections.abc import Iterable, Iterator, Mapping
from itertools import count
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from time import perf_counter
from typing import Any

from tokenizers import Tokenizer

from benchmarks.architectures.shapes import Shape
from benchmarks.decoding import LONGEST, DecodingBatch
from benchmarks.quality import FORMATS
from benchmarks.record import RESULTS, describe_gpu, provenance
from benchmarks.report import Cells, Sense, origin, target, target_list
from benchmarks.runner import failures_exit, log, make_parser, publish
from svc_common.gc_tuning import freeze_gc
from svc_common.models import resolve_model
from svc_common.settings import read_settings
from worker_svc.instance import ModelInstance, load_instance
from worker_svc.runner import Runner
from worker_svc.settings import WorkerSettings
from worker_svc.step import NewSequence, SamplingParams, ScheduledSequence, Step

RESULT = RESULTS / "formats.json"
BATCHES = (1, 8, 32, 64)
PROMPT = 256  # tokens of a chunk
# At 32 sequences, W8A8 is to be so much faster than bfloat16: with the default model, and with the large one.
_JUDGED_BATCH, _LEAST_RATIO, _LEAST_LARGE_RATIO = 32, 1.25, 1.4
MOST_ROUNDS = 120

LARGE_FORMATS = ("bfloat16", "w8a8", "w4a8")
LARGE_SHAPE = Shape(
    "llama",
    "Llama, 1.1 billion random weights",
    {
        "hidden_size": 2048,
        "num_attention_heads": 32,
        "num_key_value_heads": 4,
        "num_hidden_layers": 22,
        "intermediate_size": 5632,
    },
)


def load_format(name: str, model: Path | None = None) -> ModelInstance:
    """A model as a worker serves it, with blocks for two of the largest batches; None: that of the settings."""
    arguments = [f"--{option.replace('_', '-')}={value}" for option, value in FORMATS[name].items()]
    arguments += [f"--num-blocks={2 * max(BATCHES) * LONGEST // 16}", "--swap-space=0"]
    if model is not None:
        arguments.append(f"--model={model}")
    return load_instance(read_settings(WorkerSettings, arguments), log)


def _measure_large(rounds: int) -> dict[str, Any]:
    """Writes the large model, and measures it as a result holds it."""
    default = resolve_model(None).path
    vocab_size = Tokenizer.from_file(str(default / "tokenizer.json")).get_vocab_size()
    with TemporaryDirectory(prefix="quire-bench-") as folder:
        LARGE_SHAPE.write(Path(folder), default, vocab_size)
        instances = {name: load_format(name, Path(folder)) for name in LARGE_FORMATS}
    freeze_gc()
    runners = {name: instance.runner for name, instance in instances.items()}
    return {
        "title": LARGE_SHAPE.title,
        "formats": LARGE_FORMATS,
        "cases": list(measure(runners, (1, _JUDGED_BATCH), rounds)),
    }


def _in_turns(steps: Mapping[str, Iterator[float]], rounds: int) -> dict[str, float]:
    """The median of each format's steps, in milliseconds. Rounds begin with another format each."""
    names, seconds = list(steps), {name: list[float]() for name in steps}
    for turn in range(rounds):
        for name in names[turn % len(names) :] + names[: turn % len(names)]:
            seconds[name].append(next(steps[name]))
    return {name: 1e3 * median(found) for name, found in seconds.items()}


def _decodes(batch: DecodingBatch) -> Iterator[float]:
    while True:
        yield batch.seconds()


def _prompts(runner: Runner, ids: Iterator[int]) -> Iterator[float]:
    """Seconds of steps with a chunk of a new prompt each."""
    blocks = list(range(PROMPT // runner.limits.block_size))
    for sequence_id in ids:
        tokens = [(7 * place + sequence_id) % runner.limits.vocab_size for place in range(PROMPT)]
        new = NewSequence(sequence_id, tokens, PROMPT, 0, SamplingParams())
        started = perf_counter()
        runner.step(Step([], [new], [ScheduledSequence(sequence_id, 0, PROMPT, blocks)]))
        yield perf_counter() - started
        runner.step(Step([sequence_id], [], []))


def measure(runners: Mapping[str, Runner], batches: Iterable[int], rounds: int) -> Iterator[dict[str, Any]]:
    """The median step of each format, in milliseconds, for each kind of step."""
    ids = count()
    yield from measure_decodes(runners, batches, rounds, ids)
    prompts = {name: _prompts(runner, ids) for name, runner in runners.items()}
    yield {"what": f"prompt, {PROMPT} tokens", "ms": _in_turns(prompts, rounds)}


def measure_decodes(
    runners: Mapping[str, Runner], batches: Iterable[int], rounds: int, ids: Iterator[int]
) -> Iterator[dict[str, Any]]:
    """As `measure`, of greedy decodes of these numbers of sequences, whose ids are the next ones of `ids`."""
    for size in batches:
        decoding = {
            name: DecodingBatch(runner, [next(ids) for _ in range(size)], [SamplingParams()] * size)
            for name, runner in runners.items()
        }
        steps = {name: _decodes(batch) for name, batch in decoding.items()}
        yield {"what": f"decode, batch of {size}", "ms": _in_turns(steps, rounds)}
        for batch in decoding.values():
            batch.end()


def targets(cases: Iterable[Mapping[str, Any]], model: str = "", bound: float = _LEAST_RATIO) -> list[dict[str, Any]]:
    """What is judged of a model, of the formats that were measured."""
    times = {case["what"]: case["ms"] for case in cases}.get(f"decode, batch of {_JUDGED_BATCH}", {})
    if not {"bfloat16", "w8a8"} <= times.keys():
        return []
    what = f"{model}decode, batch of {_JUDGED_BATCH}: rate in W8A8 over that in bfloat16"
    return [target(what, times["bfloat16"] / times["w8a8"], Sense.AT_LEAST, bound)]


def formats_table(result: dict[str, Any]) -> Cells:
    """A row for each kind of step."""
    names = result["formats"]
    rows = [[case["what"], *(f"{case['ms'][name]:.2f}" for name in names)] for case in result["cases"]]
    return Cells(("step, ms", *names), rows)


def formats_section(result: dict[str, Any]) -> str:
    """The section of docs/performance.md."""
    head = f"Median of {result['rounds']} steps each, in turns, {result['model']}; {origin(result)}."
    tables = formats_table(result).markdown()
    if large := result.get("large"):
        tables += f"\n\n{large['title']}:\n\n{formats_table(large).markdown()}"
    return f"{head}\n\n{tables}\n\n{target_list(result)}"


def main() -> None:
    parser = make_parser(__doc__, RESULT, ", for all formats of the default model")
    names = ",".join(FORMATS)
    parser.add_argument("--rounds", type=int, default=60, help=f"steps of each, {MOST_ROUNDS} at most; default 60")
    parser.add_argument("--formats", default=names, help="default: %(default)s")
    options = parser.parse_args()
    wanted = options.formats.split(",")
    if unknown := [name for name in wanted if name not in FORMATS]:
        parser.error(f"argument --formats: no format named {unknown[0]!r}")
    with failures_exit("formats"):
        instances = {name: load_format(name) for name in wanted}
        freeze_gc()  # as a worker does
        rounds = min(options.rounds, MOST_ROUNDS)
        runners = {name: instance.runner for name, instance in instances.items()}
        result: dict[str, Any] = {
            **provenance("torch"),
            "gpu": describe_gpu(),
            "model": resolve_model(os.environ.get("QUIRE_MODEL")).name,
            "rounds": rounds,
            "formats": wanted,
            "cases": list(measure(runners, BATCHES, rounds)),
        }
        result["targets"] = targets(result["cases"])
        tables = {"Formats": formats_table(result)}
        is_whole = options.formats == names and "QUIRE_MODEL" not in os.environ
        if is_whole:
            large = result["large"] = _measure_large(rounds)
            result["targets"] += targets(large["cases"], f"{large['title']}: ", _LEAST_LARGE_RATIO)
            tables[large["title"]] = formats_table(large)
    publish(result, options.output or (RESULT if is_whole else None), tables)


if __name__ == "__main__":
    main()
