"""Runs experiments that compare policies (`make bench-simulator`). `python -m benchmarks.simulator.run` runs one load.

    python -m benchmarks.simulator [NAME]… [--output FOLDER]

with the names fairness, flood, documents, ageing, preemption, queue, scale.

The scheduler's core is real; workers are modelled by tables (presets.py). `queue` measures processor time, `scale`
the clock's, the others in modelled time, which is the same on every machine.
"""

import argparse
from pathlib import Path

from benchmarks.record import RESULTS, provenance
from benchmarks.runner import log, publish
from benchmarks.simulator.scenarios import SCENARIOS


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("scenarios", nargs="*", metavar="NAME", help=f"{', '.join(SCENARIOS)}; default all")
    parser.add_argument("--output", type=Path, default=RESULTS, help="folder for results; default benchmarks/results")
    options = parser.parse_args()
    if unknown := [name for name in options.scenarios if name not in SCENARIOS]:
        parser.error(f"no such experiment: {', '.join(unknown)}")
    for name in options.scenarios or SCENARIOS:
        scenario = SCENARIOS[name]
        result = {**provenance(), **scenario.measure(log)}
        publish(result, options.output / scenario.result_path.name, {scenario.title: scenario.table(result)})


if __name__ == "__main__":
    main()
