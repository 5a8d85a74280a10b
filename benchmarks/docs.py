"""Writes what results/ holds into docs/, so that pages and results cannot differ (`make bench-docs`).

    python -m benchmarks.docs

Each section of a page between `<!-- NAME: … -->` and `<!-- end of NAME -->` is written from its result; the rest
stays as it is. The plots are drawn anew too.
"""

import os
import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from benchmarks.aot.report import aot_section
from benchmarks.architectures.report import architectures_section
from benchmarks.checkpoints.report import checkpoints_section
from benchmarks.decode_balance.report import decode_balance_section
from benchmarks.deterministic import deterministic_section
from benchmarks.embeddings.report import embeddings_section
from benchmarks.formats import formats_section
from benchmarks.gguf.quality import gguf_quality_section
from benchmarks.gguf.report import gguf_section
from benchmarks.gpu.report import gpu_section
from benchmarks.grammars import grammars_section
from benchmarks.greedy import greedy_section
from benchmarks.journal.report import journal_section
from benchmarks.kernels.report import kernels_section
from benchmarks.loading import loading_section
from benchmarks.offline.report import gguf_offline_section, offline_section
from benchmarks.plot import Chart, draw
from benchmarks.pressure.report import pressure_section
from benchmarks.processor import Processor
from benchmarks.quality import quality_section
from benchmarks.record import RESULTS, ROOT, read_result
from benchmarks.recovery.report import recovery_section
from benchmarks.security.report import security_section
from benchmarks.serving.report import serving_section, sweep_charts, sweep_section
from benchmarks.simulator.gpu_model.report import gpu_model_section
from benchmarks.simulator.scenarios import SCENARIOS
from benchmarks.steps.report import steps_section

DOCS = ROOT / "docs"


@dataclass(frozen=True)
class Section:
    """A part of a page that is written from a result, and the command that measures it."""

    name: str
    result: Path
    command: str
    render: Callable[[dict[str, Any]], str]
    processor: Processor | None = None
    """The kind of which the figures are; None: any."""

    def text(self, page: Path) -> str:
        """For the page at this path."""
        result = read_result(self.result)
        if result is None:
            return f"Not measured yet: `{self.command}`."
        return f"{self.render(result)}\n\nRepeat with `{self.command}`; all of it is in {_link(self.result, page)}."


@dataclass(frozen=True)
class Plot:
    """A plot of a result."""

    path: Path
    result: Path
    charts: Callable[[dict[str, Any]], Sequence[Chart]]

    def drawn(self) -> str | None:
        """The picture as SVG; None while there is no result."""
        result = read_result(self.result)
        return None if result is None else draw(self.charts(result))


@dataclass(frozen=True)
class Page:
    """A page with sections and plots that are written from results."""

    path: Path
    sections: tuple[Section, ...]
    plots: tuple[Plot, ...]

    def written(self) -> str:
        """The page with its sections written anew."""
        page = self.path.read_text()
        if len(self.sections) > 1:
            page = rewritten(page, "measured code", self.measured_code())
        for section in self.sections:
            page = rewritten(page, section.name, section.text(self.path))
        return page

    def measured_code(self) -> str:
        """Whether all figures of the page are of the same code."""
        results = [result for section in self.sections if (result := read_result(section.result)) is not None]
        codes = {result.get("code") for result in results}
        if len(codes) == 1 and None not in codes:
            return "All tables of this page were measured on the same code."
        return (
            "The tables of this page were measured on different commits, which they name. `make bench-all` measures "
            "again what is older than the code as it stands."
        )


def _by_processor(section: Section, others: Mapping[Processor, str]) -> Iterator[Section]:
    """A section, and those of other kinds of processors, whose results have files of their own. The flags of each are
    added to the command.
    """
    yield section
    for processor, flags in others.items():
        kind = processor.name.lower()
        result = section.result.with_stem(f"{section.result.stem}_{kind}")
        command = f"{section.command} OUTPUT={result.name}{flags}"
        yield replace(section, name=f"{section.name} {kind}", result=result, command=command, processor=processor)


PERFORMANCE = (
    *_by_processor(
        Section(
            "serving", RESULTS / "serving.json", "VLLM_VENV=ENVIRONMENT make bench", serving_section, Processor.AMX
        ),
        {Processor.AVX512: ""},
    ),
    Section(
        "continuous batching",
        RESULTS / "continuous_batching.json",
        "VLLM_VENV=ENVIRONMENT make bench-continuous-batching",
        serving_section,
    ),
    Section("sweep", RESULTS / "sweep.json", "VLLM_VENV=ENVIRONMENT make bench-sweep", sweep_section),
    Section("embeddings", RESULTS / "embeddings.json", "make bench-embeddings", embeddings_section),
    *_by_processor(
        Section(
            "embeddings of a decoder",
            RESULTS / "embeddings_of_decoder.json",
            "make bench-decoder-embeddings",
            embeddings_section,
            Processor.AMX,
        ),
        {Processor.AVX512: ""},
    ),
    *_by_processor(
        Section(
            "offline",
            RESULTS / "offline.json",
            "VLLM_VENV=ENVIRONMENT make bench-offline",
            offline_section,
            Processor.AMX,
        ),
        {Processor.AVX2: " REQUESTS=96", Processor.AVX512: ""},
    ),
    Section("offline gguf", RESULTS / "offline_gguf.json", "make bench-openvino", gguf_offline_section),
    *_by_processor(
        Section(
            "architectures",
            RESULTS / "architectures.json",
            "VLLM_VENV=ENVIRONMENT make bench-architectures",
            architectures_section,
            Processor.AMX,
        ),
        {Processor.AVX512: ""},
    ),
    Section("steps", RESULTS / "steps.json", "make bench-steps", steps_section),
    Section("security", RESULTS / "security.json", "make bench-security", security_section),
    Section("pressure", RESULTS / "pressure.json", "make bench-pressure", pressure_section),
    *_by_processor(
        Section("kernels", RESULTS / "kernels.json", "make bench-kernels", kernels_section, Processor.AMX),
        {Processor.AVX512: ""},
    ),
    *_by_processor(
        Section("formats", RESULTS / "formats.json", "make bench-formats", formats_section, Processor.AMX),
        {Processor.AVX512: ""},
    ),
    Section("greedy", RESULTS / "greedy.json", "make bench-greedy", greedy_section),
    Section("quality", RESULTS / "quality.json", "make bench-quality", quality_section),
    Section("loading", RESULTS / "loading.json", "make bench-loading", loading_section),
    Section("gguf", RESULTS / "gguf.json", "make bench-gguf", gguf_section),
    Section("gguf quality", RESULTS / "gguf_quality.json", "make bench-gguf-quality", gguf_quality_section),
    Section("checkpoints", RESULTS / "checkpoints.json", "make bench-checkpoints", checkpoints_section),
    Section("aot", RESULTS / "aot.json", "python -m benchmarks.aot --update", aot_section),
    Section(
        "decode balance",
        RESULTS / "decode_balance.json",
        "python -m benchmarks.decode_balance",
        decode_balance_section,
    ),
    Section("gpu", RESULTS / "gpu_check.json", "make gpu-check", gpu_section),
    Section("gpu model", RESULTS / "gpu_model.json", "python -m benchmarks.simulator.gpu_model", gpu_model_section),
)
GUARANTEES = (
    Section("deterministic", RESULTS / "deterministic.json", "make bench-deterministic", deterministic_section),
    Section("recovery", RESULTS / "recovery.json", "make bench-recovery", recovery_section),
    Section("journal", RESULTS / "journal.json", "make bench-journal", journal_section),
)
POLICIES = tuple(
    Section(
        scenario.name,
        scenario.result_path,
        f"python -m benchmarks.simulator {scenario.name}",
        scenario.section,
    )
    for scenario in SCENARIOS.values()
)
PAGES = (
    Page(DOCS / "performance.md", PERFORMANCE, (Plot(DOCS / "sweep.svg", RESULTS / "sweep.json", sweep_charts),)),
    Page(DOCS / "guarantees.md", GUARANTEES, ()),
    Page(
        DOCS / "design" / "grammars.md",
        (Section("grammars", RESULTS / "grammars.json", "make bench-grammars", grammars_section),),
        (),
    ),
    Page(
        DOCS / "policies.md",
        POLICIES,
        tuple(
            Plot(scenario.plot_path, scenario.result_path, scenario.charts)
            for scenario in SCENARIOS.values()
            if scenario.charts is not None
        ),
    ),
)


def rewritten(page: str, name: str, text: str) -> str:
    """The page with a section's text replaced. Raises ValueError where the page has no such section, or two."""
    marks = rf"(<!-- {re.escape(name)}: [^>]*-->\n)(.*?)(<!-- end of {re.escape(name)} -->)"
    new, count = re.subn(marks, lambda match: f"{match[1]}\n{text}\n\n{match[3]}", page, flags=re.DOTALL)
    if count != 1:
        raise ValueError(f"the page has {count} sections {name}")
    return new


def _link(path: Path, page: Path) -> str:
    return f"[`{path.name}`]({os.path.relpath(path, page.parent)})"


def main() -> None:
    for page in PAGES:
        page.path.write_text(page.written())
        for plot in page.plots:
            if (drawn := plot.drawn()) is not None:
                plot.path.write_text(drawn)
        print(f"written to {page.path.relative_to(ROOT)}", file=sys.stderr)


if __name__ == "__main__":
    main()
