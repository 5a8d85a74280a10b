"""Measures the peak of memory while a model is loaded, against what it takes then (`make bench-loading`).

    python -m benchmarks.loading [--formats float32,bfloat16,…] [--output FILE]

The default model's checkpoint, which is in float32, is loaded in each format of weights, and its GGUF file in Q4_1,
each by a process of its own. The peak is the most that the process had in memory while it loaded, pages of mapped files
included. What the process had before is taken off.
"""

import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from benchmarks.processes import BenchmarkFailed
from benchmarks.quality import FORMATS
from benchmarks.record import RESULTS, provenance
from benchmarks.report import Cells, Sense, origin, target, target_list
from benchmarks.runner import failures_exit, log, make_parser, publish, select_named
from svc_common.models import resolve_model
from svc_common.settings import read_settings
from worker_svc.attention import CompiledKernels
from worker_svc.host import available_cpus
from worker_svc.kernel_choice import MATRIX_FORMATS, choose_dtype, start_thread_pool
from worker_svc.model.description_cache import description_of
from worker_svc.model.loading import load
from worker_svc.prepare import fetch_default_gguf, prepare
from worker_svc.settings import WorkerSettings

RESULT = RESULTS / "loading.json"
_GGUF = "gguf"
_TITLES = {_GGUF: "w4a16, of the file in Q4_1"}
CASES: dict[str, dict[str, str]] = {
    **{name: settings for name, settings in FORMATS.items() if "kv_cache_dtype" not in settings},
    _GGUF: {"dtype": "bfloat16", "quantization": "w4a16"},
}
_MOST = 1.2


def load_once(directory: Path, settings: Mapping[str, str]) -> dict[str, float]:
    """Loads a model into this process. Returns the peak of memory and what the model takes, in bytes, and seconds."""
    matrix_format = MATRIX_FORMATS[settings.get("quantization", "none")]
    kernels = CompiledKernels(start_thread_pool(read_settings(WorkerSettings, []), log), matrix_format)
    torch.set_num_threads(available_cpus())  # as a worker does
    description, device = description_of(directory), torch.device("cpu")
    dtype = choose_dtype(settings["dtype"], device)
    torch.ones(64, 64).to(dtype)  # some of torch's code is loaded when it is first used
    Path("/proc/self/clear_refs").write_text("5")  # VmHWM begins anew
    before, began = _memory("VmRSS"), time.perf_counter()
    model = load(directory, description, dtype, device, kernels)
    seconds = time.perf_counter() - began
    figures = {"peak": _memory("VmHWM") - before, "loaded": _memory("VmRSS") - before, "seconds": seconds}
    del model  # not before it was measured
    return figures


def _memory(name: str) -> int:
    """Bytes of this process, by Linux's account."""
    (line,) = (line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(f"{name}:"))
    return int(line.split()[1]) * 1024


def measure(directory: Path, name: str) -> dict[str, float]:
    """As `load_once`, in a process of its own. Raises BenchmarkFailed."""
    command = [sys.executable, "-m", "benchmarks.loading", "--load", str(directory), "--formats", name]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False)
    if done.returncode != 0:
        raise BenchmarkFailed(f"loading in {name} ended with status {done.returncode}")
    figures: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    log(f"{name}: {figures}")
    return figures


def targets(formats: Mapping[str, Mapping[str, float]]) -> list[dict[str, Any]]:
    most = max(figures["peak"] / figures["loaded"] for figures in formats.values())
    return [target("peak while loading over what the model takes, the most of all", most, Sense.AT_MOST, _MOST)]


def loading_table(result: dict[str, Any]) -> Cells:
    """A row for each format."""
    rows = [
        [
            _TITLES.get(name, name),
            f"{figures['loaded'] / 2**20:,.0f}",
            f"{figures['peak'] / 2**20:,.0f}",
            f"{figures['peak'] / figures['loaded']:.2f}",
            f"{figures['seconds']:.1f}",
        ]
        for name, figures in result["formats"].items()
    ]
    return Cells(("weights", "loaded, MiB", "peak while loading, MiB", "ratio", "seconds"), rows)


def loading_section(result: dict[str, Any]) -> str:
    """The section of docs/performance.md."""
    return f"{origin(result)}.\n\n{loading_table(result).markdown()}\n\n{target_list(result)}"


def main() -> None:
    parser = make_parser(__doc__, RESULT, ", for all formats")
    parser.add_argument("--formats", default=",".join(CASES), help="default %(default)s")
    parser.add_argument("--load", type=Path, metavar="DIRECTORY", help="load a model into this process, and print")
    options = parser.parse_args()
    if options.load is not None:
        print(json.dumps(load_once(options.load, CASES[options.formats])))
        return
    with failures_exit("loading"), tempfile.TemporaryDirectory(prefix="quire-bench-") as folder:
        cases, formats = select_named(options.formats, CASES, "format"), {}
        for name in cases:
            path = resolve_model(None).path
            if name == _GGUF:
                path = prepare(str(fetch_default_gguf(Path(folder), log)), log).path
            formats[name] = measure(path, name)
    result = {**provenance("torch"), "formats": formats, "targets": targets(formats)}
    output = options.output or (RESULT if len(cases) == len(CASES) else None)
    publish(result, output, {"Memory": loading_table(result)})


if __name__ == "__main__":
    main()
