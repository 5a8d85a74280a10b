"""Runs many random worlds of the scheduler's core.

    python -m tests.acceptance.core_worlds [--worlds 5000] [--actions 400] [--seed 0]

World number i has the seed `--seed` + i. There are four kinds, in turns: plain ones, workers that speculate, long
prompts, and few prefixes of three tenants with requests cancelled in the middle of swaps. A violation is printed with
its seed, and the other worlds run nevertheless. The last line is JSON; the exit status is 1 if there was a violation.
"""

import argparse
import json
import sys
import time
import traceback
from collections import Counter

from random_worlds import CrowdedWorld, LongPromptWorld, RandomWorld, run_world
from scheduler_world import World

COUNTS = (
    "preemptions",
    "swaps",
    "cache_hits",
    "host_hits",
    "blocks restored",
    "hashes published again",
    "sequences with shared blocks",
    "cancelled while swapping in",
    "cancelled while swapping out",
)
"""The summary of all worlds."""


def make_world(seed: int) -> RandomWorld:
    """The world of a seed."""
    speculation = 1 + seed // 4 % 6  # the most tokens that a step returns for a sequence
    match seed % 4:
        case 0:
            return RandomWorld(seed)
        case 1:
            return RandomWorld(seed, 1 + speculation)
        case 2:
            return LongPromptWorld(seed, speculation)
        case _:
            return CrowdedWorld(seed, speculation)


def run(seed: int, num_actions: int) -> World | None:
    """Runs one world; returns None after a violation."""
    try:
        return run_world(make_world(seed), num_actions)
    except Exception:
        print(f"world {seed}:\n{traceback.format_exc()}", flush=True)
        return None


def main() -> None:
    """Parses the flags and runs the worlds."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--worlds", type=int, default=5000, help="default 5000")
    parser.add_argument("--actions", type=int, default=400, help="random actions in each world; default 400")
    parser.add_argument("--seed", type=int, default=0, help="seed of the first world; default 0")
    options = parser.parse_args()
    started = time.monotonic()
    counts: Counter[str] = Counter()
    violated: list[int] = []
    for number in range(options.worlds):
        seed = options.seed + number
        world = run(seed, options.actions)
        if world is None:
            violated.append(seed)
        else:
            counts.update(world.counts)
            counts["requests"] += len(world.requests)
        if (number + 1) % 500 == 0:
            print(f"{number + 1} worlds, {len(violated)} with violations", flush=True)
    summary = {
        "worlds": options.worlds,
        "actions": options.worlds * options.actions,
        "first_seed": options.seed,
        "violations": len(violated),
        "seeds_of_violations": violated[:20],
        "seconds": round(time.monotonic() - started),
        "requests": counts["requests"],
        **{what.replace(" ", "_"): counts[what] for what in COUNTS},
    }
    print(json.dumps(summary))
    sys.exit(1 if violated else 0)


if __name__ == "__main__":
    main()
