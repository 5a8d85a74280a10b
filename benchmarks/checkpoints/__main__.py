"""Compares perplexities of quantized checkpoints with those that their own tools compute (`make bench-checkpoints`).

    python -m benchmarks.checkpoints [--checkpoints gptq-8,awq-4,…] [--output FILE]

auto-round, gptqmodel, llmcompressor and bitsandbytes quantize the default model on the CPU, and write its
checkpoints in the formats of GPTQ, AWQ and compressed-tensors, and in their own. Codes are rounded to the nearest,
which is fast, and of act-order (`desc_act`) found by GPTQ from a page of docs/. What is compared is how the same files
are computed, so it does not matter that better codes exist. The tool of each format, and then Quire with a setting
that keeps the codes, score the text of `benchmarks.quality` in bfloat16, in stretches of 512 tokens of which the second
half counts.
"""

import json
import tempfile
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from benchmarks.checkpoints.report import checkpoints_table, targets
from benchmarks.checkpoints.schemes import CHECKPOINTS, Checkpoint
from benchmarks.environments import python_with, version_of
from benchmarks.gguf.quality import perplexity, stretches_of
from benchmarks.processes import BenchmarkFailed, running
from benchmarks.quality import TEXT, Window
from benchmarks.record import RESULTS, ROOT, provenance
from benchmarks.runner import failures_exit, log, make_parser, publish, select_named
from svc_common.models import ServedModel, resolve_model

RESULT = RESULTS / "checkpoints.json"
PACKAGES = {
    "auto-round": "gptqmodel",
    "gptqmodel": "gptqmodel",
    "llmcompressor": "llmcompressor",
    "compressed-tensors": "llmcompressor",
    "bitsandbytes": "bitsandbytes",
}
"""The packages that write and compute checkpoints, and the environments that have them."""

_PROGRAM = Path(__file__).with_name("program.py")
_CALIBRATION = ROOT / "docs" / "operations.md"
_VARIABLES = {
    "HF_HUB_OFFLINE": "1",
    "TORCHDYNAMO_DISABLE": "1",  # gptqmodel compiles its kernels, which takes longer than they run
    "GPTQMODEL_CPU_WORKERS": "2",  # gptqmodel 7.6 fails with fewer, its default for two processors
}


def stretches(model: ServedModel) -> list[Window]:
    """Those of the text that are scored."""
    tokenizer = Tokenizer.from_file(str(model.path / "tokenizer.json"))
    return stretches_of(tokenizer.encode(TEXT.read_text(), add_special_tokens=False).ids)


def run_tool(checkpoint: Checkpoint, model: ServedModel, windows: list[Window], folder: Path) -> dict[str, Any]:
    """Writes a checkpoint into a folder. Returns its directory and the tool's perplexities. Raises BenchmarkFailed."""
    given, output = folder / "windows.json", folder / "result.json"
    given.write_text(json.dumps([[list(window.tokens), window.num_given] for window in windows]))
    files = {"--model": model.path, "--calibration": _CALIBRATION, "--windows": given, "--output": output}
    command = [python_with(checkpoint.environment), _PROGRAM, "--tool", checkpoint.tool]
    command += ["--scheme", json.dumps(checkpoint.scheme), "--folder", folder / "checkpoint"]
    command += [word for pair in files.items() for word in pair]
    # In the folder: gptqmodel writes logs where it runs.
    with running(checkpoint.tool, list(map(str, command)), _VARIABLES, folder) as process:
        status = process.popen.wait()
        if status != 0:
            raise BenchmarkFailed(f"{checkpoint.tool} ended with status {status}:\n{process.last_lines()}")
    found: dict[str, Any] = json.loads(output.read_bytes())
    return found


def measure_checkpoint(checkpoint: Checkpoint, model: ServedModel, windows: list[Window]) -> dict[str, Any]:
    """Perplexities of one checkpoint: the tool's and Quire's."""
    with tempfile.TemporaryDirectory(prefix="quire-bench-") as folder:
        found = run_tool(checkpoint, model, windows, Path(folder))
        directory = Path(found["directory"])

        def both(tool: float, quantization: str) -> dict[str, Any]:
            quire = perplexity(directory, {"dtype": "bfloat16", "quantization": quantization})
            return {"quantization": quantization, "tool": tool, "quire": quire}

        figures = both(found["perplexity"], checkpoint.quantization)
        if checkpoint.activations_too is not None:
            figures["activations_too"] = both(found["activations_too"], checkpoint.activations_too)
    log(f"{checkpoint.title}: {figures}")
    return {
        "title": checkpoint.title,
        "written_by": checkpoint.tool,
        "computed_by": checkpoint.kernels,
        "scheme": checkpoint.scheme,
        **figures,
    }


def main() -> None:
    parser = make_parser(__doc__, RESULT, ", for all checkpoints")
    parser.add_argument("--checkpoints", default=",".join(CHECKPOINTS), help="default all: %(default)s")
    options = parser.parse_args()
    with failures_exit("checkpoints"):
        chosen = select_named(options.checkpoints, CHECKPOINTS, "checkpoint")
        model = resolve_model(None)
        windows = stretches(model)
        checkpoints = {name: measure_checkpoint(one, model, windows) for name, one in chosen.items()}
    result = {
        **provenance("torch"),
        "model": model.name,
        "num_tokens": sum(len(window.tokens) - window.num_given for window in windows),
        "packages": {package: version_of(environment, package) for package, environment in PACKAGES.items()},
        "checkpoints": checkpoints,
        "targets": targets(checkpoints),
    }
    output = options.output or (RESULT if list(chosen) == list(CHECKPOINTS) else None)
    publish(result, output, {f"Checkpoints of {model.name}": checkpoints_table(result)})


if __name__ == "__main__":
    main()
