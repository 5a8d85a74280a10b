"""Measures what deterministic mode costs (`make bench-deterministic`): the same steps with it and without, in turns.

    python -m benchmarks.deterministic [--rounds 40] [--output FILE]

Two replicas of the default model stand in this process, one in the mode. Sequences decode together, sampled and with
log-probabilities; a prompt fills a step.
"""

import argparse
import os
import sys
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.deterministic.report import deterministic_table
from benchmarks.record import RESULTS, describe_gpu, provenance, write_result
from svc_common.settings import read_settings
from worker_svc.instance import ModelInstance, load_instance
from worker_svc.runner import Runner
from worker_svc.settings import WorkerSettings
from worker_svc.step import NewSequence, SamplingParams, ScheduledSequence, Step

RESULT = RESULTS / "deterministic.json"
CONTEXT = 128  # tokens of each sequence before it decodes
PARAMS = SamplingParams(temperature=1.0, top_p=0.9, seed=1, logprobs=5)
SEQUENCES = (1, 8, 64)


def replica(deterministic: bool) -> ModelInstance:
    """The default model, as a worker would serve it."""
    flags = [f"--deterministic={deterministic}", "--num-blocks=1024", "--swap-space=0"]
    return load_instance(read_settings(WorkerSettings, flags), lambda line: print(line, file=sys.stderr))


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
        """What the next step takes."""
        step = Step([], [], [ScheduledSequence(sequence_id, self._num_computed, 1, []) for sequence_id in self._ids])
        self._num_computed += 1
        started = time.perf_counter()
        self._runner.step(step)
        return time.perf_counter() - started


class Prompt:
    """A prompt that fills a step, over and over."""

    def __init__(self, runner: Runner) -> None:
        self._runner = runner
        self._length = min(runner.limits.max_step_tokens, runner.limits.num_blocks * runner.limits.block_size)

    def seconds(self) -> float:
        """What its step takes."""
        blocks = list(range(self._length // self._runner.limits.block_size + 1))
        new = NewSequence(1, [7] * self._length, self._length, 0, PARAMS)
        self._runner.reset()
        started = time.perf_counter()
        self._runner.step(Step([], [new], [ScheduledSequence(1, 0, self._length, blocks)]))
        return time.perf_counter() - started


def interleave(what: str, off: DecodeSteps | Prompt, on: DecodeSteps | Prompt, rounds: int) -> dict[str, Any]:
    """The medians of as many steps of each, in milliseconds, and what a pair differs by in the median."""
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
    """A case after the other."""
    for count in sequences:
        yield interleave(f"{count} sequences decode", DecodeSteps(off, count), DecodeSteps(on, count), rounds)
    prompts = Prompt(off), Prompt(on)
    yield interleave(f"a prompt of {off.limits.max_step_tokens} tokens", *prompts, rounds)


def main() -> None:
    """Reads flags, measures, writes."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=40, help="steps of each in each case, 100 at most; default 40")
    parser.add_argument("--output", type=Path, default=RESULT, help=f"file for the result; default {RESULT.name}")
    options = parser.parse_args()
    off, on = replica(False), replica(True)
    result: dict[str, Any] = {
        **provenance("torch"),
        "gpu": describe_gpu(),
        "dtype": on.description.dtype,
        "rounds": options.rounds,
        "cases": list(measure(off.runner, on.runner, SEQUENCES, min(options.rounds, 100))),
    }
    deterministic_table(result).print("Deterministic mode")
    write_result(options.output, result)
    print(f"written to {os.path.relpath(options.output)}", file=sys.stderr)


if __name__ == "__main__":
    main()
