"""Compares llguidance with xgrammar on the constraints of the tests (`make bench-grammar-engines`).

    python -m benchmarks.grammar_engines [--runs 3] [--output FILE]

40 schemas and 20 regular expressions are compiled, and texts are walked through, with the default model's vocabulary,
on one thread of a process for each run, in an environment with pinned packages that is made on first use. Times are
medians of the runs. jsonschema and re judge the texts.
"""

import json
import subprocess
from collections.abc import Sequence
from pathlib import Path
from statistics import mean, median
from typing import Any

from benchmarks.environments import python_with
from benchmarks.processes import BenchmarkFailed
from benchmarks.record import RESULTS, provenance
from benchmarks.report import Cells
from benchmarks.runner import failures_exit, log, make_parser, publish
from quire_client.bench.latency import percentile
from svc_common.models import eos_token_ids_of, resolve_model
from tests.acceptance.constrained_cases import ConstraintCase, load_cases

RESULT = RESULTS / "grammar_engines.json"
_PROGRAM = Path(__file__).with_name("walk.py")


def _stated(case: ConstraintCase) -> dict[str, str]:
    if "regex" in case.option:
        return {"regex": case.option["regex"]}
    return {"schema": json.dumps(case.option["json_schema"])}


def _run(python: Path, model: Path, cases: Sequence[ConstraintCase]) -> dict[str, Any]:
    """What `walk.py` prints. Raises BenchmarkFailed."""
    asked = [{"name": case.name, "lark": case.grammar, **_stated(case)} for case in cases]
    done = subprocess.run(
        [python, _PROGRAM, model, str(eos_token_ids_of(model)[0])],
        input=json.dumps(asked),
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        raise BenchmarkFailed(f"walk.py: {done.stderr[-500:]}")
    result: dict[str, Any] = json.loads(done.stdout)
    return result


def _figures(found: Sequence[dict[str, Any]], cases: Sequence[ConstraintCase]) -> dict[str, Any]:
    """One engine's figures of a run: times in milliseconds and microseconds, and how many whole texts are valid."""
    compiled = [(case, each) for case, each in zip(cases, found, strict=True) if "error" not in each]
    compiles = sorted(1e3 * seconds for _, each in compiled for seconds in each["compile"])
    masks = sorted(1e6 * seconds for _, each in compiled for seconds in each["masks"])
    whole = [(case, text) for case, each in compiled for text, is_whole in each["texts"] if is_whole]
    invalid = [(case.name, text) for case, text in whole if not case.is_valid(text)]
    return {
        "compiled": len(compiled),
        "compile_p50_ms": median(compiles),
        "compile_max_ms": compiles[-1],
        "mask_p50_us": median(masks),
        "mask_mean_us": mean(masks),
        "mask_p99_us": percentile(masks, 99),
        "texts": len(whole),
        "invalid_texts": len(invalid),
        "cases_with_invalid_texts": sorted({name for name, _ in invalid}),
    }


def engines_table(result: dict[str, Any]) -> Cells:
    """A row for each engine."""
    columns = (
        *("engine", "cases that it compiles", "compilation, ms, p50 / longest", "mask, µs, p50 / mean / p99"),
        *("whole texts", "of them invalid", "cases with invalid texts"),
    )
    rows = [
        [
            f"{name} {each['version']}",
            f"{each['compiled']} of {result['cases']}",
            f"{each['compile_p50_ms']:.2f} / {each['compile_max_ms']:.1f}",
            f"{each['mask_p50_us']:.1f} / {each['mask_mean_us']:.1f} / {each['mask_p99_us']:.0f}",
            str(each["texts"]),
            str(each["invalid_texts"]),
            str(len(each["cases_with_invalid_texts"])),
        ]
        for name, each in result["engines"].items()
    ]
    return Cells(columns, rows)


def main() -> None:
    parser = make_parser(__doc__, RESULT)
    parser.add_argument("--runs", type=int, default=3, help="default %(default)s")
    options = parser.parse_args()
    with failures_exit("grammar_engines"):
        python, model, cases = python_with("xgrammar"), resolve_model(None).path, load_cases()
        runs: list[dict[str, Any]] = []
        for number in range(options.runs):
            log(f"run {number + 1} of {options.runs}")
            runs.append(_run(python, model, cases))
        engines: dict[str, Any] = {}
        for name, first in runs[0].items():
            figures = [_figures(run[name]["cases"], cases) for run in runs]
            times = {key: median(each[key] for each in figures) for key in figures[0] if key.endswith(("_ms", "_us"))}
            engines[name] = {"version": first["version"], **figures[0], **times}
        result = {**provenance(), "runs": options.runs, "cases": len(cases), "engines": engines}
    publish(result, options.output or RESULT, {"Engines of grammars": engines_table(result)})


if __name__ == "__main__":
    main()
