"""Compares `quire.LLM` with OpenVINO GenAI on the default model's GGUF file (`make bench-openvino`).

    python -m benchmarks.offline.gguf [--runs 3] [--requests 192] [--output FILE]

OpenVINO GenAI has no server of its own. Both get eight requests of the mix one after another, and then all of
`--requests` in one call; no prompt twice. Both compute with the codes of the file, in Q4_1, and activations in 8 bits,
on all cores. They take turns, in a new process for each run and load; the figures are medians.
"""

import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.environments import python_with, version_of
from benchmarks.mix import PATH as MIX
from benchmarks.offline.report import LOADS, gguf_offline_table
from benchmarks.offline.runs import OPENVINO_PROGRAM, QUIRE, OfflineSystem, run_offline
from benchmarks.record import RESULTS, provenance
from benchmarks.runner import failures_exit, in_turns, log, make_parser, publish
from benchmarks.serving.loads import renewed
from quire_client.bench.mix import MixRequest, read_mix
from worker_svc.prepare import fetch_default_gguf, prepare

RESULT = RESULTS / "offline_gguf.json"
_QUANTIZATION = "w4a8"


def openvino(python: Path) -> OfflineSystem:
    """OpenVINO GenAI by the Python of an environment that has it."""
    return OfflineSystem("openvino_genai", "OpenVINO GenAI", python, program=OPENVINO_PROGRAM)


def measure(
    systems: Sequence[OfflineSystem], model: Path, loads: Mapping[str, Sequence[MixRequest]], num_runs: int
) -> dict[str, dict[str, list[float]]]:
    """Output tokens per second of each run, by package and load."""
    rates: dict[str, dict[str, list[float]]] = {each.package: {load: [] for load in loads} for each in systems}
    for run, system in in_turns(systems, num_runs):
        for load, requests in loads.items():
            at_a_time = 1 if load == LOADS[0] else None
            found = run_offline(system, model, requests, at_a_time).tokens_per_second
            log(f"run {run + 1} of {num_runs}, {system.title}, {load}: {found:,.1f} output tokens/s")
            rates[system.package][load].append(found)
    return rates


def main() -> None:
    parser = make_parser(__doc__, RESULT, ", with both systems")
    parser.add_argument("--runs", type=int, default=3, help="runs of each; default 3")
    parser.add_argument("--requests", type=int, default=192, help="of the mix, repeated; default 192")
    options = parser.parse_args()
    with failures_exit("offline.gguf"), tempfile.TemporaryDirectory(prefix="quire-bench-") as folder:
        model = fetch_default_gguf(Path(folder), log)
        prepare(str(model), log)
        systems = [QUIRE.with_options("--quantization", _QUANTIZATION), openvino(python_with("openvino"))]
        mix = read_mix(MIX)
        loads = dict(zip(LOADS, (renewed(mix, 0, 8), renewed(mix, 1, options.requests)), strict=True))
        rates = measure(systems, model, loads, options.runs)
        result: dict[str, Any] = {
            **provenance("torch"),
            "file": model.name,
            "quantization": _QUANTIZATION,
            "openvino-genai": version_of("openvino", "openvino-genai"),
            "num_runs": options.runs,
            "num_requests": options.requests,
            "systems": {
                system.package: {
                    "title": system.title,
                    "loads": {
                        load: {"output_tokens_per_second": median(runs), "runs": runs}
                        for load, runs in rates[system.package].items()
                    },
                }
                for system in systems
            },
        }
        publish(result, options.output or RESULT, {"Without a server, from a GGUF file": gguf_offline_table(result)})


if __name__ == "__main__":
    main()
