"""Decodes with an 8B Llama of random weights through the worker's runner, against the bandwidth of memory; and the
host's time for steps of decodes beside a prompt.

    python -m benchmarks.gpu.decode [--dry-run] [--output FILE]

A decode step reads all weights and all keys and values once: no step is faster than these bytes at the device's own
copy rate. `of_floor` is a step's time divided by that. A step's time is the wall time from one step to the next,
each launched while the one before it runs, with its result on the host. `idle_share` is the part of it in which no
kernel runs; `kernels` are those that take longest, in milliseconds of a step. `host_ms` of a mixed step is the time in
which the host lays it out and enqueues it. With `--dry-run` the model is small; on a CPU it needs TRITON_INTERPRET=1.
"""

import argparse
import os
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import torch

from benchmarks.gpu.random_model import LLAMA_8B, TINY, RandomModel
from benchmarks.kernels.device import DeviceRates
from benchmarks.record import RESULTS, describe_gpu, provenance, write_result
from benchmarks.report import Sense, target
from worker_svc.attention import AttentionKind
from worker_svc.launched_step import LaunchedStep
from worker_svc.runner import Runner
from worker_svc.step import NewSequence, SamplingParams, ScheduledSequence, Step, StepOutcome

BLOCK_SIZE = 16
MAX_STEP_TOKENS = 2048
OF_FLOOR, IDLE_SHARE = 1.25, 0.03
# That the result names, of those that a step takes longest for
_NUM_KERNELS = 12


@dataclass(frozen=True)
class Sizes:
    """What is measured: decodes of `batches` sequences of `context` tokens; and steps of `num_decodes` decodes beside a
    chunk of a prompt, of each of `chunks`.
    """

    model: dict[str, Any]
    batches: Sequence[int]
    context: int
    warm_up_steps: int
    timed_steps: int
    profiled_steps: int
    num_decodes: int
    chunks: Sequence[int]
    mixed_context: int
    mixed_steps: int

    @property
    def num_steps(self) -> int:
        """Of decodes."""
        return self.warm_up_steps + self.timed_steps + self.profiled_steps


# With the decodes, chunks fill steps up to 512 tokens, which run as graphs, and a larger one.
FULL = Sizes(LLAMA_8B, (1, 8, 64, 256), 1024, 10, 50, 10, 32, (32, 224, 480, 992), 512, 12)
DRY = Sizes(TINY, (1, 2), 17, 1, 2, 0, 2, (3,), 9, 3)


class DecodeLoop:
    """Steps of sequences of one length whose prompts are computed."""

    def __init__(self, runner: Runner, num_seqs: int, context: int, num_steps: int) -> None:
        self._runner, self._num_seqs, self._position = runner, num_seqs, context
        runner.reset()
        pages = -(-(context + num_steps + 1) // BLOCK_SIZE)
        blocks = torch.randperm(num_seqs * pages, generator=torch.Generator().manual_seed(0)).view(num_seqs, pages)
        tokens = torch.randint(
            runner.limits.vocab_size, (num_seqs, context), generator=torch.Generator().manual_seed(1)
        )
        for row in range(num_seqs):
            new = NewSequence(row, tokens[row].tolist(), context, 0, SamplingParams())
            for start in range(0, context, MAX_STEP_TOKENS):
                count = min(MAX_STEP_TOKENS, context - start)
                first = start == 0
                scheduled = ScheduledSequence(row, start, count, blocks[row].tolist() if first else [])
                _check(runner.step(Step([], [new] if first else [], [scheduled])))

    @staticmethod
    def num_blocks(num_seqs: int, context: int, num_steps: int) -> int:
        return num_seqs * -(-(context + num_steps + 1) // BLOCK_SIZE)

    def next_schedule(self) -> list[ScheduledSequence]:
        """The next token of each sequence."""
        scheduled = [ScheduledSequence(row, self._position, 1, []) for row in range(self._num_seqs)]
        self._position += 1
        return scheduled

    def run(self, num_steps: int) -> None:
        """Generates `num_steps` tokens a sequence. Each step is launched before the one before it is finished."""
        last: LaunchedStep | None = None
        for _ in range(num_steps):
            step = Step([], [], self.next_schedule())
            launched = self._runner.launch(step)
            if last is not None:
                _check(self._runner.finish(last))
            last = launched
        if last is not None:
            _check(self._runner.finish(last))


class MixedLoop:
    """Steps of decodes beside a chunk of another prompt each, which fills the step to one number of tokens."""

    def __init__(self, runner: Runner, num_decodes: int, context: int, chunk: int, num_steps: int) -> None:
        self._runner, self._num_decodes, self._chunk = runner, num_decodes, chunk
        self._decoding = DecodeLoop(runner, num_decodes, context, num_steps)
        self._next_block = DecodeLoop.num_blocks(num_decodes, context, num_steps)

    @staticmethod
    def num_blocks(num_decodes: int, context: int, chunk: int, num_steps: int) -> int:
        return DecodeLoop.num_blocks(num_decodes, context, num_steps) + -(-(chunk + 1) // BLOCK_SIZE)

    def run(self, num_steps: int) -> list[tuple[float, float]]:
        """Seconds of each step: of its launch on the host, and until its results are on the host."""
        pages = -(-(self._chunk + 1) // BLOCK_SIZE)
        blocks = list(range(self._next_block, self._next_block + pages))
        times = []
        for number in range(num_steps):
            # The prompt of each step takes the blocks of the one before, which has ended.
            sequence_id = self._num_decodes + number
            new = NewSequence(sequence_id, [3] * self._chunk, self._chunk, 0, SamplingParams())
            decodes = self._decoding.next_schedule()
            finished = [sequence_id - 1] if number else []
            step = Step(finished, [new], [*decodes, ScheduledSequence(sequence_id, 0, self._chunk, blocks)])
            began = time.perf_counter()
            launched = self._runner.launch(step)
            enqueued = time.perf_counter()
            _check(self._runner.finish(launched))
            times.append((enqueued - began, time.perf_counter() - began))
        return times


def _check(outcome: StepOutcome) -> None:
    for result in outcome.sequences:
        if result.failure is not None:
            raise RuntimeError(f"sequence {result.sequence_id} failed: {result.failure}")


def measure(model: RandomModel, num_seqs: int, copy_rate: float, sizes: Sizes) -> dict[str, Any]:
    """Figures of decode steps; `copy_rate` in GB/s."""
    context = sizes.context
    num_blocks = DecodeLoop.num_blocks(num_seqs, context, sizes.num_steps)
    runner = model.make_runner(BLOCK_SIZE, num_blocks, MAX_STEP_TOKENS, num_seqs)
    decoding = DecodeLoop(runner, num_seqs, context, sizes.num_steps)
    decoding.run(sizes.warm_up_steps)
    began = time.perf_counter()
    decoding.run(sizes.timed_steps)
    seconds = (time.perf_counter() - began) / sizes.timed_steps
    layout = model.layout
    token_bytes = 2 * sum(one.num_heads * one.head_dim for one in layout.kv) * model.dtype.itemsize
    kv_bytes = num_seqs * (context + sizes.warm_up_steps + sizes.timed_steps // 2) * token_bytes
    floor = (model.weight_bytes + kv_bytes) / (copy_rate * 1e9)
    return {
        "num_seqs": num_seqs,
        "context": context,
        "ms": seconds * 1e3,
        "floor_ms": floor * 1e3,
        "of_floor": seconds / floor,
        "tokens_per_second": num_seqs / seconds,
        **_device_use(decoding, seconds, sizes.profiled_steps, model.device),
    }


def measure_mixed(model: RandomModel, sizes: Sizes) -> list[dict[str, Any]]:
    """The host's time for mixed steps of each size: the median of the steps after the first two."""
    num_decodes, context, longest = sizes.num_decodes, sizes.mixed_context, max(sizes.chunks)
    num_blocks = MixedLoop.num_blocks(num_decodes, context, longest, sizes.mixed_steps)
    runner = model.make_runner(BLOCK_SIZE, num_blocks, MAX_STEP_TOKENS, num_decodes + 1)
    rows = []
    for chunk in sizes.chunks:
        times = MixedLoop(runner, num_decodes, context, chunk, sizes.mixed_steps).run(sizes.mixed_steps)[2:]
        host, whole = (median(column) * 1e3 for column in zip(*times, strict=True))
        tokens = num_decodes + chunk
        rows.append({"num_decodes": num_decodes, "chunk": chunk, "num_tokens": tokens, "host_ms": host, "ms": whole})
    return rows


def _device_use(decoding: DecodeLoop, seconds: float, num_steps: int, device: torch.device) -> dict[str, Any]:
    """The share of a step of `seconds` in which no kernel runs, and the kernels that take most of the rest."""
    if device.type != "cuda":
        return {"idle_share": None, "kernels": []}
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        decoding.run(num_steps)
        torch.cuda.synchronize()
    # An event of the host carries the times of the kernels that it launched too.
    kernels = [event for event in profiler.key_averages() if event.device_type.name == "CUDA"]
    milliseconds = {event.key: event.self_device_time_total / 1e3 / num_steps for event in kernels}
    longest = sorted(kernels, key=lambda event: -event.self_device_time_total)[:_NUM_KERNELS]
    return {
        "idle_share": 1 - sum(milliseconds.values()) / 1e3 / seconds,
        "kernels": [
            {"name": event.key[:120], "ms": milliseconds[event.key], "calls": event.count / num_steps}
            for event in longest
        ],
    }


def judge(cases: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The targets of the measured steps."""
    targets = []
    for case in cases:
        figures = [("times the bandwidth floor", case["of_floor"], OF_FLOOR)]
        if case["idle_share"] is not None:
            figures.append(("share of the time that the device is idle", case["idle_share"], IDLE_SHARE))
        name = f"decode of {case['num_seqs']}"
        targets += [target(f"{name}: {what}", value, Sense.AT_MOST, bound) for what, value, bound in figures]
    return targets


def measure_all(sizes: Sizes, device: torch.device, dtype: torch.dtype, output: Path) -> dict[str, Any]:
    """Measures all sizes, and writes the result after each."""
    rates = DeviceRates.measure(device)
    model = RandomModel(sizes.model, dtype, device, AttentionKind.TRITON)
    result: dict[str, Any] = {
        **provenance("torch", "triton"),
        "gpu": describe_gpu(),
        "rates": rates.to_json(),
        "weight_bytes": model.weight_bytes,
        "cases": [],
        "mixed": [],
    }
    for num_seqs in sizes.batches:
        result["cases"].append(measure(model, num_seqs, rates.memory, sizes))
        result["targets"] = judge(result["cases"])
        write_result(output, result)
        if device.type == "cuda":
            torch.cuda.empty_cache()
    result["mixed"] = measure_mixed(model, sizes)
    write_result(output, result)
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dry-run", action="store_true", help="small sizes, without a GPU too")
    parser.add_argument("--output", type=Path, default=RESULTS / "decode_gpu.json")
    options = parser.parse_args()
    if not torch.cuda.is_available() and not options.dry_run:
        sys.exit("decode: torch finds no GPU on this machine")
    if not torch.cuda.is_available() and os.environ.get("TRITON_INTERPRET") != "1":
        sys.exit("decode: without a GPU, a dry run needs TRITON_INTERPRET=1")
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    dtype = torch.float32 if options.dry_run else torch.bfloat16
    measure_all(DRY if options.dry_run else FULL, device, dtype, options.output)


if __name__ == "__main__":
    main()
