"""Sends generated requests to every HTTP route and every method of gRPC of a deployment, and checks all answers.

    python -m tests.acceptance.fuzz [--seconds 300] [--seed N] [--at-once 4] [--one-round] [--model PATH]

HTTP requests are made from the gateway's OpenAPI document, by schemathesis: as it says, against it, and with hostile
values in place of fields; to paths with and without /v1, and over WebSocket. gRPC messages are made from the
descriptors that reflection returns. Each protocol takes `--seconds`. The requests of a round depend on its seed only,
which is printed; `--seed N --one-round` sends them again.

The last line is JSON. Exits with 1 for an answer that is not documented: a status, a form or a schema that docs/api.md
or the OpenAPI document do not have, or an internal error. So it does if at the end a role was restarted, an error is in
the log, a sequence or block is in use, or a normal request has another answer than before.
"""

import argparse
import json
import random
import sys

from tests.acceptance.fuzz.rounds import Plan
from tests.acceptance.fuzz.run import run_fuzz


def main() -> None:
    """Parses the flags, runs, and prints the result."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=300, help="of each protocol; default %(default)s")
    parser.add_argument("--seed", type=int, default=random.randrange(10**6) * 1000, help="default: a new one")
    parser.add_argument("--at-once", type=int, default=4, help="requests at a time; default %(default)s")
    parser.add_argument("--one-round", action="store_true", help="only the round of the seed, whatever it takes")
    parser.add_argument("--model", help="default: the product's own")
    options = parser.parse_args()
    print(f"seed {options.seed}", flush=True)
    plan = Plan(options.seconds, options.seed, options.at_once, options.one_round)
    settings = {"model": options.model} if options.model else {}
    outcome = run_fuzz(plan, lambda line: print(line, flush=True), **settings)
    print(json.dumps({"seconds": options.seconds, "seed": options.seed, **outcome.summary()}))
    sys.exit(0 if outcome.passed else 1)


if __name__ == "__main__":
    main()
