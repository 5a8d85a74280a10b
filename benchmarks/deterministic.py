"""Measures the cost of deterministic mode (`make bench-deterministic`): the same steps with it and without, in turns.

    python -m benchmarks.deterministic [--rounds 40] [--output FILE]

This process loads the default model twice, once in deterministic mode. Sequences decode together, sampled and with
log-probabilities; a prompt fills a step.
"""

import time
from collections.abc import Iterable, Sequence
from statistics import median
from typing import Any

from benchmarks.record import RESULTS, describe_gpu, provenance
from benchmarks.report import Cells, version
from benchmarks.runner import failures_exit, log, make_parser, publish
from svc_common.settings import read_settings
from worker_svc.instance import ModelInstance, load_instance
from worker_svc.runner import Runner
from worker_svc.settings import WorkerSettings
from worker_svc.step import NewSequence, SamplingParams, ScheduledSequence, Step

RESULT = RESULTS / "deterministic.json"
CONTEXT = 128  # tokens of each sequence before it decodes
PARAMS = SamplingParams(temperature=1.0, top_p=0.9, seed=1, logprobs=5)
SEQUENCES = (1, 8, 64)


def load(deterministic: bool) -> ModelInstance:
    """The default model, as a worker serves it."""
    flags = [f"--deterministic={deterministic}", "--num-blocks=1024", "--swap-space=0"]
    return load_instance(read_settings(WorkerSettings, flags), log)


class DecodeSteps:
    """Sequences that decode together, a step at a time."""

    def __init__(self, runner: Runner, num_sequences: int) -> None:
        self._runner, self._num_computed = runner, CONTEXT
        self._blocks_each = 2 * CONTEXT // runner.limits.block_size
        self._ids = range(num_sequences)
        runner.reset()
        for sequence_id in self._ids:
            blocks = list(range(sequence_id * self._blocks_each, (sequence_id + 1) * self._blocks_each))
            new = NewSequence(sequence_id, [5 + sequence_id] * CONTEXT, CONTEXT, 0, PARAMS)
            runner.step(Step([], [new], [ScheduledSequence(sequence_id, 0, CONTEXT, blocks)]))

    def seconds(self) -> float:
        """The duration of the next step."""
        step = Step([], [], [ScheduledSequence(sequence_id, self._num_computed, 1, []) for sequence_id in self._ids])
        self._num_computed += 1
        started = time.perf_counter()
        self._runner.step(step)
        return time.perf_counter() - started


class Prompt:
    """A prompt that fills a step, computed again each time."""

    def __init__(self, runner: Runner) -> None:
        self._runner = runner
        self._length = min(runner.limits.max_step_tokens, runner.limits.num_blocks * runner.limits.block_size)

    def seconds(self) -> float:
        """The duration of its step."""
        blocks = list(range(self._length // self._runner.limits.block_size + 1))
        new = NewSequence(1, [7] * self._length, self._length, 0, PARAMS)
        self._runner.reset()
        started = time.perf_counter()
        self._runner.step(Step([], [new], [ScheduledSequence(1, 0, self._length, blocks)]))
        return time.perf_counter() - started


def interleave(what: str, off: DecodeSteps | Prompt, on: DecodeSteps | Prompt, rounds: int) -> dict[str, Any]:
    """The median step of each in milliseconds, and the median of the pairs' relative differences."""
    pairs = [
        (off.seconds(), on.seconds()) if turn % 2 else (on.seconds(), off.seconds())[::-1] for turn in range(rounds)
    ]
    return {
        "what": what,
        "off_ms": 1e3 * median(first for first, _ in pairs),
        "on_ms": 1e3 * median(second for _, second in pairs),
        "cost": median(second / first for first, second in pairs) - 1.0,
    }


def measure(off: Runner, on: Runner, sequences: Sequence[int], rounds: int) -> Iterable[dict[str, Any]]:
    for count in sequences:
        yield interleave(f"decode, batch of {count}", DecodeSteps(off, count), DecodeSteps(on, count), rounds)
    prompts = Prompt(off), Prompt(on)
    yield interleave(f"prefill, {off.limits.max_step_tokens} tokens", *prompts, rounds)


def deterministic_table(result: dict[str, Any]) -> Cells:
    """A row for each case."""
    rows = [
        [case["what"], f"{case['off_ms']:.2f}", f"{case['on_ms']:.2f}", f"{case['cost']:+.1%}"]
        for case in result["cases"]
    ]
    return Cells(("step", "off, ms", "on, ms", "cost"), rows)


def deterministic_section(result: dict[str, Any]) -> str:
    """The section of docs/guarantees.md."""
    machine = result["machine"]
    where = result["gpu"]["name"] if result["gpu"] else f"{machine['cores']} cores of {machine['processor']}"
    head = f"Median of {result['rounds']} steps each, in turns, {result['dtype']}; {version(result)}, {where}."
    return f"{head}\n\n{deterministic_table(result).markdown()}"


def main() -> None:
    parser = make_parser(__doc__, RESULT)
    parser.add_argument("--rounds", type=int, default=40, help="steps of each in each case, 100 at most; default 40")
    options = parser.parse_args()
    with failures_exit("deterministic"):
        off, on = load(False), load(True)
        result: dict[str, Any] = {
            **provenance("torch"),
            "gpu": describe_gpu(),
            "dtype": on.description.dtype,
            "rounds": options.rounds,
            "cases": list(measure(off.runner, on.runner, SEQUENCES, min(options.rounds, 100))),
        }
    publish(result, options.output or RESULT, {"Deterministic mode": deterministic_table(result)})


if __name__ == "__main__":
    main()
