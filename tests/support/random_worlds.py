"""Random worlds of the scheduler: sizes, requests, losses and cancellations drawn from a seed."""

import random
from dataclasses import replace
from typing import Any

from scheduler_svc.core.account_limits import AccountLimits
from scheduler_svc.core.admission import AdmissionLimits
from scheduler_svc.core.limits import SchedulerLimits
from scheduler_svc.core.policy.preemption import PreemptionMode
from scheduler_svc.core.replica_shape import ReplicaShape
from scheduler_svc.core.request import BeamParams, EarlyStopping, Request
from scheduler_svc.core.results import PROMPT_LOGPROBS, TOKENS, PromptComputation, ResultForm, ResultKind
from scheduler_world import World
from svc_common.protocols import STEP_PROTOCOLS

VALUES = [ResultKind("embedding", ResultForm.VALUE), ResultKind("score", ResultForm.VALUE)]


class RandomWorld:
    """A world with random sizes, and random actions in it."""

    def __init__(self, seed: int, max_sampled_tokens: int = 1) -> None:
        rng = self.rng = random.Random(seed)
        self.shape = ReplicaShape(
            fingerprint=b"model",
            block_size=rng.choice([1, 2, 3, 4]),
            num_blocks=rng.choice([16, 23, 40, 64]),
            context_length=1000,
            max_step_tokens=rng.choice([3, 16, 64]),
            max_sequences=rng.choice([3, 8, 16]),
            num_host_blocks=rng.choice([0, 1, 7, 40, 200]),
            block_bytes=1000,
            swap_bytes_per_second=rng.choice([1e4, 1e6]),
            prefill_tokens_per_second=rng.choice([100.0, 1e4]),
            protocol=STEP_PROTOCOLS.newest - seed % 2,
        )
        results_rng = self.rng_of_results = random.Random(seed + 1)  # not used by worlds without other results
        self.share_of_other_results = results_rng.choice([0.0, 0.1, 0.5])
        chunked = {kind.name: PromptComputation.CHUNKED for kind in (TOKENS, PROMPT_LOGPROBS)}
        results = {kind.name: results_rng.choice(list(PromptComputation)) for kind in VALUES}
        self.shape = replace(self.shape, results=chunked | results)
        if max_sampled_tokens > 1:  # speculated tokens use only slots of blocks that are needed anyway
            self.shape = replace(self.shape, max_sampled_tokens=max_sampled_tokens, block_size=rng.choice([2, 4, 8]))
        self.beginnings = [[rng.randint(0, 1) for _ in range(200)] for _ in range(rng.choice([2, 8]))]
        self.share_of_common = rng.choice([0.1, 0.9])  # of the requests
        self.share_of_beams = rng.choice([0.02, 0.4])
        limits = SchedulerLimits(
            max_step_tokens=rng.choice([8, 32]),
            max_sequences=12,
            queue=AdmissionLimits(max_requests=rng.choice([8, 30]), max_tenant_requests=rng.choice([5, 30])),
            policy=rng.choice(["fcfs", "priority", "fair"]),
            preemption=rng.choice(list(PreemptionMode)),
        )
        self.world = World(limits, rng)
        self.share_of_losses = rng.choice([0.002, 0.002, 0.05])  # of the actions
        self.num_sites = rng.choice([1, 1, 2, 3])
        for _ in range(self.num_sites):
            self.add_worker()

    def add_worker(self) -> None:
        """Adds a worker. Workers of one model may differ in memory and in the kinds of results that they compute."""
        num_blocks = self.shape.num_blocks + self.rng.choice([0, 0, 5])
        left_out = self.rng_of_results.choice([None, None, None, None, PROMPT_LOGPROBS.name, "embedding"])
        results = {name: how for name, how in self.shape.results.items() if name != left_out}
        self.world.add_worker(replace(self.shape, num_blocks=num_blocks, results=results))

    def act(self) -> None:
        world, rng = self.world, self.rng
        action = rng.random()
        if len(world.working) < self.num_sites and action < 0.05:
            self.add_worker()
        elif world.sites and rng.random() < self.share_of_losses:
            world.lose(rng.choice(world.sites))
        elif action < 0.45:
            if world.sites:
                world.plan(rng.choice(world.sites), is_spoilt=rng.random() < 0.002)
        elif action < 0.89:
            if world.sites:
                world.commit(rng.choice(world.sites))
                world.remove_drained()
        elif action < 0.96:
            world.submit(self.request())
        elif action < 0.98:
            if world.outputs:
                world.acknowledge(*rng.choice(list(world.outputs)))
        elif action < 0.985:
            if keys := list(world.scheduler.keys):
                world.cancel(rng.choice(keys))
        elif action < 0.99:
            world.wait(1.0)
        elif action < 0.995:
            if world.outputs:
                world.stop(*rng.choice(list(world.outputs)))
        elif action < 0.997:
            if world.sites:
                world.retire(rng.choice(world.sites))
        elif action < 0.9985:
            world.restart()
        elif action < 0.9987:
            for key in list(world.scheduler.keys):
                world.cancel(key)
        world.check_integrity()

    def request(self) -> Request:
        rng, now = self.rng, self.world.now
        capacity = self.shape.num_blocks * self.shape.block_size
        length = rng.randint(1, capacity - 1 if rng.random() < 0.03 else capacity // 8)
        prompt = [rng.randint(0, 1) for _ in range(length)]
        if rng.random() < self.share_of_common:  # a prefix that other prompts share
            prompt = [*rng.choice(self.beginnings)[: capacity // rng.choice([3, 8])], *prompt][: capacity - 1]
        most_output = min(capacity - len(prompt), rng.choice([3, capacity // 3, capacity // 2, 90]))
        beam = None
        if rng.random() < self.share_of_beams:
            beam = BeamParams(rng.choice([2, 2, 3]), rng.choice([-1.0, 0.0, 1.0]), rng.choice(list(EarlyStopping)))
        request = Request(
            key=str(len(self.world.requests)),
            prompt=prompt,
            n=rng.choice([1, 1, 1, 3]) if beam is None else 2,
            max_tokens=rng.randint(1, most_output),
            beam=beam,
            stop_token_ids=frozenset(rng.choice([(), (), (1,)])),
            salt=rng.choice([b"a", b"b"]),
            priority=rng.choice([0, 0, 1]),
            min_tokens=rng.choice([0, 0, 3, 10]),
            deadline=rng.choice([None, None, None, now + rng.randint(1, 20)]),
            has_stop_strings=beam is None and rng.random() < 0.2,
            tenant=rng.choice(["x", "y"]),
            weight=rng.choice([1.0, 2.0]),
            arrived_at=now,
        )
        return self._with_other_result(request)

    def _with_other_result(self, request: Request) -> Request:
        """Sometimes another kind of result, and a prompt longer than the limit of a step."""
        rng = self.rng_of_results
        if rng.random() >= self.share_of_other_results:
            return request
        kind = rng.choice([PROMPT_LOGPROBS, *VALUES])
        if kind is PROMPT_LOGPROBS:
            return request if request.beam is not None else replace(request, result=kind)
        prompt = request.prompt if rng.random() < 0.2 else request.prompt[: self.shape.max_step_tokens]
        fields: dict[str, Any] = {"stop_token_ids": frozenset(), "min_tokens": 0, "has_stop_strings": False}
        return replace(request, prompt=prompt, n=1, max_tokens=1, beam=None, result=kind, **fields)


class LongPromptWorld(RandomWorld):
    """Long prompts whose values or log-probabilities are requested, over few blocks: they are preempted often."""

    def __init__(self, seed: int, max_sampled_tokens: int = 1) -> None:
        super().__init__(seed, max_sampled_tokens)
        rng = self.rng
        self.share_of_other_results = 0.7
        self.share_of_losses = rng.choice([0.0, 0.002])
        results = dict.fromkeys(self.shape.results, PromptComputation.CHUNKED)
        self.shape = replace(self.shape, num_blocks=24, max_sequences=12, num_host_blocks=rng.choice([0, 200]))
        self.shape = replace(self.shape, results=results, max_step_tokens=rng.choice([3, 8]))
        self.num_sites = 1
        while self.world.sites:
            self.world.lose(self.world.sites[0])
        self.world.add_worker(self.shape)

    def add_worker(self) -> None:
        self.world.add_worker(self.shape)

    def request(self) -> Request:
        request, rng = super().request(), self.rng
        if request.result is TOKENS:
            return request
        capacity = self.shape.num_blocks * self.shape.block_size
        prompt = [rng.randint(0, 1) for _ in range(rng.randint(capacity // 4, capacity * 3 // 4))]
        return replace(request, prompt=prompt, max_tokens=min(request.max_tokens, capacity // 4))


class CrowdedWorld(RandomWorld):
    """Many prompts with few distinct prefixes over few blocks, from three tenants with a salt each.

    The same hashes are published, evicted and published again. Requests are cancelled in the middle of their swaps.
    """

    def __init__(self, seed: int, max_sampled_tokens: int = 1) -> None:
        super().__init__(seed, max_sampled_tokens)
        rng = self.rng
        self.beginnings = [[rng.randint(0, 1) for _ in range(200)]]
        self.share_of_common = 1.0
        self.share_of_losses = 0.002
        self.shape = replace(
            self.shape,
            num_blocks=rng.choice([12, 20, 32]),
            num_host_blocks=rng.choice([6, 16, 40]),
            swap_bytes_per_second=1e6,
            prefill_tokens_per_second=100.0,
        )
        limits = replace(self.world.limits, preemption=rng.choice([PreemptionMode.AUTO, PreemptionMode.SWAP]))
        self.world = World(limits, rng)
        for _ in range(self.num_sites):
            self.add_worker()

    def act(self) -> None:
        action = self.rng.random()
        if action < 0.05:
            self.world.cancel_in_mid_swap()
        elif action < 0.2:
            self.world.submit(self.request())
        super().act()

    def request(self) -> Request:
        request, rng = super().request(), self.rng
        tenant = rng.choice(["x", "y", "z"])
        length = min(len(request.prompt), rng.choice([4, 9, 16]))
        prompt = [*self.beginnings[0][:length], rng.randint(0, 1)]
        if len(prompt) + request.max_tokens > self.shape.num_blocks * self.shape.block_size:
            return request
        return replace(request, prompt=prompt, tenant=tenant, salt=tenant.encode())


class ContestedWorld(RandomWorld):
    """Three tenants with other weights and priorities want more slots and blocks than there are, for long outputs."""

    def __init__(self, seed: int, max_new_tokens: int = 1) -> None:
        super().__init__(seed, max_new_tokens)
        rng = self.rng
        self.share_of_losses = 0.001
        self.share_of_common = rng.choice([0.0, 0.5])
        self.shape = replace(
            self.shape,
            num_blocks=rng.choice([40, 64, 200]),
            max_sequences=rng.choice([2, 3, 6]),
            num_host_blocks=rng.choice([0, 40, 200]),
            max_step_tokens=rng.choice([4, 16]),
        )
        limits = replace(
            self.world.limits,
            max_step_tokens=rng.choice([4, 8, 32]),
            queue=AdmissionLimits(max_requests=30),
            policy=rng.choice(["priority", "fair", "fair", "fair"]),
        )
        self.world = World(limits, rng)
        for _ in range(self.num_sites):
            self.add_worker()

    def request(self) -> Request:
        request, rng = super().request(), self.rng
        if request.returns_value:
            return request
        capacity = self.shape.num_blocks * self.shape.block_size
        return replace(
            request,
            max_tokens=max(1, min(capacity - len(request.prompt), rng.choice([5, 60, 150]))),
            stop_token_ids=frozenset(),
            min_tokens=0,
            deadline=None,
            tenant=rng.choice(["x", "x", "x", "y", "z"]),
            priority=rng.choice([-1, 0, 0, 0, 1]),
        )


class LimitedWorld(RandomWorld):
    """Requests of accounts with limits of slots and blocks, and of one without. Limits change while requests run."""

    def __init__(self, seed: int, max_sampled_tokens: int = 1) -> None:
        super().__init__(seed, max_sampled_tokens)
        rng = self.rng
        self.share_of_beams = rng.choice([0.0, 0.1])
        self.limits = {name: self.draw_limits(name) for name in ("x/", "x/batch", "y/")}
        self.has_new_limits: set[str] = set()
        """Accounts whose limits have changed: what runs may exceed the new ones."""

    def draw_limits(self, name: str) -> AccountLimits:
        rng = self.rng
        return AccountLimits(
            name,
            max_running=rng.choice([None, 1, 2, 5]),
            max_queued=rng.choice([None, None, 2]),
            max_kv_blocks=rng.choice([None, *(self.shape.num_blocks * part // 8 for part in (2, 4, 6))]),
        )

    def act(self) -> None:
        if self.rng.random() < 0.002:
            name = self.rng.choice(list(self.limits))
            self.limits[name] = self.draw_limits(name)
            self.has_new_limits.add(name)
        super().act()
        self.check_limits()

    def request(self) -> Request:
        request = super().request()
        names = [name for name in self.limits if name.startswith(request.tenant)]
        return replace(request, limits=self.limits[self.rng.choice(names)])

    def check_limits(self) -> None:
        """A beam search may exceed a limit of blocks that it reserved, after its worker was lost."""
        running: dict[str, list[tuple[Request, int]]] = {}
        for site in self.world.sites:
            replica = site.replica
            for sequence in (*replica.running, *replica.indivisible, *replica.isolated):
                account = running.setdefault(sequence.request.limits.account, [])
                account.append((sequence.request, len(sequence.block_ids)))
        for name, held in running.items():
            if name in self.has_new_limits or len(held) == 1 or any(request.beam is not None for request, _ in held):
                continue
            limits = self.limits[name]
            assert limits.max_running is None or len(held) <= limits.max_running
            assert limits.max_kv_blocks is None or sum(count for _, count in held) <= limits.max_kv_blocks


class BudgetWorld(ContestedWorld):
    """Three accounts, of which two have a limit of tokens, and leases that come seldom and bring little."""

    def __init__(self, seed: int, max_new_tokens: int = 1) -> None:
        super().__init__(seed, max_new_tokens)
        rng = self.rng
        self.share_of_losses = rng.choice([0.001, 0.02])
        self.share_of_common = rng.choice([0.0, 0.5, 0.9])
        self.share_of_leases = rng.choice([0.005, 0.02, 0.1])
        self.limits = {
            name: AccountLimits(
                f"{name}/",
                max_running=rng.choice([None, None, 1, 3]),
                max_kv_blocks=rng.choice([None, None, self.shape.num_blocks // 2]),
                tokens_per_minute=rng.choice([600, 2_000, 100_000]),
                cached_token_factor=rng.choice([0.0, 0.3, 1.0, 1.0]),
            )
            for name in ("x", "y")
        }

    def act(self) -> None:
        if self.rng.random() < self.share_of_leases:
            self.world.lease(self.rng.choice([0.0, 0.3, 1.0]))
        super().act()

    def request(self) -> Request:
        request = super().request()
        return replace(request, limits=self.limits.get(request.tenant, request.limits))


def run_world(world: RandomWorld, num_actions: int) -> World:
    """Performs actions, runs all requests to their end, and checks the invariants of the end."""
    for _ in range(num_actions):
        world.act()
    while len(world.world.working) < world.num_sites:
        world.add_worker()
    world.world.drain()
    world.world.remove_drained()
    world.world.check_texts()
    world.world.check_charges()
    world.world.check_nothing_is_left()
    return world.world
