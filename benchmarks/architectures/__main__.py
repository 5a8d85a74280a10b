"""Compares Quire with transformers and vLLM on further architectures (`make bench-architectures`).

    [VLLM_VENV=ENVIRONMENT] python -m benchmarks.architectures [--shapes dense,experts] [--runs 3] [--requests 24]

Models of about 300M active parameters with random weights, in bfloat16, greedy, with end-of-text ignored, and requests
of the mix. Quire and vLLM compute them in one call of `LLM`, by their defaults and eight at a time, transformers in
static batches of eight. The systems take turns, each in a new process for each run; the figures are medians. Without
VLLM_VENV vLLM is left out; a model that vLLM cannot compute is reported with its error.
"""

import os
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

from tokenizers import Tokenizer

from benchmarks.architectures.report import architectures_table, targets
from benchmarks.architectures.shapes import SHAPES, Shape
from benchmarks.deployment import prepare_model
from benchmarks.mix import PATH as MIX
from benchmarks.offline.runs import QUIRE, OfflineSystem, run_offline, vllm
from benchmarks.processes import BenchmarkFailed
from benchmarks.record import RESULTS, provenance
from benchmarks.runner import failures_exit, in_turns, log, make_parser, publish, select_named
from benchmarks.serving.loads import ServingLoad, renewed
from benchmarks.serving.measure import run_static_batches
from benchmarks.serving.systems import Vllm
from quire_client.bench.mix import MixRequest, read_mix
from svc_common.models import ServedModel

RESULT = RESULTS / "architectures.json"
AT_A_TIME = 8


@dataclass(frozen=True)
class ComparedSystem:
    """A system by its name in the result, and how it computes requests: output tokens per second."""

    name: str
    title: str
    run: Callable[[Path, Sequence[MixRequest]], float]


def compared_systems(environment: Path | None) -> list[ComparedSystem]:
    """Those that take part; vLLM where its environment is given."""
    systems = [
        ComparedSystem("quire", "quire.LLM", partial(_run_class, QUIRE, None)),
        ComparedSystem("quire-8", "quire.LLM, 8 at a time", partial(_run_class, QUIRE, AT_A_TIME)),
    ]
    if environment is not None:
        peer = vllm(environment)
        systems.append(
            ComparedSystem("vllm-8", "vllm.LLM, CPU build, 8 at a time", partial(_run_class, peer, AT_A_TIME))
        )
    systems.append(ComparedSystem("transformers", "transformers, static batches of 8", _run_static))
    return systems


def measure(
    systems: Sequence[ComparedSystem], model: Path, requests: Sequence[MixRequest], num_runs: int
) -> tuple[dict[str, list[float]], dict[str, str]]:
    """The rates of each run, by system, and the error of each system that failed; it gets no further turn."""
    rates: dict[str, list[float]] = {system.name: [] for system in systems}
    errors: dict[str, str] = {}
    for run, system in in_turns(systems, num_runs):
        if system.name in errors:
            continue
        try:
            rate = system.run(model, requests)
        except BenchmarkFailed as error:
            if system.name.startswith("quire"):
                raise
            errors[system.name] = str(error).strip().splitlines()[-1]
            log(f"{system.title}: {error}")
            continue
        log(f"run {run + 1} of {num_runs}, {system.title}: {rate:,.1f} output tokens/s")
        rates[system.name].append(rate)
    return rates, errors


def measure_shape(
    shape: Shape, default: ServedModel, systems: Sequence[ComparedSystem], requests: Sequence[MixRequest], num_runs: int
) -> dict[str, Any]:
    """Writes a model of a shape, and compares the systems on it."""
    vocab_size = Tokenizer.from_file(str(default.path / "tokenizer.json")).get_vocab_size()
    with tempfile.TemporaryDirectory(prefix="quire-bench-") as folder:
        num_parameters = shape.write(Path(folder), default.path, vocab_size)
        log(f"{shape.title}: {num_parameters / 1e6:,.0f}M parameters")
        rates, errors = measure(systems, Path(folder), requests, num_runs)
    return {
        "title": shape.title,
        "parameters": num_parameters,
        "systems": {
            system.name: {"title": system.title}
            | ({"error": errors[system.name]} if system.name in errors else _summary(rates[system.name]))
            for system in systems
        },
    }


def _summary(rates: Sequence[float]) -> dict[str, Any]:
    return {"output_tokens_per_second": median(rates), "runs": list(rates)}


def _run_class(system: OfflineSystem, max_sequences: int | None, model: Path, requests: Sequence[MixRequest]) -> float:
    return run_offline(system, model, requests, max_sequences).tokens_per_second


def _run_static(model: Path, requests: Sequence[MixRequest]) -> float:
    load = ServingLoad("mix", "mix", tuple(requests), AT_A_TIME)
    return run_static_batches(model, load)["mix"].figures.output_tokens_per_second


def main() -> None:
    parser = make_parser(__doc__, RESULT, ", with vLLM and all shapes")
    parser.add_argument("--shapes", default=",".join(SHAPES), help="default all: %(default)s")
    parser.add_argument("--runs", type=int, default=3, help="runs of each; default 3")
    parser.add_argument("--requests", type=int, default=24, help="of the mix; default 24")
    options = parser.parse_args()
    with failures_exit("architectures"):
        shapes = select_named(options.shapes, SHAPES, "shape")
        default, version = prepare_model(), None
        if environment := os.environ.get("VLLM_VENV"):
            version = Vllm(default, Path(environment)).version()
        else:
            log("vLLM is left out: VLLM_VENV names no environment that has it")
        systems = compared_systems(Path(environment) if environment else None)
        requests = renewed(read_mix(MIX), 0, options.requests)
        result: dict[str, Any] = {
            **provenance("torch", "transformers"),
            "vllm": version,
            "num_runs": options.runs,
            "num_requests": len(requests),
            "prompt_tokens": sum(len(request.prompt_token_ids) for request in requests),
            "output_tokens": sum(request.output_tokens for request in requests),
            "shapes": {
                name: measure_shape(shape, default, systems, requests, options.runs) for name, shape in shapes.items()
            },
        }
        result["targets"] = targets(result)
        is_whole = version is not None and shapes.keys() == SHAPES.keys()
        publish(
            result, options.output or (RESULT if is_whole else None), {"Architectures": architectures_table(result)}
        )


if __name__ == "__main__":
    main()
