"""Runs of the class `LLM`, each in a process of its own."""

import json
import os
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from benchmarks.processes import BenchmarkFailed, running
from benchmarks.record import ROOT
from benchmarks.vllm import vllm_dtype, vllm_environment, vllm_title
from quire_client.bench.mix import MixRequest

PROGRAM = Path(__file__).with_name("program.py")
OPENVINO_PROGRAM = Path(__file__).with_name("openvino_program.py")


@dataclass(frozen=True)
class OfflineSystem:
    """A package, the Python that has it, variables of its process, and the program that runs requests with options of
    its own.
    """

    package: str
    title: str
    python: Path = Path(sys.executable)
    environment: Mapping[str, str] = field(default_factory=dict)
    program: Path = PROGRAM
    options: tuple[str, ...] = ()

    def with_options(self, *options: str) -> "OfflineSystem":
        return replace(self, options=options)


@dataclass(frozen=True)
class OfflineRun:
    """A call that continued all prompts, in seconds, and the output tokens of each."""

    seconds: float
    token_ids: list[list[int]]

    @property
    def tokens_per_second(self) -> float:
        """Output tokens over the time of the call."""
        return sum(map(len, self.token_ids)) / self.seconds


_TREE = os.pathsep.join(str(ROOT / folder) for folder in ("", "protos", "kernels", "client"))
QUIRE = OfflineSystem("quire", "quire.LLM", environment={"PYTHONPATH": _TREE})
"""By default in the dtype of the program."""


def vllm(environment: Path) -> OfflineSystem:
    """vLLM's CPU build, in a virtual environment of its own."""
    python, options = environment / "bin" / "python", ("--package", "vllm", "--dtype", vllm_dtype())
    return OfflineSystem("vllm", vllm_title("vllm.LLM"), python, vllm_environment(), options=options)


def run_offline(
    system: OfflineSystem, model: Path, requests: Sequence[MixRequest], max_sequences: int | None = None
) -> OfflineRun:
    """Loads the model and generates the outputs of all requests. Raises BenchmarkFailed.

    So many sequences are computed at a time; None: the default of the system.
    """
    with tempfile.TemporaryDirectory(prefix="quire-bench-") as folder:
        given, output = Path(folder, "requests.json"), Path(folder, "result.json")
        given.write_text(json.dumps([[request.prompt_token_ids, request.output_tokens] for request in requests]))
        command = [system.python, system.program, *system.options, "--model", model]
        command += ["--requests", given, "--output", output]
        if max_sequences is not None:
            command += ["--max-sequences", max_sequences]
        with running(system.title, list(map(str, command)), system.environment) as process:
            status = process.popen.wait()
            if status != 0:
                raise BenchmarkFailed(f"{system.title} ended with status {status}:\n{process.last_lines()}")
        run = OfflineRun(**json.loads(output.read_bytes()))
    if [len(ids) for ids in run.token_ids] != [request.output_tokens for request in requests]:
        raise BenchmarkFailed(f"{system.title}: outputs of other lengths than requested")
    return run
