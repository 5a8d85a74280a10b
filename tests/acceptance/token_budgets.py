"""Streams of a key with a token budget, over two gateways, with the leading scheduler killed in the middle.

    python -m tests.acceptance.token_budgets [--streams 200] [--per-minute 3000] [--max-tokens 32]

Runs the real model under the supervisor. The last line is JSON; the exit status is 1 if a token is delivered beyond the
key's budget, or if a stream does not get all of its tokens.
"""

import argparse
import asyncio
import json
import os
import sys
import tempfile
from pathlib import Path

from svc_common.supervisor.prepare import prepare_model
from tests.chaos.budget_run import BudgetOutcome, BudgetPlan, run_budgets


async def run(plan: BudgetPlan, log: Path) -> BudgetOutcome:
    """Prepares the model, and runs the plan."""
    await prepare_model({})
    return await run_budgets(plan, log, lambda line: print(line, flush=True))


def main() -> None:
    """Parses the flags, runs, and prints the result."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--streams", type=int, default=200, help="default 200; every fifth is of a key without a limit")
    parser.add_argument("--per-minute", type=int, default=3000, help="tokens_per_minute of the key; default 3000")
    parser.add_argument("--max-tokens", type=int, default=32, help="of each stream; default 32")
    options = parser.parse_args()
    log = Path(tempfile.gettempdir(), f"quire-budgets-{os.getpid()}.log")
    print(f"the output of the roles is written to {log}", flush=True)
    outcome = asyncio.run(run(BudgetPlan(options.streams, options.per_minute, options.max_tokens), log))
    summary = {
        "streams": options.streams,
        "streams_ended": outcome.num_ended,
        "tokens_per_minute": options.per_minute,
        "tokens_delivered": outcome.delivered,
        "tokens_delivered_before_the_death": outcome.delivered_before_death,
        "tokens_beyond_the_budget": max(0, outcome.most_beyond),
        "seconds": round(outcome.seconds),
    }
    print(json.dumps(summary))
    passed = outcome.most_beyond <= 0 and outcome.num_ended == options.streams
    sys.exit(0 if passed else 1)


if __name__ == "__main__":
    main()
