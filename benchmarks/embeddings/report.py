"""The rates of embeddings as a table, and the targets."""

from typing import Any

from benchmarks.report import Cells, Sense, origin, target, target_list

QUIRE, REFERENCE = "quire-float32", "sentence-transformers"
_LEAST_RATIO = 1.5


def targets(result: dict[str, Any]) -> list[dict[str, Any]]:
    """Quire's rate in float32 over that of sentence-transformers, for each load that both have had."""
    return [
        target(
            f"{case['load']}: Quire's rate over that of sentence-transformers, both in float32",
            rates[QUIRE] / rates[REFERENCE],
            Sense.AT_LEAST,
            _LEAST_RATIO,
        )
        for case in result["cases"]
        if {QUIRE, REFERENCE} <= (rates := case["texts_per_second"]).keys()
    ]


def embeddings_table(result: dict[str, Any]) -> Cells:
    """A row for each load, with the ratio of Quire's float32 to the best other system beside it."""
    names = list(result["systems"])
    rows = []
    for case in result["cases"]:
        rates = case["texts_per_second"]
        cells = [f"{rates[name]:,.0f}" if name in rates else "–" for name in names]
        others = [rate for name, rate in rates.items() if not name.startswith("quire")]
        ratio = f"{rates[QUIRE] / max(others):.2f}" if QUIRE in rates and others else "–"
        rows.append([case["load"], *cells, ratio])
    return Cells(("texts", *result["systems"].values(), "Quire, float32, over the best other"), rows)


def embeddings_section(result: dict[str, Any]) -> str:
    """The section of docs/performance.md."""
    versions = ", ".join(f"{name} {version}" for name, version in result["versions"].items())
    size = "" if result["scale"] == 1 else f" with {result['scale']:g} of the texts"
    head = f"Texts per second, medians of {result['runs']} runs in turns{size}; {origin(result)}, {versions}."
    return f"{head}\n\n{embeddings_table(result).markdown()}\n\n{target_list(result)}"
