"""Injects faults into a deployment under load and checks every token that clients receive (`make chaos`).

    python -m tests.chaos [--faults 200] [--clients 32] [--seed 1]

Runs the real model in float32 under the supervisor, with two of each role. Faults are kill -9, SIGSTOP and SIGTERM of
processes, and reset, stalled, delayed and throttled connections. The seed repeats the faults and the requests. The last
line is the summary, in JSON, with the longest pause in seconds for each kind of fault. Exits with 1 if a token is lost,
duplicated or changed, if a request is incomplete, if streams pause longer than docs/guarantees.md allows, or if at the
end blocks are in use or a key in Redis has no TTL.
"""

import argparse
import asyncio
import json
import os
import statistics
import sys
import tempfile
from pathlib import Path

from reference import kept_references
from svc_common.models import resolve_model
from svc_common.supervisor.prepare import prepare_model
from tests.chaos.run import Outcome, Plan, run_chaos


def main() -> None:
    """Parses the flags, runs, and prints the result."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--faults", type=int, default=200)
    parser.add_argument("--clients", type=int, default=32)
    parser.add_argument("--seed", type=int, default=1)
    for role in ("gateways", "schedulers", "workers"):
        parser.add_argument(f"--{role}", type=int, default=2)
    parser.add_argument(
        "--log", type=Path, help="file for the output of the roles; default: a new file in the temporary directory"
    )
    options = parser.parse_args()
    log = options.log or Path(tempfile.gettempdir(), f"quire-chaos-{os.getpid()}.log")
    asyncio.run(prepare_model({}))
    model = resolve_model(None).path
    references = kept_references(model)
    print(f"the output of the roles is written to {log}", flush=True)
    plan = Plan(options.faults, options.clients, options.seed, options.gateways, options.schedulers, options.workers)
    outcome = asyncio.run(run_chaos(plan, references, model, log, lambda line: print(line, flush=True)))
    print(recoveries(outcome))
    print(json.dumps(outcome.summary()))
    sys.exit(0 if outcome.passed else 1)


def recoveries(outcome: Outcome) -> str:
    """A table of what recovery took, by kind of fault."""
    lines = []
    for kind, found in outcome.recoveries_by_kind().items():
        p50, longest = statistics.median(one.seconds for one in found), max(one.pause for one in found)
        lines.append(f"{kind:28} {len(found):3d} times, all recovered: p50 {p50:6.2f} s, longest pause {longest:.2f} s")
    return "\n".join(lines)


if __name__ == "__main__":
    main()
