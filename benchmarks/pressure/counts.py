"""What a deployment counts of swaps, and what it believes of their cost."""

from dataclasses import astuple, dataclass
from typing import Self

from benchmarks.deployment import Deployment, scrape


@dataclass(frozen=True)
class Counts:
    """What scheduler and worker have counted. Seconds are those in which blocks were moved, backups among them."""

    swaps: int
    recomputes: int
    computed_tokens: int
    blocks_out: int
    blocks_in: int
    seconds_out: float
    seconds_in: float

    @classmethod
    def read(cls, deployment: Deployment) -> Self:
        """Since the start. Raises BenchmarkFailed where the scheduler does not tell."""
        scheduler = scrape(deployment.scheduler_metrics, "choice")
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
        """What was counted between two looks."""
        return Counts(*(now - then for now, then in zip(astuple(self), astuple(before), strict=True)))


@dataclass(frozen=True)
class CostEstimates:
    """What the scheduler takes a block to cost, in seconds: copied out and back in, or its tokens computed again."""

    swap_seconds: float
    recompute_seconds: float

    @classmethod
    def read(cls, deployment: Deployment) -> Self:
        """As it is now. Raises BenchmarkFailed where it does not tell."""
        scheduler = scrape(deployment.scheduler_metrics, "what")
        return cls(*(scheduler["quire_cost_seconds", what] for what in ("swap", "recompute")))
