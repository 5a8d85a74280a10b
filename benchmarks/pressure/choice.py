"""The same loads with sequences that give way swapped, computed again, and either as the scheduler chooses."""

from collections.abc import Callable, Mapping
from contextlib import ExitStack

import uvloop

from benchmarks.deployment import Deployment, running_quire
from benchmarks.pressure.counts import CostEstimates, Counts
from benchmarks.pressure.figures import LoadRun, RegimeFigures, SwapRates
from benchmarks.pressure.loads import BLOCK_SIZE, Regime
from benchmarks.processes import BenchmarkFailed
from quire_client.aio import AsyncClient
from quire_client.bench.load import run_load
from quire_client.bench.targets import QuireTarget
from scheduler_svc.core.preemption import PreemptionMode

Report = Callable[[str], None]


def measure_regime(regime: Regime, num_runs: int, report: Report) -> RegimeFigures:
    """Puts three deployments, one for each mode, under the load in turns. Raises BenchmarkFailed.

    They stay up over the runs, as a service does, and idle while another one has its turn. The first load of each does
    not count: the scheduler learns what steps and copies cost.
    """
    report(f"{regime.title}: starting")
    with ExitStack() as stack:
        deployments = {
            mode: stack.enter_context(running_quire(f"Quire, {mode.value}", _settings(regime, mode)))
            for mode in PreemptionMode
        }
        for deployment in deployments.values():
            _check_host_blocks(regime, deployment)
        return uvloop.run(_interleave(regime, deployments, num_runs, report))


async def _interleave(
    regime: Regime, deployments: Mapping[PreemptionMode, Deployment], num_runs: int, report: Report
) -> RegimeFigures:
    for deployment in deployments.values():
        await _send(regime, 0, deployment)
    began = Counts.read(deployments[PreemptionMode.SWAP])
    runs: dict[str, list[LoadRun]] = {mode.value: [] for mode in PreemptionMode}
    for i in range(num_runs):
        # Nobody always comes first.
        modes = list(PreemptionMode)
        for mode in modes[i % 3 :] + modes[: i % 3]:
            run = await _send(regime, 1 + i, deployments[mode])
            runs[mode.value].append(run)
            report(
                f"{regime.title}, {mode.value}: {run.seconds:.2f} s, {run.swaps} swapped, "
                f"{run.recomputes} computed again"
            )
    moved = Counts.read(deployments[PreemptionMode.SWAP]).since(began)
    return RegimeFigures(
        runs,
        SwapRates.of(
            moved,
            CostEstimates.read(deployments[PreemptionMode.AUTO]),
            deployments[PreemptionMode.AUTO].describe().block_bytes,
            BLOCK_SIZE,
        ),
    )


async def _send(regime: Regime, repetition: int, deployment: Deployment) -> LoadRun:
    """The whole load at once, to a server that does nothing else."""
    before = Counts.read(deployment)
    requests = regime.requests(repetition)
    async with AsyncClient(deployment.gateway) as client:
        sent = await run_load(QuireTarget(client), requests, len(requests))
    if sent.failures or sent.num_short or sent.summary is None:
        reasons = "; ".join(f"{count} × {reason}" for reason, count in sent.failures.items())
        raise BenchmarkFailed(
            f"{regime.title}: {sent.num_short} requests of a wrong length; failed: {reasons or 'none'}"
        )
    counted = Counts.read(deployment).since(before)
    return LoadRun(sent.summary.wall_seconds, counted.swaps, counted.recomputes, counted.computed_tokens)


def _settings(regime: Regime, mode: PreemptionMode) -> dict[str, str]:
    held_back = {"QUIRE_SWAP_RATE": f"{regime.swap_rate:.0f}"} if regime.swap_rate else {}
    return {
        "QUIRE_BLOCK_SIZE": str(BLOCK_SIZE),
        "QUIRE_NUM_BLOCKS": str(regime.num_blocks),
        "QUIRE_PREEMPTION": mode.value,
        **held_back,
    }


def _check_host_blocks(regime: Regime, deployment: Deployment) -> None:
    """Always to swap must be possible: there are as many blocks on the host, if its memory allows."""
    count = deployment.describe().num_host_blocks
    if count < regime.num_blocks:
        raise BenchmarkFailed(f"{regime.title}: {count} blocks on the host, which is short of memory")
