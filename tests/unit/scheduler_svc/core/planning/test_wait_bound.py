"""How long a new request waits for its first token beside other tenants' floods: the bounds of docs/policies.md."""

import math
import random
from collections import Counter
from dataclasses import dataclass
from functools import cache
from itertools import count
from typing import Any

import pytest

from core_bench import BLOCK, CopyMode, CoreBench, prompt
from large import large_but
from scheduler_svc.core.limits import SchedulerLimits
from scheduler_svc.core.planning.claim import TURN_TOKENS
from scheduler_svc.core.policy import PolicySettings
from scheduler_svc.core.policy.preemption import MIN_STEPS, PreemptionMode
from scheduler_svc.core.request import BeamParams, EarlyStopping, Phase, Sequence
from scheduler_svc.core.step import StepPlan

WORKER_LIMITS = (64, 256)
"""Sequences and tokens of a step that a worker on a CPU reports, in deterministic mode, too."""
KINDS = ("one", "n", "beams", "priority", "several", "tenants")
NUM_WORLDS = 7  # in which blocks are short
_COPY_STEPS = 4  # planned while a copy of blocks is in progress, at most
_FILL_STEPS = 400  # in which a flood fills the blocks, if it does


@dataclass(frozen=True)
class NewRequests:
    """Requests that come together, each with a prompt of `length` tokens. They need `num_slots` slots together."""

    sequences: list[Sequence]
    length: int
    num_slots: int


class FloodedWorld:
    """Requests of one or two tenants that fill all slots, with weights, `n`, beam searches and priorities.

    Where blocks are short, they fill the blocks. Then half of the worlds plan a step while the one before is in flight,
    and copies of blocks take several steps.
    """

    def __init__(self, seed: int, *, is_short: bool, **shape: Any) -> None:
        self.rng = rng = random.Random(seed)
        limits = [(2, 8), (4, 16), (8, 16), (8, 64)]
        self.num_slots, self.num_step_tokens = rng.choice(limits)
        if not is_short and seed % 10 == 0:
            self.num_slots, self.num_step_tokens = WORKER_LIMITS
        self.num_blocks = self.num_slots * (rng.choice([20, 40]) if is_short else 500)
        preemption = rng.choice(list(PreemptionMode))
        # The bound holds whether waiting requests of lower classes rise or not.
        settings = PolicySettings(ageing_seconds=1e6 if seed % 3 else PolicySettings().ageing_seconds)
        self.bench = CoreBench(
            limits=SchedulerLimits(policy="fair", preemption=preemption, policy_settings=settings),
            max_sequences=self.num_slots,
            max_step_tokens=self.num_step_tokens,
            num_blocks=self.num_blocks,
            num_host_blocks=rng.choice([0, 1000]),
            **shape,
        )
        self.replica = self.bench.replica
        self.is_ahead = is_short and rng.random() < 0.5
        weights = [1.0] if seed % 2 else [0.25, 1.0, 3.0]
        self.weights = {f"flood-{number}": rng.choice(weights) for number in range(rng.choice([1, 1, 2]))}
        self.possible_weights = weights
        self.new_weight = rng.choice(weights)
        self._starts = count(0, 10_000)
        self._served: set[str] = set()  # tenants
        self._flood(rng.choice([0.0, 0.3, 1.0]), [3, 30, 60] if is_short else [3, 30, 300])

    def _flood(self, share_of_searches: float, lengths: list[int]) -> None:
        rng, most = self.rng, self.num_blocks * BLOCK
        for number in range(60 + self.num_slots):
            is_search, width = rng.random() < share_of_searches, rng.randint(2, self.num_slots)
            tenant, length = f"flood-{number % len(self.weights)}", rng.choice(lengths)
            self.bench.submit(
                f"flood-{number}",
                self.prompt(length),
                max(1, min(rng.choice([150, 500]), most // (width if is_search else 1) - length - 2 * BLOCK)),
                n=rng.choice([1, 1, 3]) if not is_search else 1,
                beam=BeamParams(width, 1.0, EarlyStopping.NEVER) if is_search else None,
                tenant=tenant,
                weight=self.weights[tenant],
                priority=rng.choice([-1, 0, 0]),
            )

    def prompt(self, length: int) -> list[int]:
        return prompt(length, next(self._starts))

    def advance(self) -> StepPlan | None:
        """Plans a step, and commits the oldest one in flight."""
        self.bench.now += 0.05
        plan = self.bench.plan()
        if plan is not None:
            self._served.update(part.sequence.request.tenant for part in plan.scheduled)
        num_in_flight = len(self.replica.steps_in_flight)
        if not self.is_ahead and num_in_flight:
            self.bench.commit()
        elif num_in_flight and (plan is None or num_in_flight > 1):
            is_done = plan is None or plan.step_id % _COPY_STEPS == 0
            self.bench.commit(CopyMode.DONE if is_done else CopyMode.LATE)
        return plan

    def begin(self, num_steps: int) -> None:
        """Advances by so many steps at least, and until each tenant of the flood has been served: none is new."""
        while num_steps > 0 or self._served != self.weights.keys():
            self.advance()
            num_steps -= 1

    def is_full(self, length: int) -> bool:
        """Whether a prompt of this length finds too few blocks."""
        return self.replica.kv.num_available < self.num_lacking(length)

    def num_lacking(self, length: int) -> int:
        """Blocks of a prompt, and those that sequences leave to the next tokens of the running ones."""
        return self.replica.shape.num_blocks_for(length + 1) + len(self.replica.running) + 1

    def submit(self, kind: str) -> NewRequests:
        """Submits new requests of a kind."""
        rng = self.rng
        length = rng.choice([3, 20, 60])
        num_requests = num_slots = 1
        tenants = ["new"]
        fields: dict[str, Any] = {}
        if kind == "n":
            fields = {"n": rng.choice([2, 3])}
        elif kind == "beams":
            num_slots = rng.randint(2, self.num_slots)
            fields = {"beam": BeamParams(num_slots, 1.0, EarlyStopping.NEVER)}
        elif kind == "priority":
            fields = {"priority": rng.choice([1, 5])}
        elif kind == "several":
            share = self.num_slots / (1 + sum(self.weights.values()) / self.new_weight)
            num_requests = num_slots = max(1, min(rng.randint(2, 4), int(share)))
        elif kind == "tenants":
            num_requests = rng.randint(2, 3)
            tenants = [f"new-{number}" for number in range(num_requests)]
        return self._submitted(tenants, [self.new_weight] * num_requests, length, num_slots, **fields)

    def submit_of_all_weights(self) -> NewRequests:
        """Submits new requests of several tenants, with a weight of each kind; those of the smallest come first."""
        weights = sorted([*self.possible_weights, *self.rng.choices(self.possible_weights, k=2)])
        tenants = [f"new-{number}" for number in range(len(weights))]
        return self._submitted(tenants, weights, self.rng.choice([3, 20, 60]), 1)

    def _submitted(
        self, tenants: list[str], weights: list[float], length: int, num_slots: int, **fields: Any
    ) -> NewRequests:
        """One request for each weight, of these tenants in turn."""
        sequences = [
            self.bench.submit(
                f"new-{number}",
                self.prompt(length),
                3,
                tenant=tenants[number % len(tenants)],
                weight=weight,
                **fields,
            )[0]
            for number, weight in enumerate(weights)
        ]
        return NewRequests(sequences, length, num_slots)

    def documented_bound(self, new: NewRequests) -> int:
        """Steps until the last one has its first token: the formulas of docs/policies.md, from what runs now."""
        return sum(self.bound_of(sequence, new) for sequence in new.sequences)

    def bound_of(self, sequence: Sequence, new: NewRequests) -> int:
        """Steps until one of new requests has its first token after those before it."""
        weight = sequence.request.weight
        held = self.replica.num_slots_of
        others = {tenant: self.weights[tenant] / weight for tenant in held}
        new_weights = {each.request.tenant: each.request.weight / weight for each in new.sequences}
        others_weight = sum(others.values()) + sum(new_weights.values()) - 1
        blocks: Counter[str] = Counter()
        for sequence in self.replica.running:
            blocks[sequence.request.tenant] += len(sequence.block_ids)
        num_blocks = self.num_lacking(new.length) if self.is_full(new.length) else 0
        num_prompt_tokens = max(1, self.num_step_tokens - self.num_slots)
        bound = MIN_STEPS + 2 + math.ceil(new.length * (1 + others_weight) / num_prompt_tokens)
        if num_blocks:
            bound += 2 + _COPY_STEPS if self.is_ahead else 1
        may_yield = [
            held[tenant] >= new.num_slots * (1 + other) and blocks[tenant] >= num_blocks * (1 + other)
            for tenant, other in others.items()
        ]
        if not any(may_yield):  # they take turns
            is_one = new.num_slots == 1 and not num_blocks
            bound += math.ceil(TURN_TOKENS * (min if is_one else max)(others.values(), default=0.0))
        if any(
            held[tenant] <= new.num_slots + other and new.length * other > TURN_TOKENS
            for tenant, other in others.items()
        ):
            bound += MIN_STEPS + 2 + math.ceil((new.length + TURN_TOKENS) * others_weight)
        return bound

    def steps_until_tokens(self, new: NewRequests, most: int) -> int:
        """Steps from now on until each of new requests has its first token, or `most` + 1."""
        first = self.replica.num_steps
        while self.replica.num_steps - first <= most:
            self.advance()
            if all(sequence.num_output or sequence.phase is Phase.ENDED for sequence in new.sequences):
                return self.replica.num_steps - first
        return most + 1


@pytest.mark.parametrize("seed", large_but(range(40), *range(12)))
def test_request_of_another_tenant_waits_no_longer_than_the_documented_bound(seed: int) -> None:
    world = FloodedWorld(seed, is_short=False)
    world.begin(world.rng.randrange(5, 200))
    new = world.submit("one")
    bound = world.documented_bound(new)
    assert world.steps_until_tokens(new, bound) <= bound


@pytest.mark.parametrize("seed", large_but(range(60), *range(12)))
def test_new_requests_of_small_weights_hold_up_no_others(seed: int) -> None:
    """Each waits for those of its weight and of larger ones only."""
    world = FloodedWorld(seed, is_short=False)
    world.begin(world.rng.randrange(5, 200))
    new = world.submit_of_all_weights()
    bounds, first = {sequence: world.bound_of(sequence, new) for sequence in new.sequences}, world.replica.num_steps
    for weight in sorted(set(world.possible_weights), reverse=True):
        alike = [sequence for sequence in bounds if sequence.request.weight >= weight]
        most = sum(bounds[sequence] for sequence in alike) - (world.replica.num_steps - first)
        assert world.steps_until_tokens(NewRequests(alike, new.length, 1), most) <= most


@dataclass(frozen=True)
class Wait:
    """How long new requests waited in a world, and what happened meanwhile."""

    num_steps: int
    bound: int
    was_full: bool
    num_swaps: int
    num_freed: int


@cache
def wait(kind: str, seed: int) -> Wait:
    """Submits new requests when blocks are short."""
    world = FloodedWorld(seed, is_short=True)
    world.begin(world.rng.randrange(20, 100))
    for _ in range(_FILL_STEPS):
        if world.is_full(3):
            break
        world.advance()
    new = world.submit(kind)
    was_full, bound, totals = world.is_full(new.length), world.documented_bound(new), world.bench.scheduler.totals
    preemptions, swaps, keeps = totals.preemptions, totals.swaps, totals.keeps
    num_steps = world.steps_until_tokens(new, bound)
    num_swaps = totals.swaps - swaps
    num_freed = totals.preemptions - preemptions - num_swaps - (totals.keeps - keeps)
    return Wait(num_steps, bound, was_full, num_swaps, num_freed)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("seed", large_but(range(20), *range(NUM_WORLDS)))
def test_new_requests_wait_no_longer_than_the_documented_bound_where_blocks_are_short(kind: str, seed: int) -> None:
    found = wait(kind, seed)
    assert found.num_steps <= found.bound


@pytest.mark.parametrize("kind", KINDS)
def test_blocks_are_short_and_taken_in_these_worlds(kind: str) -> None:
    waits = [wait(kind, seed) for seed in range(NUM_WORLDS)]
    assert sum(each.was_full for each in waits) > NUM_WORLDS // 2
    assert sum(each.num_swaps for each in waits) > 0
    assert sum(each.num_freed for each in waits) > 0


@pytest.mark.parametrize("seed", large_but(range(5), 0, 1))
def test_deterministic_mode_changes_no_plan(seed: int) -> None:
    """It is part of the fingerprint. A worker reports the same limits in it: `test_instance.py` of the worker."""
    plans = []
    for fingerprint in (b"model", b"model in deterministic mode"):
        world = FloodedWorld(seed, is_short=True, fingerprint=fingerprint)
        for _ in range(200):
            world.advance()
        world.submit("several")
        steps = [world.advance() for _ in range(100)]
        plans.append(
            [
                None if plan is None else [(part.sequence.id, part.start, part.num_tokens) for part in plan.scheduled]
                for plan in steps
            ]
        )
    assert plans[0] == plans[1]
    assert any(plans[0])
