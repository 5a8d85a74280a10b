"""Decodes with an 8B Llama of random weights through the worker's runner, against the bandwidth of memory.

    python -m benchmarks.gpu.decode [--output FILE]

A decode step reads all weights and all keys and values once: no step is faster than these bytes at the device's own
copy rate. `of_floor` is a step's time divided by that. A step's time is the wall time from one step to the next,
each launched while the one before it runs, with its result on the host. `idle_share` is the part of it in which no
kernel runs.
"""

import argparse
import sys
import time
from pathlib import Path
from typing import Any

import torch

from benchmarks.gpu.random_model import LLAMA_8B, RandomModel
from benchmarks.kernels.device import DeviceRates
from benchmarks.record import RESULTS, describe_gpu, provenance, write_result
from benchmarks.report import Sense, target
from worker_svc.attention import AttentionKind
from worker_svc.launched_step import LaunchedStep
from worker_svc.runner import Runner
from worker_svc.step import NewSequence, SamplingParams, ScheduledSequence, Step, StepOutcome

BLOCK_SIZE = 16
CONTEXT = 1024
BATCHES = (1, 64)
WARM_UP_STEPS, TIMED_STEPS, PROFILED_STEPS = 10, 50, 10
MAX_STEP_TOKENS = 2048
OF_FLOOR, IDLE_SHARE = 1.25, 0.03


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

    def run(self, num_steps: int) -> None:
        """Generates `num_steps` tokens a sequence. Each step is launched before the one before it is finished."""
        last: LaunchedStep | None = None
        for _ in range(num_steps):
            rows = range(self._num_seqs)
            step = Step([], [], [ScheduledSequence(row, self._position, 1, []) for row in rows])
            self._position += 1
            launched = self._runner.launch(step)
            if last is not None:
                _check(self._runner.finish(last))
            last = launched
        if last is not None:
            _check(self._runner.finish(last))


def _check(outcome: StepOutcome) -> None:
    for result in outcome.sequences:
        if result.failure is not None:
            raise RuntimeError(f"sequence {result.sequence_id} failed: {result.failure}")


def measure(model: RandomModel, num_seqs: int, copy_rate: float) -> dict[str, Any]:
    """Figures of decode steps; `copy_rate` in GB/s."""
    num_steps = WARM_UP_STEPS + TIMED_STEPS + PROFILED_STEPS
    num_blocks = DecodeLoop.num_blocks(num_seqs, CONTEXT, num_steps)
    runner = model.make_runner(BLOCK_SIZE, num_blocks, MAX_STEP_TOKENS, num_seqs)
    decoding = DecodeLoop(runner, num_seqs, CONTEXT, num_steps)
    decoding.run(WARM_UP_STEPS)
    began = time.perf_counter()
    decoding.run(TIMED_STEPS)
    seconds = (time.perf_counter() - began) / TIMED_STEPS
    layout = model.layout
    token_bytes = 2 * len(layout.layers) * layout.num_kv_heads * layout.head_dim * model.dtype.itemsize
    kv_bytes = num_seqs * (CONTEXT + WARM_UP_STEPS + TIMED_STEPS // 2) * token_bytes
    floor = (model.weight_bytes + kv_bytes) / (copy_rate * 1e9)
    return {
        "num_seqs": num_seqs,
        "context": CONTEXT,
        "ms": seconds * 1e3,
        "floor_ms": floor * 1e3,
        "of_floor": seconds / floor,
        "tokens_per_second": num_seqs / seconds,
        "idle_share": _idle_share(decoding, seconds) if model.device.type == "cuda" else None,
    }


def _idle_share(decoding: DecodeLoop, seconds: float) -> float:
    """The share of a step of `seconds` in which no kernel runs."""
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        decoding.run(PROFILED_STEPS)
        torch.cuda.synchronize()
    # An event of the host carries the times of the kernels that it launched too.
    kernels = [event for event in profiler.key_averages() if event.device_type.name == "CUDA"]
    busy: float = sum(event.self_device_time_total for event in kernels) / 1e6 / PROFILED_STEPS
    return 1 - busy / seconds


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


def main() -> None:
    """Writes the result after each batch size."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, default=RESULTS / "decode_gpu.json")
    output: Path = parser.parse_args().output
    if not torch.cuda.is_available():
        sys.exit("decode: torch finds no GPU on this machine")
    device = torch.device("cuda", 0)
    rates = DeviceRates.measure(device)
    model = RandomModel(LLAMA_8B, torch.bfloat16, device, AttentionKind.TRITON)
    result: dict[str, Any] = {
        **provenance("torch", "triton"),
        "gpu": describe_gpu(),
        "rates": rates.to_json(),
        "weight_bytes": model.weight_bytes,
        "cases": [],
    }
    for num_seqs in BATCHES:
        result["cases"].append(measure(model, num_seqs, rates.memory))
        result["targets"] = judge(result["cases"])
        write_result(output, result)
        torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
