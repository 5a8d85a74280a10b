"""Compares perplexities with llama.cpp's, and of dequantized weights, for GGUF files (`make bench-gguf-quality`).

    python -m benchmarks.gguf.quality [--types Q8_0,Q4_K_M,…] [--output FILE]

llama.cpp's own tool writes the default model in each type, from its file in Q4_1. Both then score the text of
`benchmarks.quality` as llama.cpp's tool does: in stretches of 512 tokens without overlap, of which the second half
counts. Quire computes with the codes of the file, once with activations in 8 bits, as llama.cpp does, and once with
activations in bfloat16. The reference for the latter is Quire in float32 on the weights as gguf, the package of the
format's authors, dequantizes them.
"""

import re
import subprocess
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from benchmarks.gguf.llama_cpp import llama_cpp_programs
from benchmarks.processes import BenchmarkFailed
from benchmarks.quality import TEXT, Window, measure
from benchmarks.record import RESULTS, provenance
from benchmarks.report import Cells, Sense, origin, target, target_list
from benchmarks.runner import failures_exit, log, make_parser, publish
from worker_svc.gguf.conversion import GgufConversion
from worker_svc.prepare import fetch_default_gguf, prepare

RESULT = RESULTS / "gguf_quality.json"
TYPES = ("Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q2_K", "Q3_K_M", "Q4_K_M", "Q5_K_M", "Q6_K", "IQ4_NL", "IQ4_XS")
_STRETCH = 512
_FILE_TYPE = "Q4_1"  # of the default model's own file
_SETTINGS = {
    "quire": {"dtype": "bfloat16", "quantization": "w8a8"},
    "quire_bfloat16": {"dtype": "bfloat16", "quantization": "w8a16"},
}
_REFERENCE = {"dtype": "float32"}
_MOST_PERCENT = 0.5


def stretches_of(tokens: list[int]) -> list[Window]:
    """Whole stretches of the text. As in llama.cpp's tool, the token at the middle is the last that is given."""
    starts = range(0, len(tokens) - _STRETCH + 1, _STRETCH)
    return [Window(tokens[start : start + _STRETCH], _STRETCH // 2 + 1) for start in starts]


def llama_cpp_perplexity(programs: Path, path: Path) -> float:
    """The final estimate of llama.cpp's tool. Raises BenchmarkFailed."""
    text = _run(programs / "llama-perplexity", "--model", path, "--file", TEXT, "--ctx-size", str(_STRETCH))
    found = re.search(r"Final estimate: PPL = ([\d.]+)", text)
    if found is None:
        raise BenchmarkFailed(f"llama-perplexity printed no estimate:\n{text[-500:]}")
    return float(found[1])


def perplexity(directory: Path, settings: Mapping[str, str]) -> float:
    """Quire's with these settings, of the same stretches."""
    tokenizer = Tokenizer.from_file(str(directory / "tokenizer.json"))
    tokens = tokenizer.encode(TEXT.read_text(), add_special_tokens=False).ids
    return float(measure({**settings, "model": str(directory)}, stretches_of(tokens))["perplexity"])


def measure_type(name: str, original: Path, programs: Path) -> dict[str, float]:
    """Both perplexities of the model in one type."""
    with tempfile.TemporaryDirectory(prefix="quire-bench-") as folder:
        path = original
        if name != _FILE_TYPE:
            path = Path(folder, f"{name}.gguf")
            _run(programs / "llama-quantize", "--allow-requantize", original, path, name)
        kept = prepare(str(path), log).path
        figures = {kind: perplexity(kept, settings) for kind, settings in _SETTINGS.items()}
        figures["llama_cpp"] = llama_cpp_perplexity(programs, path)
        dequantized = Path(folder, "dequantized")
        dequantized.mkdir()
        GgufConversion(path, dequantized, log).run(keeps_blocks=False)
        figures["dequantized"] = perplexity(dequantized, _REFERENCE)
    log(f"{name}: {figures}")
    return figures


def _run(*command: str | Path) -> str:
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False)
    if done.returncode != 0:
        raise BenchmarkFailed(f"{Path(command[0]).name} ended with status {done.returncode}:\n{done.stdout[-500:]}")
    return done.stdout


def targets(types: Mapping[str, Mapping[str, float]]) -> list[dict[str, Any]]:
    """With activations in 8 bits, no perplexity may exceed llama.cpp's by more than the bound; lower is no fault.
    With activations in bfloat16, none may differ by more from that of the dequantized weights.
    """
    above = max(100 * (one["quire"] / one["llama_cpp"] - 1) for one in types.values())
    apart = max(100 * abs(one["quire_bfloat16"] / one["dequantized"] - 1) for one in types.values())
    return [
        target("perplexity above llama.cpp's, %, the most of all types", above, Sense.AT_MOST, _MOST_PERCENT),
        target(
            "activations in bfloat16: difference from the dequantized weights, %, the most of all types",
            apart,
            Sense.AT_MOST,
            _MOST_PERCENT,
        ),
    ]


def gguf_quality_table(result: dict[str, Any]) -> Cells:
    """A row for each type."""
    rows = [
        [
            name,
            f"{one['quire']:.3f}",
            f"{one['llama_cpp']:.3f}",
            f"{one['quire'] / one['llama_cpp'] - 1:+.2%}",
            f"{one['quire_bfloat16']:.3f}",
            f"{one['dequantized']:.3f}",
            f"{one['quire_bfloat16'] / one['dequantized'] - 1:+.2%}",
        ]
        for name, one in result["types"].items()
    ]
    return Cells(
        ("type", "Quire", "llama.cpp", "against llama.cpp", "Quire, bfloat16", "dequantized", "against dequantized"),
        rows,
    )


def gguf_quality_section(result: dict[str, Any]) -> str:
    """The section of docs/performance.md."""
    return f"{origin(result)}.\n\n{gguf_quality_table(result).markdown()}\n\n{target_list(result)}"


def main() -> None:
    parser = make_parser(__doc__, RESULT, ", for all types")
    parser.add_argument("--types", default=",".join(TYPES), help="default all: %(default)s")
    options = parser.parse_args()
    names = options.types.split(",")
    if unknown := [name for name in names if name not in TYPES]:
        parser.error(f"no such type: {', '.join(unknown)}")
    with failures_exit("gguf.quality"), tempfile.TemporaryDirectory(prefix="quire-bench-") as folder:
        programs, original = llama_cpp_programs(), fetch_default_gguf(Path(folder), log)
        types = {name: measure_type(name, original, programs) for name in names}
    result = {**provenance("torch"), "types": types}
    result["targets"] = targets(types)
    output = options.output or (RESULT if names == list(TYPES) else None)
    publish(result, output, {"Perplexities": gguf_quality_table(result)})


if __name__ == "__main__":
    main()
