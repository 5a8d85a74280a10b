"""The rates of embeddings as a table, and the targets."""

from typing import Any

from benchmarks.report import Cells, Sense, origin, target, target_list

_PAIRS = (
    ("quire-library", "sentence-transformers", "Quire in process over sentence-transformers"),
    ("quire-float32", "infinity", "Quire's server over infinity-emb's"),
    *(
        (f"quire-library-{dtype}", f"sentence-transformers-{dtype}", f"Quire over sentence-transformers, {dtype}")
        for dtype in ("float32", "bfloat16")
    ),
)
"""Like beside like, in the same dtype: libraries in a program's own process, and servers."""
_LEAST_RATIO = 1.5


def _ratio(rates: dict[str, float], ours: str, theirs: str) -> float | None:
    return rates[ours] / rates[theirs] if {ours, theirs} <= rates.keys() else None


def targets(result: dict[str, Any]) -> list[dict[str, Any]]:
    """The ratios of Quire's rates to the others', for each load that both have had."""
    return [
        target(f"{case['load']}: {title}", ratio, Sense.AT_LEAST, _LEAST_RATIO)
        for ours, theirs, title in _PAIRS
        for case in result["cases"]
        if (ratio := _ratio(case["texts_per_second"], ours, theirs)) is not None
    ]


def embeddings_table(result: dict[str, Any]) -> Cells:
    """A row for each load, with the ratios beside it."""
    names = list(result["systems"])
    pairs = [pair for pair in _PAIRS if {*pair[:2]} <= {*names}]
    rows = []
    for case in result["cases"]:
        rates = case["texts_per_second"]
        cells = [f"{rates[name]:,.0f}" if name in rates else "–" for name in names]
        ratios = [_ratio(rates, ours, theirs) for ours, theirs, _ in pairs]
        rows.append([case["load"], *cells, *("–" if ratio is None else f"{ratio:.2f}" for ratio in ratios)])
    return Cells(("texts", *result["systems"].values(), *(title for _, _, title in pairs)), rows)


def embeddings_section(result: dict[str, Any]) -> str:
    """The section of docs/performance.md."""
    versions = ", ".join(f"{name} {version}" for name, version in result["versions"].items())
    size = "" if result["scale"] == 1 else f" with {result['scale']:g} of the texts"
    head = f"Texts per second, medians of {result['runs']} runs in turns{size}; {origin(result)}, {versions}."
    return f"{head}\n\n{embeddings_table(result).markdown()}\n\n{target_list(result)}"
