"""What the comparison and the sweep both begin with: the model, the systems, and how they end."""

import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from benchmarks.processes import BenchmarkFailed
from benchmarks.record import ROOT
from benchmarks.serving.systems import ContinuousBatching, Quire, System, Vllm
from svc_common.models import ServedModel, resolve_model

MIX = ROOT / "benchmarks" / "mix.json"


def report(text: str) -> None:
    """Tells a person how far it is."""
    print(text, file=sys.stderr, flush=True)


def end_on_signals() -> None:
    """A signal ends this process the way Ctrl-C does, so that what it started ends with it."""
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))


def prepare_model() -> ServedModel:
    """The model that QUIRE_MODEL names, or the default one; made ready first, which it tells of itself."""
    command = [sys.executable, "-m", "worker_svc.prepare"]
    if subprocess.run(command, cwd=ROOT, stdout=subprocess.DEVNULL, check=False).returncode != 0:
        raise BenchmarkFailed("the model could not be made ready")
    return resolve_model(os.environ.get("QUIRE_MODEL"))


def make_systems(model: ServedModel, wanted: Sequence[str] | None) -> list[System]:
    """The systems of these names; None: all that are here but continuous batching, which takes ten minutes for a run.

    vLLM is here where VLLM_VENV names its environment. Raises BenchmarkFailed where one that is named is not here.
    """
    environment = os.environ.get("VLLM_VENV")
    here: list[System] = [Quire(), ContinuousBatching(model)]
    if environment:
        vllm = Vllm(model, Path(environment))
        vllm.version()
        here.insert(1, vllm)
    elif wanted is None:
        report("vLLM is left out: VLLM_VENV names no environment that has it")
    if wanted is None:
        return [system for system in here if not isinstance(system, ContinuousBatching)]
    known = {system.name: system for system in here}
    if missing := [name for name in wanted if name not in known]:
        raise BenchmarkFailed(f"not here: {', '.join(missing)}; here are {', '.join(known)}")
    return [known[name] for name in wanted]
