"""Random worlds in which the memory of the workers' machines is short."""

from collections.abc import Callable
from dataclasses import replace

from memory_worker import MemoryWorker
from random_worlds import ContestedWorld
from scheduler_svc.core.request import Request
from scheduler_svc.core.step import MemoryPressure
from scheduler_world import World

_LEVELS = ((1.0, MemoryPressure.CRITICAL), (0.9, MemoryPressure.HIGH), (0.0, MemoryPressure.NONE))


class PressedWorld(ContestedWorld):
    """Workers whose blocks are in host memory, which is short at times, or always.

    In some worlds a worker measures anything; in others, how much of a limit its blocks of both tiers take.
    """

    def __init__(self, seed: int, max_new_tokens: int = 1) -> None:
        super().__init__(seed, max_new_tokens)
        rng = self.rng
        self.share_of_common = rng.choice([0.0, 0.5, 0.9])
        self.share_measured = rng.choice([0.1, 0.5, 1.0])  # of the steps
        self.limit = rng.choice([None, None, 0.3, 0.6, 0.9])  # of the device's blocks
        self.constant = rng.choice([None, None, *MemoryPressure])  # what is always measured, without a limit
        self.shape = replace(self.shape, has_kv_in_host_memory=True)
        self.num_measured: dict[MemoryPressure, int] = dict.fromkeys(MemoryPressure, 0)
        self.world = World(self.world.limits, rng)
        for _ in range(self.num_sites):
            self.add_worker()

    def add_worker(self) -> None:
        super().add_worker()
        worker = self.world.sites[-1].worker
        worker.measure = self._measuring(worker)

    def _measuring(self, worker: MemoryWorker) -> Callable[[], MemoryPressure | None]:
        def measure() -> MemoryPressure | None:
            if self.rng.random() >= self.share_measured:
                return None
            pressure = self.constant or self.rng.choice(list(MemoryPressure))
            if self.limit is not None:
                share = worker.num_blocks_with_memory / (self.limit * self.shape.num_blocks)
                pressure = next(level for least, level in _LEVELS if share >= least)
            self.num_measured[pressure] += 1
            return pressure

        return measure

    def act(self) -> None:
        super().act()
        for site in self.world.sites:
            if self.rng.random() < 0.01 and (pressure := site.worker.measure()) is not None:
                site.replica.note_pressure(pressure)  # as with Describe

    def request(self) -> Request:
        return replace(super().request(), deadline=None)
