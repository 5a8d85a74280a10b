"""Mutants of the scheduler's core: small faults, each of which a test of the core must notice.

    python -m tests.acceptance.core_mutants [--only TEXT] [--list]

Applies one mutant at a time to a copy of the tree and runs the core's tests there: first all but the random worlds,
and these if nothing has failed. The last line is JSON; the exit status is 1 if a mutant survives.
"""

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[2]
CORE = "scheduler_svc/core"
TESTS = "tests/unit/scheduler_svc/core"
RANDOM_TESTS = ("test_random_worlds.py", "test_stateful.py", "test_abort.py")
COPIED = ("scheduler_svc", "svc_common", "protos", TESTS, "tests/support", "tests/conftest.py", "pyproject.toml")
SECONDS = 900  # after which a mutant's tests count as failed


class Mutant(NamedTuple):
    """`old`, which the file has exactly once, becomes `new`; `breaks` says what is wrong then."""

    file: str  # in the core
    old: str
    new: str
    breaks: str


MUTANTS = (
    # Steps.
    Mutant(
        "planning/running.py",
        "decodes.sort(key=lambda sequence: sequence.num_steps)",
        "decodes.sort(key=lambda sequence: -sequence.num_steps)",
        "decodes beyond the budget take no turns: some are never computed",
    ),
    Mutant(
        "planning/running.py",
        "if need + low <= kv.num_available:",
        "if need <= kv.num_available:",
        "swaps begin only when blocks have run out",
    ),
    Mutant(
        "planning/running.py",
        "sequence, num_missing, scheduled_ids)\n                break",
        "sequence, num_missing, scheduled_ids)\n                continue",
        "prompts take blocks that one before them lacks",
    ),
    Mutant(
        "planning/step_builder.py",
        "num_cached_tokens = max(start, sequence.num_cached_tokens)",
        "num_cached_tokens = start",
        "the last token of a full hit is written into a shared block",
    ),
    Mutant(
        "planning/step_builder.py",
        "num_before), int(self._seconds > 0))",
        "num_before), 0)",
        "a long prompt behind many tokens makes no progress beside decodes",
    ),
    Mutant(
        "planning/running.py",
        "if limit := self._for_new_requests.prompt_limit(replica):",
        "if limit := None:",
        "beside new requests of a small tenant, prompts of a large one make steps long",
    ),
    Mutant(
        "planning/capacity.py",
        "if limit := self.for_new_requests.limit_for(replica, sequence):",
        "if limit := None:",
        "a new request of a small tenant waits for blocks of prompts of a large one",
    ),
    Mutant(
        "planning/new_request_reserve.py",
        " and request.priority <= self.priorities[request.tenant]",
        "",
        "prompts are limited for requests of lower priority",
    ),
    Mutant(
        "planning/new_request_reserve.py",
        "        if sequence.num_output:",
        "        if False:",
        "a resumed sequence takes blocks that prompts still need, as a new request does",
    ),
    Mutant(
        "planning/fair_preemption.py",
        "if self._num_missing_blocks(replica, head) + num_kept <= 0:",
        "if False:",
        "prompts are limited for requests that lack nothing",
    ),
    Mutant(
        "planning/step_builder.py",
        "most = min(shape.max_sampled_tokens - 1, sequence.max_tokens - num_output, num_slots)",
        "most = min(shape.max_sampled_tokens - 1, sequence.max_tokens - num_output)",
        "speculated tokens exceed the blocks of a sequence",
    ),
    Mutant(
        "planning/indivisible.py",
        "step.replica.is_indivisible_due = not step.begins_with_due",
        "step.replica.is_indivisible_due = True",
        "prompts that are computed in one step take every step",
    ),
    Mutant(
        "planning/preemptor.py",
        "        self._waiting.release_all(sequence)\n        replica.leave(sequence, Phase.PREEMPTED)\n        if not",
        "        replica.leave(sequence, Phase.PREEMPTED)\n        if not",
        "sequences wait for the prefix of one that was preempted",
    ),
    Mutant(
        "policy/preemption.py",
        "if sequence.num_steps >= MIN_STEPS:",
        "if sequence.num_steps >= 0:",
        "a sequence is preempted right after its admission although there are others",
    ),
    # Admission: to the queue and to replicas.
    Mutant(
        "planning/slot_wait.py",
        "return num_steps * replica.costs.step_seconds(0, len(replica.running))",
        "return 0.0",
        "no wait is predicted although all places are taken",
    ),
    Mutant(
        "planning/slot_wait.py",
        "num_tokens / held[sequence.request.tenant]",
        "num_tokens / sum(held.values())",
        "a tenant is predicted to receive the tokens of all, and to yield too soon",
    ),
    Mutant(
        "planning/fair_preemption.py",
        "if not is_able or self._is_admitted_elsewhere(other):",
        "if is_able or self._is_admitted_elsewhere(other):",
        "a tenant of a small weight without a right to a slot holds up all others",
    ),
    Mutant(
        "admission.py",
        "num_output = request.least_output",
        "num_output = request.max_tokens",
        "a request without max_tokens is rejected for a deadline that it would meet",
    ),
    Mutant(
        "admission.py",
        "share = (ahead + self.expected_tokens(request)) / request.weight",
        "share = ahead + self.expected_tokens(request)",
        "the predicted wait ignores a tenant's weight",
    ),
    Mutant(
        "planning/capacity.py",
        "return num_needed + self.reserve(replica, sequence) <= replica.kv.num_available",
        "return num_needed <= replica.kv.num_available",
        "an admitted sequence takes the blocks that running ones need next",
    ),
    Mutant(
        "planning/admitter.py",
        "self._waiting.policy.charge(sequence, len(sequence.request.prompt) - sequence.num_cached_prompt_tokens)",
        "pass",
        "tenants are not charged for their prompts",
    ),
    Mutant(
        "policy/waiting.py",
        "return ranks[0] < ranks[1]",
        "return ranks[0] > ranks[1]",
        "queued sequences are admitted before swapped ones of their class",
    ),
    # Blocks.
    Mutant(
        "kv/block_pool.py",
        "for block_id in reversed(block_ids):\n            self._ref_counts",
        "for block_id in block_ids:\n            self._ref_counts",
        "the head of a cached prefix is evicted before its tail",
    ),
    Mutant(
        "kv/block_pool.py",
        "            self._ref_counts[block_id] = 1\n            self._found_again[block_id] = False",
        "            self._ref_counts[block_id] = 1",
        "a new block counts as reused because of what it held before",
    ),
    Mutant(
        "kv/eviction.py",
        "row = self._once or self._again",
        "row = self._again or self._once",
        "blocks that were reused are evicted first",
    ),
    Mutant(
        "kv/block_tier.py",
        "        self.index.forget(evicted)\n",
        "",
        "an evicted block is still found by its hash",
    ),
    # The prefix cache.
    Mutant(
        "kv/prefix_index.py",
        'len(fingerprint).to_bytes(4, "big") + fingerprint + salt',
        'len(fingerprint).to_bytes(4, "big") + fingerprint',
        "tenants with different salts share blocks",
    ),
    Mutant(
        "kv/prefix_index.py",
        "if block_id is None or self._contents[block_id].tokens != pack_block(tokens, block, self._block_size):",
        "if block_id is None:",
        "a hit does not compare tokens",
    ),
    Mutant(
        "kv/manager.py",
        "            newest.held_block_ids.append(own)\n",
        "            self.device.release([own])\n",
        "a block is freed that a step in flight still names",
    ),
    Mutant(
        "kv/prefix_cache.py",
        "        if sequence.needs_prompt_logprobs:\n            return sequence.block_hashes[:",
        "        if False:\n            return sequence.block_hashes[:",
        "log-probabilities of cached prompt tokens are never returned",
    ),
    Mutant(
        "kv/prefix_cache.py",
        "if recompute_seconds < self._costs.swap_seconds(0, len(host_ids)):",
        "if False:",
        "host blocks are copied in although computing them costs less",
    ),
    # Swap.
    Mutant(
        "kv/manager.py",
        "self.host.index.forget([pair.host for pair in swap.pairs if pair.host in self.host.index])",
        "pass",
        "host blocks that could not be read are found again",
    ),
    Mutant(
        "kv/manager.py",
        "            sequence.swapped_kv.num_tokens = sequence.num_committed\n",
        "",
        "a swapped sequence continues behind tokens that its last step did not compute",
    ),
    Mutant(
        "kv/manager.py",
        "        if sequence.num_steps_in_flight:  # steps",
        "        if False:  # steps",
        "blocks of a cancelled swap are freed while a step in flight names them",
    ),
    Mutant(
        "kv/manager.py",
        "self._swap_in_blocks(sequence, swapped_kv.host_ids[len(found) :])",
        "self._swap_in_blocks(sequence, swapped_kv.host_ids)",
        "blocks are copied in that the device still holds",
    ),
    Mutant(
        "kv/swap.py",
        "evict_first=direction is Direction.OUT",
        "evict_first=False",
        "device blocks with a copy on the host are not evicted first",
    ),
    Mutant(
        "kv/manager.py",
        "        if any(copy.destination in tail for copy in self._copies):\n",
        "        if False:\n",
        "a block is swapped out before it is written",
    ),
    # Deadlines.
    Mutant(
        "request_table.py",
        "            self._deadlines.discard(key)\n            self.searches",
        "            self.searches",
        "the deadline of a request that ended cancels a later one of the same key",
    ),
    Mutant(
        "admission.py",
        "left = request.deadline - now",
        "left = request.deadline",
        "a deadline counts from the clock's zero",
    ),
    Mutant(
        "request.py",
        "return at if self.deadline is None else min(at, self.deadline)",
        "return at",
        "an early deadline does not make a request urgent",
    ),
    Mutant(
        "request.py",
        "(0.0 if self.num_output else FIRST_TOKEN_FACTOR * self.prompt_seconds)",
        "0.0",
        "a short prompt waits for a long one that came shortly before",
    ),
    Mutant(
        "planning/prompt_turns.py",
        "return replica.prompt_seconds(head) < left",
        "return True",
        "a prompt of which little is left waits for a long one",
    ),
    Mutant(
        "policy/waiting.py",
        "if self._predicts_prompts:",
        "if self._predicts_prompts and not sequence.prompt_seconds:",
        "what waited for a prefix counts as a prompt that is still to be computed",
    ),
    # Beam searches.
    Mutant(
        "replica.py",
        "        child.num_steps = parent.num_steps\n",
        "",
        "a search keeps its slots for ever, since its beams are new after each token",
    ),
    Mutant(
        "beam_search.py",
        "if num_tokens == self.num_tokens:",
        "if num_tokens:",
        "a beam goes on with candidates of an earlier token",
    ),
    Mutant(
        "request.py",
        "return (self.request.beam.width - len(self.siblings)) * num_own",
        "return 0",
        "a search is admitted without room for its beams",
    ),
    # Poison requests.
    Mutant(
        "policy/poison.py",
        "self._suspected.update(_subject(one) for one in sequence.siblings if one.phase is not Phase.ENDED)",
        "self._suspected.add(subject)",
        "siblings of a suspected sequence run beside others",
    ),
    Mutant(
        "planning/isolated_runs.py",
        "return replica in self._ran_isolated or self.is_due(replica)",
        "return self.is_due(replica)",
        "a step is in flight beside an isolated one",
    ),
    # Token budgets.
    Mutant(
        "budgets.py",
        "if self.num_needed(num_left) > self.budget.available:",
        "if self.num_needed(num_left) < 0:",
        "prompts are paid with tokens that are not leased",
    ),
    Mutant(
        "budgets.py",
        "if self._shortfall is not None and self._shortfall <= self.available:",
        "if False:",
        "tokens that come back wake nobody",
    ),
    Mutant(
        "budgets.py",
        "        self.is_paid = True\n",
        "",
        "a prompt is paid again after a preemption",
    ),
    Mutant(
        "planning/running.py",
        "if sequence.has_budget and step.can_send(sequence):",
        "if step.can_send(sequence):",
        "a step computes more sequences than their account has tokens for",
    ),
    Mutant(
        "policy/account_gate.py",
        "first is not None and first[0] < sequence.order",
        "first is not None and first[0] > sequence.order",
        "small requests of an account overtake a large one that waits for its room or tokens",
    ),
    Mutant(
        "policy/fair.py",
        "(ranks[0] == ranks[1] and self._is_before(waiting, running))",
        "ranks[0] == ranks[1]",
        "a higher priority takes the slot of one that rose to its class and goes first there, which takes it back",
    ),
    Mutant(
        "policy/fair.py",
        "return nearest if nearest.priority == priority or len(self._classes) == MAX_CLASSES else None",
        "return nearest",
        "a request that runs loses its priority when no other one of it comes",
    ),
    Mutant(
        "planning/isolated_runs.py",
        "for sequence in [s for s in (*replica.swapped, *replica.pending_free.values()) if is_suspected(s)]:",
        "for sequence in list[Sequence]():",
        "a suspected sequence without a slot continues beside others",
    ),
)


def apply(mutant: Mutant, root: Path) -> None:
    """Change the file of a tree."""
    path = root / CORE / mutant.file
    source = path.read_text()
    assert source.count(mutant.old) == 1, f"{mutant.file} has not exactly one {mutant.old!r}"
    path.write_text(source.replace(mutant.old, mutant.new))


def is_killed(mutant: Mutant) -> bool:
    """Returns whether the core's tests fail on a copy of the tree with a mutant."""
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder)
        for name in COPIED:
            (copy / name).parent.mkdir(parents=True, exist_ok=True)
            if (ROOT / name).is_dir():
                shutil.copytree(ROOT / name, copy / name, ignore=shutil.ignore_patterns("__pycache__"))
            else:
                shutil.copy(ROOT / name, copy / name)
        apply(mutant, copy)
        ignored = [f"--ignore={TESTS}/{name}" for name in (*RANDOM_TESTS, "test_beam_search.py")]
        return not passes(copy, [TESTS, *ignored]) or not passes(copy, [f"{TESTS}/{name}" for name in RANDOM_TESTS])


def passes(root: Path, arguments: list[str]) -> bool:
    """Returns whether tests pass in a tree."""
    paths = os.pathsep.join(str(root / part) for part in ("", "protos", "tests/support"))
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-m", "", "-p", "no:cacheprovider", *arguments]
    environment = os.environ | {"PYTHONPATH": paths, "NUM_WORLDS": "100"}
    try:
        done = subprocess.run(command, cwd=root, env=environment, stdout=subprocess.DEVNULL, timeout=SECONDS)
    except subprocess.TimeoutExpired:
        return False
    assert done.returncode in (0, 1), f"pytest exited with {done.returncode}"
    return done.returncode == 0


def main() -> None:
    """Parses the flags and runs the mutants."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="try the mutants whose file or description contains this text")
    parser.add_argument("--list", action="store_true", help="list the mutants and exit")
    options = parser.parse_args()
    mutants = [mutant for mutant in MUTANTS if options.only in mutant.file or options.only in mutant.breaks]
    if options.list:
        print("\n".join(f"{mutant.file}: {mutant.breaks}" for mutant in mutants))
        return
    started = time.monotonic()
    survivors = []
    for mutant in mutants:
        killed = is_killed(mutant)
        survivors += [] if killed else [f"{mutant.file}: {mutant.breaks}"]
        print(f"{'killed' if killed else 'SURVIVED'}: {mutant.file}: {mutant.breaks}", flush=True)
    seconds = round(time.monotonic() - started)
    killed_count = len(mutants) - len(survivors)
    print(json.dumps({"mutants": len(mutants), "killed": killed_count, "survivors": survivors, "seconds": seconds}))
    sys.exit(1 if survivors else 0)


if __name__ == "__main__":
    main()
