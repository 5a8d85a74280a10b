"""Compares Quire with transformers' static batches on mix.json, in bf16, side by side in one run (`make bench`).

    python benchmarks/serving.py [--runs 3] [--requests 48] [--output FILE]

All requests are sent at once, greedy, with end-of-text ignored. The two take turns, each in processes of its own that
are started afresh, so that no prefix cache helps in a later run. Figures are medians over the runs; what they mean is
said in quire_client/bench/latency.py. Waste is the share of slots in used KV blocks that hold no token, averaged over
all steps of a run: 1 - tokens / slots, by the scheduler's own counters.
"""

import argparse
import asyncio
import importlib.metadata
import json
import os
import platform
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any

import grpc
import httpx
from prometheus_client.parser import text_string_to_metric_families
from rich.console import Console
from rich.table import Table

from quire.worker.v1 import worker_pb2
from quire.worker.v1.worker_pb2_grpc import WorkerServiceStub
from quire_client import AsyncClient, QuireError
from quire_client.bench.latency import Arrival, Summary, Timeline, summarize
from quire_client.bench.load import Load, run_load
from quire_client.bench.mix import MixRequest, draw_mix, read_mix, take
from quire_client.bench.targets import QuireTarget, TargetError
from svc_common.models import ModelNotFound, ServedModel, resolve_model
from svc_common.supervisor.launch import launched

HERE = Path(__file__).parent
MIX = HERE / "mix.json"
RESULT = HERE / "results" / "serving.json"

START_SECONDS = 600
STOP_SECONDS = 60


class BenchmarkFailed(Exception):  # noqa: N818
    """There are no figures. The text says why."""


@dataclass(frozen=True)
class Figures:
    """What one run, or the median of several, came to: seconds, and tokens per second."""

    output_tokens_per_second: float
    time_to_first_token_p50: float
    time_to_first_token_p99: float
    inter_token_p50: float
    inter_token_p99: float
    wall_seconds: float

    @classmethod
    def of(cls, summary: Summary) -> "Figures":
        """From a summary with streams of two tokens or more."""
        first, between = summary.time_to_first_token, summary.inter_token
        assert between is not None
        return cls(
            output_tokens_per_second=summary.output_tokens_per_second,
            time_to_first_token_p50=first.p50,
            time_to_first_token_p99=first.p99,
            inter_token_p50=between.p50,
            inter_token_p99=between.p99,
            wall_seconds=summary.wall_seconds,
        )

    @classmethod
    def median(cls, runs: "Sequence[Figures]") -> "Figures":
        """Each figure's median over the runs."""
        columns = zip(*(asdict(run).values() for run in runs), strict=True)
        return cls(*(median(column) for column in columns))


@dataclass(frozen=True)
class QuireRun:
    """One run of Quire. `kv_wasted` is the share of slots in used blocks without a token."""

    figures: Figures
    kv_wasted: float
    block_size: int
    num_blocks: int


@contextmanager
def running_quire() -> Iterator[dict[str, Any]]:
    """Quire in bf16, as `make run` starts it, on free ports and with a Redis of its own. Yields its addresses."""
    with TemporaryDirectory(prefix="quire-bench-") as folder:
        state_file, log_file = Path(folder, "state.json"), Path(folder, "log")
        listeners = ("HTTP", "GRPC", "SCHEDULER", "SCHEDULER_METRICS", "WORKER", "WORKER_METRICS")
        settings = {
            **{f"QUIRE_{listener}_PORT": "0" for listener in listeners},
            "QUIRE_DTYPE": "bfloat16",
            "QUIRE_RUN_DIR": folder,
            "QUIRE_STATE_FILE": str(state_file),
        }
        with log_file.open("wb") as log:
            process = subprocess.Popen(
                launched((sys.executable, "-m", "svc_common.supervisor")),
                cwd=HERE.parent,
                env={**os.environ, **settings},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,  # Ctrl-C ends the measuring first, and that ends the supervisor
            )
        try:
            yield _wait_until_ready(process, state_file, log_file)
        finally:
            process.terminate()
            try:
                process.wait(STOP_SECONDS)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def _wait_until_ready(process: "subprocess.Popen[bytes]", state_file: Path, log_file: Path) -> dict[str, Any]:
    deadline = time.monotonic() + START_SECONDS
    while process.poll() is None and time.monotonic() < deadline:
        if state_file.exists():
            state: dict[str, Any] = json.loads(state_file.read_bytes())
            if state["ready"]:
                return state
        time.sleep(0.2)
    why = "did not start in time" if process.poll() is None else f"ended with status {process.returncode}"
    last_lines = "\n".join(log_file.read_text(errors="replace").splitlines()[-20:])
    raise BenchmarkFailed(f"Quire {why}:\n{last_lines}")


def run_quire(requests: Sequence[MixRequest]) -> QuireRun:
    """Starts Quire, sends everything at once, and stops it."""
    with running_quire() as state:
        before = _kv_counters(state["scheduler_metrics"])
        load = asyncio.run(_send_at_once(state["grpc"][0], requests))
        after = _kv_counters(state["scheduler_metrics"])
        memory = _describe_worker(state["workers"][0])
    if load.failures or load.num_short or load.summary is None:
        reasons = "; ".join(f"{count} × {reason}" for reason, count in load.failures.items())
        raise BenchmarkFailed(f"Quire: {load.num_short} requests of a wrong length; failed: {reasons or 'none'}")
    tokens, slots = (now - then for now, then in zip(after, before, strict=True))
    if slots <= 0:
        raise BenchmarkFailed("the scheduler counted no KV slots in use")
    return QuireRun(Figures.of(load.summary), 1 - tokens / slots, memory.block_size, memory.num_blocks)


async def _send_at_once(address: str, requests: Sequence[MixRequest]) -> Load:
    async with AsyncClient(address) as client:
        target = QuireTarget(client)
        # Other prompts than the mix has: what the first requests warm up must not be its prefix cache.
        warm_up = [MixRequest(request.prompt_token_ids, 8) for request in draw_mix(1, 8, None)]
        await run_load(target, warm_up, len(warm_up))
        return await run_load(target, requests, len(requests))


def _kv_counters(metrics_address: str) -> tuple[float, float]:
    """Tokens stored, and slots of the blocks they are in, summed over all steps so far."""
    text = httpx.get(f"http://{metrics_address}/metrics", trust_env=False).raise_for_status().text
    totals = {"quire_kv_tokens_used_total": 0.0, "quire_kv_slots_used_total": 0.0}
    seen = set()
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            if sample.name in totals:
                totals[sample.name] += sample.value
                seen.add(sample.name)
    if missing := totals.keys() - seen:
        raise BenchmarkFailed(f"the scheduler does not export {', '.join(sorted(missing))}")
    return totals["quire_kv_tokens_used_total"], totals["quire_kv_slots_used_total"]


def _describe_worker(address: str) -> worker_pb2.DescribeResponse:
    with grpc.insecure_channel(address, [("grpc.enable_http_proxy", 0)]) as channel:
        return WorkerServiceStub(channel).Describe(worker_pb2.DescribeRequest(), timeout=10)


def run_static(model: Path, requests: Sequence[MixRequest]) -> Figures:
    """Runs transformers in a process of its own, which has the machine to itself."""
    done = subprocess.run(
        [sys.executable, HERE / "static_batches.py", "--model", model, "--requests", str(len(requests))],
        capture_output=True,
        check=False,
    )
    if done.returncode != 0:
        raise BenchmarkFailed(f"transformers failed:\n{done.stderr.decode(errors='replace')[-2000:]}")
    timelines = [Timeline(0.0, tuple(Arrival(at, 1) for at in times)) for times in json.loads(done.stdout)]
    return Figures.of(summarize(timelines, sum(len(request.prompt_token_ids) for request in requests)))


def prepare_model() -> ServedModel:
    """The model that QUIRE_MODEL names, or the default one; made ready first, which it tells of itself."""
    command = [sys.executable, "-m", "worker_svc.prepare"]
    if subprocess.run(command, cwd=HERE.parent, stdout=subprocess.DEVNULL, check=False).returncode != 0:
        raise BenchmarkFailed("the model could not be made ready")
    return resolve_model(os.environ.get("QUIRE_MODEL"))


def describe_machine() -> dict[str, Any]:
    """What the figures depend on besides the code; nothing that tells whose machine it is."""
    return {
        "processor": _processor(),
        "cores": len(os.sched_getaffinity(0)),
        "memory_gib": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30),
        "python": platform.python_version(),
        **{name: importlib.metadata.version(name) for name in ("torch", "transformers", "grpcio")},
    }


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, platform.machine())


def commit() -> str | None:
    """The commit that was measured, marked where the files differ from it; None outside a repository."""
    described = subprocess.run(
        ["git", "describe", "--always", "--abbrev=40", "--dirty", "--exclude=*"],
        cwd=HERE,
        capture_output=True,
        text=True,
        check=False,
    )
    return described.stdout.strip() or None


def print_table(ours: Figures, theirs: Figures, runs: Sequence[QuireRun], title: str) -> None:
    """The comparison, for a person."""
    table = Table(title=title, title_justify="left")
    table.add_column("")
    for column in ("Quire", "static batches of 8", "ratio"):
        table.add_column(column, justify="right")
    rows = (
        ("output tokens/s", "output_tokens_per_second", 1, ",.1f"),
        ("time to first token p50, s", "time_to_first_token_p50", 1, ".2f"),
        ("time to first token p99, s", "time_to_first_token_p99", 1, ".2f"),
        ("inter-token latency p50, ms", "inter_token_p50", 1e3, ",.1f"),
        ("inter-token latency p99, ms", "inter_token_p99", 1e3, ",.1f"),
    )
    for label, name, scale, style in rows:
        a, b = getattr(ours, name), getattr(theirs, name)
        table.add_row(label, format(a * scale, style), format(b * scale, style), f"{a / b:.2f}")
    Console(width=100).print(table)
    wasted = median(run.kv_wasted for run in runs)
    print(f"KV slots in used blocks without a token: {wasted:.1%}, at {runs[0].block_size} tokens a block")


def measure(num_runs: int, requests: Sequence[MixRequest]) -> dict[str, Any]:
    """All runs, in turns; prints the table and returns what goes into the file."""
    model = prepare_model()
    quire_runs: list[QuireRun] = []
    static_runs: list[Figures] = []
    for i in range(num_runs):
        for name in ("Quire", "static batches"):
            print(f"run {i + 1} of {num_runs}: {name} …", file=sys.stderr, flush=True)
            if name == "Quire":
                quire_runs.append(run_quire(requests))
                figures = quire_runs[-1].figures
            else:
                static_runs.append(run_static(model.path, requests))
                figures = static_runs[-1]
            rate = f"{figures.output_tokens_per_second:,.1f} output tokens/s"
            print(f"run {i + 1} of {num_runs}: {name}: {rate} in {figures.wall_seconds:.1f} s", file=sys.stderr)
    ours, theirs = Figures.median([run.figures for run in quire_runs]), Figures.median(static_runs)
    title = f"{model.name}, bf16, {len(requests)} requests at once, medians of {num_runs}"
    print_table(ours, theirs, quire_runs, title)
    return {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "commit": commit(),
        "machine": describe_machine(),
        "model": model.name,
        "num_requests": len(requests),
        "num_runs": num_runs,
        "output_tokens_per_second_ratio": ours.output_tokens_per_second / theirs.output_tokens_per_second,
        "kv_wasted": median(run.kv_wasted for run in quire_runs),
        "quire": {"median": asdict(ours), "runs": [asdict(run) for run in quire_runs]},
        "static_batches": {"median": asdict(theirs), "runs": [asdict(run) for run in static_runs]},
    }


def main() -> None:
    """Reads flags, measures, writes. Exits with 1 where there are no figures, whatever they are otherwise with 0."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=3, help="runs of each; default 3")
    parser.add_argument("--requests", type=int, help="only so many of the mix, for a quick pass; default all")
    parser.add_argument("--output", type=Path, help=f"file for the result; default {RESULT.name}, for the whole mix")
    options = parser.parse_args()
    mix = read_mix(MIX)
    if options.runs < 1 or not 1 <= (options.requests or 1) <= len(mix):
        parser.error(f"--runs is at least 1, --requests 1 to {len(mix)}")
    # A signal ends this process the way Ctrl-C does, so that what it started ends with it.
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    try:
        result = measure(options.runs, take(mix, options.requests))
    except (BenchmarkFailed, ModelNotFound, QuireError, TargetError, grpc.RpcError, httpx.HTTPError) as error:
        sys.exit(f"serving: {error}")
    except KeyboardInterrupt:
        sys.exit(130)
    output = options.output or (RESULT if options.requests is None else None)
    if output:
        output.parent.mkdir(parents=True, exist_ok=True)
        output.write_text(json.dumps(result, indent=2) + "\n")
        print(f"written to {output}", file=sys.stderr)


if __name__ == "__main__":
    main()
