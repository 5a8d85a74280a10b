"""The same load with preempted sequences swapped, recomputed, and either as the scheduler chooses."""

from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import astuple, dataclass
from typing import Self

import uvloop

from benchmarks.deployment import Deployment, running_quire, scrape
from benchmarks.pressure.loads import BLOCK_SIZE, Regime
from benchmarks.pressure.report import LoadRun, RegimeFigures, SwapRates
from benchmarks.processes import BenchmarkFailed
from benchmarks.runner import check_load, in_turns, log
from quire_client.aio import AsyncClient
from quire_client.bench.load import run_load
from quire_client.bench.targets import QuireTarget
from scheduler_svc.core.policy.preemption import PreemptionMode


@dataclass(frozen=True)
class Counts:
    """Counters of scheduler and worker. Seconds are those in which blocks were copied, backups included."""

    swaps: int
    recomputes: int
    computed_tokens: int
    blocks_out: int
    blocks_in: int
    seconds_out: float
    seconds_in: float

    @classmethod
    def read(cls, deployment: Deployment) -> Self:
        """Since the start. Raises BenchmarkFailed where the scheduler does not export one."""
        scheduler = scrape(deployment.scheduler_metrics, "method")
        worker = scrape(deployment.worker_metrics, "direction")
        return cls(
            swaps=int(scheduler["quire_preemptions_total", "swap"]),
            recomputes=int(scheduler["quire_preemptions_total", "recompute"]),
            computed_tokens=int(scheduler["quire_tokens_computed_total", ""]),
            # A direction that nothing was moved in has no samples.
            blocks_out=int(worker.get(("quire_worker_swapped_blocks_total", "out"), 0)),
            blocks_in=int(worker.get(("quire_worker_swapped_blocks_total", "in"), 0)),
            seconds_out=worker.get(("quire_worker_swap_seconds_total", "out"), 0.0),
            seconds_in=worker.get(("quire_worker_swap_seconds_total", "in"), 0.0),
        )

    def since(self, before: "Counts") -> "Counts":
        """Counts since an earlier reading."""
        return Counts(*(now - then for now, then in zip(astuple(self), astuple(before), strict=True)))


@dataclass(frozen=True)
class CostEstimates:
    """The scheduler's estimate of a block's cost, in seconds: copied out and back in, or its tokens computed again."""

    swap_seconds: float
    recompute_seconds: float

    @classmethod
    def read(cls, deployment: Deployment) -> Self:
        """The current estimate. Raises BenchmarkFailed where the scheduler does not export it."""
        scheduler = scrape(deployment.scheduler_metrics, "method")
        return cls(*(scheduler["quire_cost_seconds", method] for method in ("swap", "recompute")))


def swap_rates(counts: Counts, estimates: CostEstimates, block_bytes: int, block_size: int) -> SwapRates:
    """From what was counted, and what is estimates."""
    return SwapRates(
        counts.blocks_out * block_bytes / counts.seconds_out if counts.seconds_out else None,
        counts.blocks_in * block_bytes / counts.seconds_in if counts.seconds_in else None,
        estimates.swap_seconds,
        estimates.recompute_seconds,
        block_size / estimates.recompute_seconds,
    )


def measure_regime(regime: Regime, num_runs: int) -> RegimeFigures:
    """Puts three deployments, one for each mode, under the load in turns. Raises BenchmarkFailed.

    They stay up over all runs, and idle while another one has its turn. The first load of each does
    not count: the scheduler learns what steps and copies cost.
    """
    log(f"{regime.title}: starting")
    with ExitStack() as stack:
        deployments = {
            mode: stack.enter_context(running_quire(f"Quire, {mode.value}", _settings(regime, mode)))
            for mode in PreemptionMode
        }
        for deployment in deployments.values():
            _check_host_blocks(regime, deployment)
        return uvloop.run(_interleave(regime, deployments, num_runs))


async def _interleave(regime: Regime, deployments: Mapping[PreemptionMode, Deployment], num_runs: int) -> RegimeFigures:
    for deployment in deployments.values():
        await _send(regime, 0, deployment)
    began = Counts.read(deployments[PreemptionMode.SWAP])
    runs: dict[str, list[LoadRun]] = {mode.value: [] for mode in PreemptionMode}
    for number, mode in in_turns(list(PreemptionMode), num_runs):
        run = await _send(regime, 1 + number, deployments[mode])
        runs[mode.value].append(run)
        log(f"{regime.title}, {mode.value}: {run.seconds:.2f} s, {run.swaps} swapped, {run.recomputes} recomputed")
    moved = Counts.read(deployments[PreemptionMode.SWAP]).since(began)
    auto = deployments[PreemptionMode.AUTO]
    return RegimeFigures(runs, swap_rates(moved, CostEstimates.read(auto), auto.describe().block_bytes, BLOCK_SIZE))


async def _send(regime: Regime, repetition: int, deployment: Deployment) -> LoadRun:
    """Sends the whole load at once to an idle deployment."""
    before = Counts.read(deployment)
    requests = regime.requests(repetition)
    async with AsyncClient(deployment.gateway) as client:
        sent = await run_load(QuireTarget(client), requests, len(requests))
    summary = check_load(sent, regime.title)
    counted = Counts.read(deployment).since(before)
    return LoadRun(summary.wall_seconds, counted.swaps, counted.recomputes, counted.computed_tokens)


def _settings(regime: Regime, mode: PreemptionMode) -> dict[str, str]:
    throttled = {"QUIRE_SWAP_RATE": f"{regime.swap_rate:.0f}"} if regime.swap_rate else {}
    return {
        "QUIRE_BLOCK_SIZE": str(BLOCK_SIZE),
        "QUIRE_NUM_BLOCKS": str(regime.num_blocks),
        "QUIRE_PREEMPTION": mode.value,
        **throttled,
    }


def _check_host_blocks(regime: Regime, deployment: Deployment) -> None:
    """Swapping needs as many host blocks as device blocks."""
    count = deployment.describe().num_host_blocks
    if count < regime.num_blocks:
        raise BenchmarkFailed(f"{regime.title}: only {count} host blocks fit its memory")
