"""One tenant sends up to ten times the load of nine others: service of the nine, against ten equal tenants."""

from collections.abc import Callable
from typing import Any

from benchmarks.plot import Chart, Series
from benchmarks.report import Cells, Sense
from benchmarks.simulator.arrivals import OpenLoop, merged
from benchmarks.simulator.driver import Setup
from benchmarks.simulator.figures import ServedTokens
from benchmarks.simulator.presets import GPU_8B
from benchmarks.simulator.scenarios.scenario import Scenario, Target, outcome
from benchmarks.simulator.simulation import Simulation
from benchmarks.simulator.synthetic import ArrivalStream, Lengths

POLICIES = ("fcfs", "priority", "fair")
FACTORS = (1, 2, 5, 10)
# Requests a second of each tenant: with equal tenants, one of the two loads is below the machine's capacity of about
# 140 requests a second, and the other above.
RATES = (11.0, 21.0)
WARM_UP, WINDOW = 15.0, 45.0  # seconds before and of the measurement


def measure(
    report: Callable[[str], None],
    rates: tuple[float, ...] = RATES,
    factors: tuple[int, ...] = FACTORS,
    warm_up: float = WARM_UP,
    window: float = WINDOW,
) -> dict[str, Any]:
    """Tokens served to each tenant over the window, for each policy, load and factor of the tenth tenant."""
    rows: list[dict[str, Any]] = []
    for policy in POLICIES:
        for rate in rates:
            alike: dict[str, int] = {}
            for factor in factors:
                report(f"{policy}, {rate:g} requests/s each, one {factor} times that")
                served = served_tokens(policy, rate, factor, warm_up, window)
                heavy = served.pop("tenant 0")
                alike = alike or served
                rows.append(
                    {
                        "policy": policy,
                        "rate": rate,
                        "factor": factor,
                        "heavy_tokens": heavy,
                        "others_tokens": served,
                        "least_share": min(served[tenant] / alike[tenant] for tenant in served),
                    }
                )
    targets = [
        Target(
            f"fair, {row['rate']:g} requests/s each, the tenth × {row['factor']}: least of the nine",
            row["least_share"],
            Sense.AT_LEAST,
            0.95,
            ".1%",
        )
        for row in rows
        if row["policy"] == "fair" and row["factor"] == factors[-1]
    ]
    return {**outcome(rows, targets), "window_seconds": window}


def served_tokens(policy: str, rate: float, factor: int, warm_up: float, window: float) -> dict[str, int]:
    """Tokens served to each of ten tenants from `warm_up` on for `window` seconds. The first factor is 1."""
    streams = [
        ArrivalStream(
            rate * (factor if number == 0 else 1), Lengths(16, 512), Lengths(16, 256), tenant=f"tenant {number}"
        )
        for number in range(10)
    ]
    traffic = OpenLoop(merged(*(stream.arrivals(seed=0) for stream in streams)))
    simulation = Simulation(Setup(GPU_8B, policy=policy), traffic)
    served = ServedTokens(simulation, warm_up, warm_up + window)
    simulation.run(until=warm_up + window)
    return served.by_tenant


def table(result: dict[str, Any]) -> Cells:
    """A row for each policy and load: the least share of the nine, by the factor of the tenth."""
    rows = result["rows"]
    factors = sorted({row["factor"] for row in rows})
    cells = []
    for policy, rate in dict.fromkeys((row["policy"], row["rate"]) for row in rows):
        of_case = {row["factor"]: row for row in rows if (row["policy"], row["rate"]) == (policy, rate)}
        per_second = sum(of_case[factors[0]]["others_tokens"].values()) / 9 / result["window_seconds"]
        shares = [f"{of_case[factor]['least_share']:.1%}" for factor in factors[1:]]
        heavy = [f"{of_case[factors[-1]]['heavy_tokens'] / result['window_seconds']:,.0f}"]
        cells.append([policy, f"{rate:g}", f"{per_second:,.0f}", *shares, *heavy])
    columns = (
        *("policy", "requests/s of each", "tokens/s of each, all alike"),
        *(f"least of the nine, tenth × {factor}" for factor in factors[1:]),
        f"tokens/s of the tenth, × {factors[-1]}",
    )
    return Cells(columns, cells)


def charts(result: dict[str, Any]) -> list[Chart]:
    """For each load, the share that the nine keep, over the factor of the tenth."""
    rows = result["rows"]
    return [
        Chart(
            f"Least of the nine, % of all alike ({rate:g} requests/s each)",
            "load of the tenth tenant, times theirs",
            [
                Series(policy, [(row["factor"], 100 * row["least_share"]) for row in rows if _is(row, policy, rate)])
                for policy in dict.fromkeys(row["policy"] for row in rows)
            ],
        )
        for rate in dict.fromkeys(row["rate"] for row in rows)
    ]


def _is(row: dict[str, Any], policy: str, rate: float) -> bool:
    return (row["policy"], row["rate"]) == (policy, rate)


FAIRNESS = Scenario("fairness", "Tokens served while one tenant loads more than nine others", measure, table, charts)
