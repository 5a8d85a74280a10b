"""Kills, stops and cuts what runs, and checks every token that clients get (`make chaos`).

    python -m tests.chaos [--faults 200] [--clients 32] [--seed 1]

The real model in float32 under the supervisor, two of each role. The seed repeats the schedule of faults and what
clients ask. Exits with 1 where a token was lost, given twice or changed, a request is incomplete, or, at rest, blocks
are in use or a key has no TTL. The last line counts.
"""

import argparse
import asyncio
import os
import statistics
import sys
import tempfile
from collections import defaultdict
from pathlib import Path

from reference import kept_references
from svc_common.models import resolve_model
from svc_common.supervisor.prepare import prepare_model
from tests.chaos.run import Outcome, Plan, run_chaos


def main() -> None:
    """Reads flags, runs, tells."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--faults", type=int, default=200)
    parser.add_argument("--clients", type=int, default=32)
    parser.add_argument("--seed", type=int, default=1)
    for role in ("gateways", "schedulers", "workers"):
        parser.add_argument(f"--{role}", type=int, default=2)
    parser.add_argument("--log", type=Path, help="file for what the roles write; else one in the temporary directory")
    options = parser.parse_args()
    log = options.log or Path(tempfile.gettempdir(), f"quire-chaos-{os.getpid()}.log")
    asyncio.run(prepare_model({}))
    model = resolve_model(None).path
    references = kept_references(model)
    print(f"roles write to {log}", flush=True)
    plan = Plan(options.faults, options.clients, options.seed, options.gateways, options.schedulers, options.workers)
    outcome = asyncio.run(run_chaos(plan, references, model, log, lambda line: print(line, flush=True)))
    print(recoveries(outcome))
    print(outcome.summary())
    sys.exit(0 if outcome.is_right else 1)


def recoveries(outcome: Outcome) -> str:
    """Seconds until all streams went on, by kind of fault."""
    seconds = defaultdict[str, list[float]](list)
    for fault, took in outcome.recoveries:
        seconds[f"{fault.action} {fault.place}"].append(took)
    return "\n".join(
        f"{kind:28} {len(took):3d} times, p50 {statistics.median(took):6.2f} s, max {max(took):6.2f} s"
        for kind, took in sorted(seconds.items())
    )


if __name__ == "__main__":
    main()
