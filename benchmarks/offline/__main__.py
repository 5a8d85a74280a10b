"""Compares `quire.LLM` with vLLM's class (`make bench-offline`).

    VLLM_VENV=ENVIRONMENT python -m benchmarks.offline [--runs 3] [--requests 192] [--output FILE]

Both compute the requests of the mix in one call, in bfloat16, greedy, with end-of-text ignored; vLLM in float32 where
that is faster. The systems take turns,
each in a new process for each run; the figures are medians. Without VLLM_VENV only Quire is measured.
"""

import os
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.deployment import prepare_model
from benchmarks.mix import PATH as MIX
from benchmarks.offline.report import offline_table, targets
from benchmarks.offline.runs import QUIRE, OfflineSystem, run_offline, vllm
from benchmarks.record import RESULTS, provenance
from benchmarks.runner import failures_exit, in_turns, log, make_parser, publish
from benchmarks.serving.loads import renewed
from benchmarks.serving.systems import Vllm
from quire_client.bench.mix import MixRequest, read_mix
from svc_common.models import ServedModel

RESULT = RESULTS / "offline.json"


def measure(
    systems: Sequence[OfflineSystem], model: ServedModel, requests: Sequence[MixRequest], num_runs: int
) -> dict[str, list[float]]:
    """Output tokens per second of each run, by package."""
    rates: dict[str, list[float]] = {system.package: [] for system in systems}
    for run, system in in_turns(systems, num_runs):
        found = run_offline(system, model.path, requests).tokens_per_second
        log(f"run {run + 1} of {num_runs}, {system.title}: {found:,.1f} output tokens/s")
        rates[system.package].append(found)
    return rates


def main() -> None:
    parser = make_parser(__doc__, RESULT, ", with both systems")
    parser.add_argument("--runs", type=int, default=3, help="runs of each; default 3")
    parser.add_argument("--requests", type=int, default=192, help="of the mix, repeated; default 192")
    options = parser.parse_args()
    with failures_exit("offline"):
        model = prepare_model()
        systems, version = [QUIRE], None
        if environment := os.environ.get("VLLM_VENV"):
            version = Vllm(model, Path(environment)).version()
            systems.append(vllm(Path(environment)))
        else:
            log("vLLM is left out: VLLM_VENV names no environment that has it")
        requests = renewed(read_mix(MIX), 0, options.requests)
        rates = measure(systems, model, requests, options.runs)
        result: dict[str, Any] = {
            **provenance("torch"),
            "model": model.name,
            "vllm": version,
            "num_runs": options.runs,
            "num_requests": len(requests),
            "prompt_tokens": sum(len(request.prompt_token_ids) for request in requests),
            "output_tokens": sum(request.output_tokens for request in requests),
            "systems": {
                system.package: {
                    "title": system.title,
                    "output_tokens_per_second": median(rates[system.package]),
                    "runs": rates[system.package],
                }
                for system in systems
            },
        }
        result["targets"] = targets(result)
        output = options.output or (RESULT if len(systems) > 1 else None)
        publish(result, output, {"Without a server": offline_table(result)})


if __name__ == "__main__":
    main()
