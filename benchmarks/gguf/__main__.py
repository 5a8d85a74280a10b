"""Compares Quire with llama.cpp's server on the same GGUF files (`make bench-gguf`).

    python -m benchmarks.gguf [--files default-q4_1,…] [--runs 3] [--requests 48] [--output FILE]

Both serve OpenAI's API on all cores, and get the same requests of the mix: eight one after another, then `--requests`
of 16 clients. They take turns, each started anew for each run. Quire computes with the codes of the file and
activations in 8 bits, as llama.cpp does. llama.cpp has 16 slots, each with the context that Quire has. Figures are
medians over the runs. After them, the steps of one sequence are measured in this process, beside the rate at which the
processor reads memory.
"""

import gc
import os
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any

import torch

from benchmarks.decoding import LONGEST, DecodingBatch
from benchmarks.deployment import START_SECONDS
from benchmarks.gguf.files import FILES, ComparedFile
from benchmarks.gguf.llama_cpp import llama_cpp_programs
from benchmarks.gguf.report import AT_A_TIME, LOADS, gguf_table, read_rates_table, targets
from benchmarks.kernels.device import milliseconds
from benchmarks.mix import PATH as MIX
from benchmarks.processes import running
from benchmarks.record import RESULTS, provenance
from benchmarks.runner import failures_exit, in_turns, log, make_parser, median_of, publish, select_named
from benchmarks.serving.loads import ServingLoad, renewed
from benchmarks.serving.measure import Outcome, run_system
from benchmarks.serving.systems import CONTEXT_LENGTH, Endpoint, Quire, System, listening
from quire_client.bench.mix import MixRequest, read_mix
from quire_kernels.cpu.linear import PackedMatrix
from svc_common.settings import read_settings
from svc_common.supervisor.addresses import free_port
from worker_svc.instance import load_instance
from worker_svc.prepare import prepare
from worker_svc.settings import WorkerSettings
from worker_svc.step import SamplingParams

RESULT = RESULTS / "gguf.json"
_STEPS = 60
# More than four times the largest last-level cache that a part of such a machine has to itself
_READ_BYTES = 2 * 2**30


@dataclass(frozen=True)
class LlamaCpp:
    """llama.cpp's server with a GGUF file."""

    path: Path
    programs: Path
    name: str = "llama_cpp"
    title: str = "llama.cpp"

    @contextmanager
    def running(self) -> Iterator[Endpoint]:
        port, threads = free_port(), str(len(os.sched_getaffinity(0)))
        command = (
            *(str(self.programs / "llama-server"), "--model", str(self.path), "--host", "127.0.0.1"),
            *("--port", str(port), "--threads", threads, "--threads-batch", threads),
            *("--parallel", str(AT_A_TIME), "--ctx-size", str(AT_A_TIME * CONTEXT_LENGTH)),
        )
        with running(self.title, command) as process:
            yield replace(process.wait_until(lambda: listening(port), START_SECONDS), closes_connections=True)


def make_loads(mix: Sequence[MixRequest], num_requests: int) -> list[ServingLoad]:
    """One stream after another, then 16 clients; no prompt twice."""
    alone = renewed(mix, 0, 8)
    crowd = renewed(mix, 1, num_requests)
    return [ServingLoad(LOADS[0], "one at a time", alone, 1), ServingLoad(LOADS[1], "16 clients", crowd, AT_A_TIME)]


def compare(systems: Sequence[System], loads: Sequence[ServingLoad], num_runs: int) -> dict[str, Any]:
    """The medians of each system by load, and all runs."""
    outcomes: dict[str, dict[str, list[Outcome]]] = {system.name: {} for system in systems}
    for run, system in in_turns(systems, num_runs):
        log(f"run {run + 1} of {num_runs}")
        for load, outcome in run_system(system, loads).items():
            outcomes[system.name].setdefault(load, []).append(outcome)
    return {
        name: {
            load: {
                "median": asdict(median_of([outcome.figures for outcome in runs])),
                "runs": [asdict(outcome.figures) for outcome in runs],
            }
            for load, runs in by_load.items()
        }
        for name, by_load in outcomes.items()
    }


def measure_read_rate(path: Path, quantization: str) -> dict[str, Any]:
    """The bytes of weights that a step of one sequence reads, its duration, and the processor's own read rate."""
    blocks = 2 * LONGEST // 16
    settings = {"model": path, "dtype": "bfloat16", "quantization": quantization, "num-blocks": blocks, "swap-space": 0}
    instance = load_instance(
        read_settings(WorkerSettings, [f"--{name}={value}" for name, value in settings.items()]), log
    )
    # All matrices of the model; a step reads each once.
    num_bytes = sum(found.panels.nbytes for found in gc.get_objects() if type(found) is PackedMatrix)
    batch = DecodingBatch(instance.runner, [0], [SamplingParams()])
    step = median(batch.seconds() for _ in range(_STEPS))
    torch.set_num_threads(len(os.sched_getaffinity(0)))  # workers leave torch one thread
    memory = torch.ones(_READ_BYTES // 8, dtype=torch.int64)
    read = memory.nbytes / milliseconds(memory.sum, torch.device("cpu")) / 1e6
    return {
        "bytes": num_bytes,
        "step_ms": 1e3 * step,
        "gb_per_second": num_bytes / step / 1e9,
        "read_gb_per_second": read,
    }


def measure_file(file: ComparedFile, programs: Path, loads: Sequence[ServingLoad], num_runs: int) -> dict[str, Any]:
    """The figures of one file, which is written first."""
    with tempfile.TemporaryDirectory(prefix="quire-bench-") as folder:
        path = file.write(Path(folder))
        model = prepare(str(path), log)
        log(f"{file.title}: {path.stat().st_size / 1e6:,.0f} MB")
        settings = {"QUIRE_MODEL": str(path), "QUIRE_QUANTIZATION": file.quantization}
        systems: list[System] = [Quire(settings=settings), LlamaCpp(path, programs)]
        return {
            "title": file.title,
            "quantization": file.quantization,
            "systems": compare(systems, loads, num_runs),
            "reading": measure_read_rate(model.path, file.quantization),
        }


def main() -> None:
    parser = make_parser(__doc__, RESULT, ", with all files")
    parser.add_argument("--files", default=",".join(FILES), help="default all: %(default)s")
    parser.add_argument("--runs", type=int, default=3, help="runs of each; default 3")
    parser.add_argument("--requests", type=int, default=48, help="of 16 clients; default 48")
    options = parser.parse_args()
    with failures_exit("gguf"):
        files, programs = select_named(options.files, FILES, "file"), llama_cpp_programs()
        loads = make_loads(read_mix(MIX), options.requests)
        result: dict[str, Any] = {
            **provenance("torch"),
            "num_runs": options.runs,
            "loads": {load.name: load.describe() for load in loads},
            "files": {name: measure_file(file, programs, loads, options.runs) for name, file in files.items()},
        }
        result["targets"] = targets(result["files"])
    is_whole = files.keys() == FILES.keys()
    tables = {"GGUF files": gguf_table(result), "Steps of one sequence": read_rates_table(result)}
    publish(result, options.output or (RESULT if is_whole else None), tables)


if __name__ == "__main__":
    main()
