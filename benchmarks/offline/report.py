"""The comparison of classes as a table, and its target."""

from typing import Any

from benchmarks.report import Cells, Sense, origin, target, target_list

_LEAST_RATIO = 1.7
LOADS = "one at a time", "all in one call"


def targets(result: dict[str, Any]) -> list[dict[str, Any]]:
    """Quire's rate over that of vLLM's class, where both were measured."""
    rates = {name: system["output_tokens_per_second"] for name, system in result["systems"].items()}
    if "vllm" not in rates:
        return []
    what = "output tokens per second of quire.LLM over those of vllm.LLM"
    return [target(what, rates["quire"] / rates["vllm"], Sense.AT_LEAST, _LEAST_RATIO)]


def offline_table(result: dict[str, Any]) -> Cells:
    """A row for each class."""
    rows = []
    for system in result["systems"].values():
        runs = ", ".join(f"{rate:,.0f}" for rate in system["runs"])
        rows.append([system["title"], f"{system['output_tokens_per_second']:,.0f}", runs])
    return Cells(("class", "output tokens/s", "runs"), rows)


def offline_section(result: dict[str, Any]) -> str:
    """The section of docs/performance.md."""
    head = (
        f"{result['num_requests']} requests of the mix in one call, {result['prompt_tokens']:,} prompt and "
        f"{result['output_tokens']:,} output tokens. {result['model']}, bfloat16, medians of {result['num_runs']}; "
        f"{origin(result)}, {result['vllm']}."
    )
    return f"{head}\n\n{offline_table(result).markdown()}\n\n{target_list(result)}"


def gguf_offline_table(result: dict[str, Any]) -> Cells:
    """A row for each package, and Quire's rate over the other's."""
    rows = [
        [system["title"], *(f"{system['loads'][load]['output_tokens_per_second']:,.0f}" for load in LOADS)]
        for system in result["systems"].values()
    ]
    quire, other = (result["systems"][name]["loads"] for name in ("quire", "openvino_genai"))
    ratios = [quire[load]["output_tokens_per_second"] / other[load]["output_tokens_per_second"] for load in LOADS]
    rows.append(["ratio", *(f"{ratio:.2f}" for ratio in ratios)])
    return Cells(("output tokens/s", *LOADS), rows)


def gguf_offline_section(result: dict[str, Any]) -> str:
    """The section of docs/performance.md."""
    head = (
        f"{result['file']}; eight requests of the mix one at a time, then {result['num_requests']} in one call. Quire "
        f"in {result['quantization']}, OpenVINO GenAI {result['openvino-genai']} with steps of up to 1,024 tokens; "
        f"medians of {result['num_runs']}; {origin(result)}."
    )
    return f"{head}\n\n{gguf_offline_table(result).markdown()}"
