"""The result of `make gpu-check` as a section of docs/performance.md."""

from typing import Any

from benchmarks.kernels.report import kernels_section
from benchmarks.report import Cells


def decode_table(result: dict[str, Any]) -> Cells:
    """A row for each batch size."""
    columns = ("sequences", "context", "step, ms", "floor, ms", "of the floor", "tokens/s", "device idle")
    rows = [
        [
            f"{case['num_seqs']}",
            f"{case['context']:,}",
            f"{case['ms']:.2f}",
            f"{case['floor_ms']:.2f}",
            f"{case['of_floor']:.2f}",
            f"{case['tokens_per_second']:,.0f}",
            "–" if case["idle_share"] is None else f"{case['idle_share']:.1%}",
        ]
        for case in result["cases"]
    ]
    return Cells(columns, rows, num_labels=0)


def mixed_table(result: dict[str, Any]) -> Cells:
    """A row for each size of a mixed step."""
    rows = [
        [f"{row['num_decodes']}", f"{row['chunk']}", f"{row['host_ms']:.2f}", f"{row['ms']:.2f}"]
        for row in result.get("mixed", [])
    ]
    return Cells(("decodes", "prompt tokens", "host, ms", "step, ms"), rows, num_labels=0)


def gpu_section(result: dict[str, Any]) -> str:
    """The section; it names parts that failed."""
    tests = result["tests"]
    counts = ", ".join(f"{count} {outcome.lower()}" for outcome, count in sorted(tests.get("counts", {}).items()))
    whole = "" if tests["complete"] else "; not all ended in time"
    checks = result["correct"].get("checks", [])
    num_right = sum(check["holds"] for check in checks)
    parts = [
        f"{result['gpu']['name']}. {num_right} of {len(checks)} comparisons of kernels and tokens hold. "
        f"Of {tests.get('num_tests', 0)} tests: {counts or 'none ran'}{whole}."
    ]
    parts += [f"- {remark}" for remark in result.get("remarks", ())]
    for name, section in (("decode", _decode_section), ("kernels", kernels_section), ("ops", kernels_section)):
        part = result[name]
        parts.append(
            section(part) if part.get("cases") else f"No {name}: {part.get('error', 'nothing')}".split("\n")[0]
        )
    return "\n\n".join(parts)


def _decode_section(result: dict[str, Any]) -> str:
    head = f"Decoding with Llama 3 8B's shape and random weights ({result['weight_bytes'] / 1e9:.1f} GB, bfloat16):"
    mixed = f"\n\nSteps of decodes beside a prompt:\n\n{mixed_table(result).markdown()}" if result.get("mixed") else ""
    return f"{head}\n\n{decode_table(result).markdown()}{mixed}"
