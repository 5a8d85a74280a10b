"""Random worlds in which everything that the scheduler knows is used together."""

from dataclasses import replace

from random_worlds import RandomWorld
from scheduler_svc.core.account_limits import AccountLimits
from scheduler_svc.core.admission import AdmissionLimits
from scheduler_svc.core.kv.cache_reset import reset_prefix_cache
from scheduler_svc.core.limits import SchedulerLimits
from scheduler_svc.core.policy import PolicySettings
from scheduler_svc.core.request import Request
from scheduler_svc.core.scheduler import Scheduler
from scheduler_svc.core.step import MemoryPressure
from scheduler_world import World

_TENANTS = [f"t{number}" for number in range(12)]
_WEIGHTS = (0.05, 0.5, 1.0, 1.0, 1.0, 3.0, 20.0)


class CombinedWorld(RandomWorld):
    """Many tenants of several weights, accounts with all limits, classes, deadlines and prompts that are indivisible.

    Workers are lost and replaced by others with other sizes, measure their memory, speculate, and report how long steps
    take. Time passes with each action, so that sequences rise and deadlines pass in every state.
    """

    def __init__(self, seed: int, max_sampled_tokens: int = 1) -> None:
        super().__init__(seed, max_sampled_tokens)
        rng = self.rng
        self.share_of_losses = rng.choice([0.0, 0.002, 0.02])
        self.share_of_beams = rng.choice([0.0, 0.1, 0.4])
        self.share_of_leases = rng.choice([0.02, 0.1])
        self.share_measured = rng.choice([0.0, 0.0, 0.3, 1.0])
        self.priorities = rng.choice([(0,), (-1, 0, 0, 1), tuple(range(-12, 12))])
        self.tenants = _TENANTS[: rng.choice([2, 5, 12])]
        self.weights = {tenant: rng.choice(_WEIGHTS) for tenant in self.tenants}
        self.share_of_deadlines = rng.choice([0.0, 0.3])
        self.is_kv_in_host_memory = rng.random() < 0.4
        self.share_submitted = rng.choice([0.0, 0.1, 0.3])
        self.tick = rng.choice([0.0, 0.01, 0.1])
        self.shape = replace(
            self.shape,
            num_blocks=rng.choice([24, 40, 64, 200]),
            has_kv_in_host_memory=self.is_kv_in_host_memory,
            usual_step_tokens=rng.choice([0, 2, 8]),
            max_indivisible_tokens=rng.choice([0, 40]),
        )
        limits = SchedulerLimits(
            max_step_tokens=rng.choice([4, 8, 32]),
            max_sequences=12,
            queue=AdmissionLimits(max_requests=rng.choice([20, 60])),
            policy=rng.choice(["fcfs", "priority", "fair", "fair", "fair"]),
            policy_settings=PolicySettings(rng.choice([0.3, 3.0]), rng.choice([0.0, 2.0, 60.0])),
            preemption=self.world.limits.preemption,
        )
        self.limits = {
            f"{tenant}/{name}": self.draw_limits(f"{tenant}/{name}") for tenant in self.tenants for name in ("", "b")
        }
        self.num_cancelled = 0
        self.world = World(limits, rng)
        for _ in range(self.num_sites):
            self.add_worker()

    def draw_limits(self, name: str) -> AccountLimits:
        rng = self.rng
        if rng.random() < 0.4:
            return AccountLimits()
        return AccountLimits(
            name,
            max_running=rng.choice([None, 1, 2, 5]),
            max_queued=rng.choice([None, None, 2]),
            max_kv_blocks=rng.choice([None, None, *(self.shape.num_blocks * part // 8 for part in (2, 4, 6))]),
            tokens_per_minute=rng.choice([None, None, 600, 100_000]),
            cached_token_factor=rng.choice([0.0, 0.3, 1.0, 1.0]),
        )

    def add_worker(self) -> None:
        super().add_worker()
        rng, old = self.rng, self.world.sites[-1]
        if not hasattr(self, "share_measured"):
            return
        worker = old.worker

        def measure() -> MemoryPressure | None:
            return rng.choice(list(MemoryPressure)) if rng.random() < self.share_measured else None

        worker.measure = measure

    def act(self) -> None:
        world, rng = self.world, self.rng
        world.now += self.tick * rng.random()
        action = rng.random()
        if action < self.share_of_leases:
            world.lease(rng.choice([0.0, 0.3, 1.0]))
        elif action < 0.3:
            world.wait(0.0)
        if rng.random() < self.share_submitted:
            world.submit(self.request())
        if rng.random() < 0.004:
            name = rng.choice(list(self.limits))
            self.limits[name] = self.draw_limits(name)
        if rng.random() < 0.01:
            world.cancel_in_mid_swap()
        if rng.random() < 0.005 and world.sites:
            reset_prefix_cache(rng.choice(world.sites).replica.kv)
        if rng.random() < 0.02 and self.share_measured and world.sites:
            rng.choice(world.sites).replica.note_pressure(rng.choice(list(MemoryPressure)))
        if rng.random() < 0.003 and (keys := list(world.scheduler.keys)):
            world.scheduler.lift_stop_string_lead(rng.choice(keys))
        if rng.random() < 0.003 and not world.sites:
            size = self.shape.block_size
            self.shape = replace(self.shape, block_size=rng.choice([2, 4, size]))
        if rng.random() < 0.01:
            self.shape = replace(
                self.shape,
                num_blocks=rng.choice([24, 40, 64, 200]),
                max_sequences=rng.choice([3, 6, 16]),
                num_host_blocks=rng.choice([0, 7, 100]),
            )
        super().act()

    def request(self) -> Request:
        request, rng, now = super().request(), self.rng, self.world.now
        tenant = rng.choice(self.tenants)
        deadline = None
        if rng.random() < self.share_of_deadlines:
            deadline = now + rng.choice([0.01, 0.5, 3.0])
        weight = self.weights[tenant] if rng.random() < 0.9 else rng.choice(_WEIGHTS)
        return replace(
            request,
            tenant=tenant,
            weight=weight,
            salt=rng.choice([b"", tenant.encode()]),
            priority=rng.choice(self.priorities),
            limits=self.limits[f"{tenant}/" + rng.choice(["", "b"])],
            deadline=deadline,
        )


def check_is_empty(scheduler: Scheduler) -> None:
    """Asserts that a scheduler without requests remembers none."""
    waiting = scheduler.waiting
    assert len(waiting) == 0
    assert not waiting._put_first
    assert not waiting.prefix_waiters._by_producer
    assert not waiting.accounts._accounts
    assert not waiting.accounts._limited
    assert not waiting._suspected
    assert not scheduler.poison._losses
    assert not scheduler.poison._suspected
    admission = waiting.admission
    assert not admission._waiting
    assert not admission._tenants
    assert not admission._num_of_account
    assert admission.num_requests == admission.num_tokens == 0
    assert not scheduler._requests._requests
    assert not scheduler._requests.searches
    assert not len(scheduler._requests._deadlines)
    assert not scheduler._preemptor._preempted
    for replica in scheduler.replicas:
        for name in ("running", "indivisible", "isolated", "swapped", "pending_free", "steps_in_flight", "searches"):
            assert not getattr(replica, name), name
        assert not replica.num_slots
        assert not replica.num_slots_of
        assert not replica.finished_ids
        assert not replica.kv._copies
        assert not replica.kv._block_table_updates
        assert not replica.kv._swapping_in
        assert not replica.kv._prefixes._computing._sequences
        assert not len(replica.kv.swaps)
        assert not replica.kv.swaps.has_waiting
    policy = waiting.policy
    for tenant in getattr(policy, "_tenants", {}).values():
        assert not tenant.waits
    for each in getattr(policy, "_classes", ()):
        assert not each.num_waiting
        assert not len(each._ready)
        assert not len(each.not_eligible)
