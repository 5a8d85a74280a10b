"""The comparison on other architectures as a table, and its targets."""

from typing import Any

from benchmarks.report import Cells, Sense, origin, target, target_list

_LEAST_RATIOS = (
    ("quire", "transformers", "Quire over transformers' static batches", 6.0),
    ("quire-8", "vllm-8", "Quire over vLLM, both 8 at a time", 1.5),
)
_RATE = "output_tokens_per_second"


def targets(result: dict[str, Any]) -> list[dict[str, Any]]:
    """Ratios of output tokens per second, of those systems that computed a model."""
    found = []
    for shape in result["shapes"].values():
        systems = shape["systems"]
        for ours, peer, what, least in _LEAST_RATIOS:
            if _RATE in systems.get(peer, {}):
                ratio = systems[ours][_RATE] / systems[peer][_RATE]
                found.append(target(f"{shape['title']}: {what}", ratio, Sense.AT_LEAST, least))
    return found


def architectures_table(result: dict[str, Any]) -> Cells:
    """A row for each model and system."""
    rows = []
    for shape in result["shapes"].values():
        for system in shape["systems"].values():
            if _RATE in system:
                figures = [f"{system[_RATE]:,.0f}", ", ".join(f"{rate:,.0f}" for rate in system["runs"])]
            else:
                figures = ["–", system["error"]]
            rows.append([f"{shape['title']}, {shape['parameters'] / 1e6:,.0f}M parameters", system["title"], *figures])
    return Cells(("model", "system", "output tokens/s", "runs"), rows)


def architectures_section(result: dict[str, Any]) -> str:
    """The section of docs/performance.md."""
    peer = "" if result["vllm"] is None else f", {result['vllm']}"
    head = (
        f"{result['num_requests']} requests of the mix, {result['prompt_tokens']:,} prompt and "
        f"{result['output_tokens']:,} output tokens, random weights, bfloat16, medians of {result['num_runs']}; "
        f"{origin(result)}{peer}."
    )
    return f"{head}\n\n{architectures_table(result).markdown()}\n\n{target_list(result)}"
