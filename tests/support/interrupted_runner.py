"""The real core and the real runner, and what may happen to requests between two steps: the worker or the scheduler is
lost, the prefix cache is reset, memory is short."""

import random
import time
from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any

from core_runner import CoreRunner, Served
from quire.scheduler.v1 import scheduler_pb2 as scheduler_v1
from quire.worker.v1 import worker_pb2 as worker_v1
from scheduler_svc.core.events import TokensEvent
from scheduler_svc.core.kv.block_hash_report import BlockHashReport, TokenChain
from scheduler_svc.core.kv.cache_reset import reset_prefix_cache
from scheduler_svc.core.replica import Replica
from scheduler_svc.core.request import Request, RestoredSequence
from scheduler_svc.step_responses import ResponseValidator
from worker_svc.block_hashes import BlockHashTable
from worker_svc.instance import ModelInstance as Worker

_PRESSURES = (worker_v1.MEMORY_PRESSURE_NONE, worker_v1.MEMORY_PRESSURE_HIGH, worker_v1.MEMORY_PRESSURE_CRITICAL)


class InterruptedRunner(CoreRunner):
    """Serves requests as the base class does. Each step is followed by an interruption with the probability `share`."""

    def __init__(
        self, worker: Worker, num_blocks: int, preemption: str, rng: random.Random, share: float, **options: Any
    ) -> None:
        super().__init__(worker, num_blocks, preemption, **options)
        self.interruptions: Counter[str] = Counter()
        self.num_restored_blocks = 0
        self._worker, self._rng, self._share = worker, rng, share
        self._submits: dict[str, scheduler_v1.Submit] = {}
        self._ended: set[tuple[str, int]] = set()

    def serve(
        self, submits: Iterable[scheduler_v1.Submit], indices: Mapping[str, int] | None = None
    ) -> dict[str, list[Served]]:
        self._submits = {submit.key: submit for submit in submits}
        return super().serve(self._submits.values(), indices)

    def _step(self) -> None:
        for key in self.core.keys:
            for sequence in self.core.sequences(key):  # as a gateway that finds no stop string
                self.core.acknowledge(key, sequence.index, sequence.num_output)
        super()._step()
        if self._rng.random() < self._share:
            interrupt = self._rng.choice([self._lose_worker, self._take_over, self._reset_cache])
            self.interruptions[interrupt.__name__.lstrip("_")] += 1
            interrupt()

    def _note(self, event: TokensEvent) -> None:
        super()._note(event)
        if event.end is not None:
            self._ended.add((event.sequence.request.key, event.sequence.index))

    def _report(self, result: worker_v1.StepResult) -> None:
        if self._rng.random() < self._share:
            result.memory_pressure = self._rng.choice(_PRESSURES)

    def _lose_worker(self) -> None:
        """Another process takes the worker's place, without its blocks."""
        self._finish_launched()
        assert not self.core.remove_replica(self.replica, may_have_crashed=False)
        self._runner.block_hashes = BlockHashTable()
        self._renew_replica()
        assert not self.core.add_replica(self.replica)

    def _take_over(self) -> None:
        """Another scheduler takes this one's place, with what gateways and Redis know."""
        self._finish_launched()
        live = {key: self.core.sequences(key)[0].request for key in self.core.keys}
        self._renew_replica()
        report = self._runner.block_hashes.report()
        chains = [TokenChain(one.salt, one.prompt, self._outputs(one)) for one in live.values()]
        self.num_restored_blocks += self.replica.kv.restore_cached_blocks(
            BlockHashReport(dict(report.device), dict(report.host)), chains
        )
        self.core = self._make_core()
        self.core.add_replica(self.replica)
        for request in live.values():
            assert self.core.submit(request, time.monotonic(), self._restored(request)) is None

    def _reset_cache(self) -> None:
        reset_prefix_cache(self.replica.kv)

    def _outputs(self, request: Request) -> list[list[int]]:
        if request.beam is not None:
            return []
        served = (self._served.get((request.key, index)) for index in range(request.n))
        return [[] if one is None else list(one.token_ids) for one in served]

    def _restored(self, request: Request) -> list[RestoredSequence]:
        if request.beam is not None:
            return [RestoredSequence([], ended=False)]
        num_prompt = len(self.prompt_logprobs[request.key])
        return [
            RestoredSequence(tokens, (request.key, index) in self._ended, num_prompt)
            for index, tokens in enumerate(self._outputs(request))
        ]

    def _finish_launched(self) -> None:
        """The worker computes what it was sent. Nobody reads the results."""
        while self._launched:
            self._runner.finish(self._launched.popleft()[1])

    def _renew_replica(self) -> None:
        shape = self.replica.shape
        self.replica = Replica(shape)
        self._runner.reset()
        opening = worker_v1.StepRequest(epoch=1, generation=1)
        vocab_size = self._worker.description.limits.vocab_size
        self._validator = ResponseValidator(opening, vocab_size, shape.max_sampled_tokens)
