"""The real core and the real runner in one process. Plans and outcomes are converted to messages and back, without a
network.

So a test sees each sequence's preemptions, of which a deployment has only a count.
"""

import math
import time
from collections import Counter, defaultdict, deque
from collections.abc import Iterable, Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field, replace
from typing import Any, cast
from unittest.mock import patch

from quire.scheduler.v1 import scheduler_pb2 as scheduler_v1
from quire.worker.v1 import worker_pb2 as worker_v1
from scheduler_svc.core.events import FailedEvent, PromptLogprobsEvent, TokensEvent
from scheduler_svc.core.limits import SchedulerLimits
from scheduler_svc.core.policy import POLICIES, FcfsPolicy, OrderKey
from scheduler_svc.core.policy.preemption import PreemptionMode
from scheduler_svc.core.replica import Replica
from scheduler_svc.core.request import Phase, Sequence
from scheduler_svc.core.scheduler import Scheduler
from scheduler_svc.core.step import StepPlan
from scheduler_svc.session_wire import event_to_proto, request_from_proto
from scheduler_svc.step_responses import ResponseValidator
from scheduler_svc.step_wire import plan_to_proto, shape_from_proto
from worker_svc.instance import ModelInstance as Worker
from worker_svc.launched_step import LaunchedStep
from worker_svc.wire import description_to_proto, outcome_to_proto, step_from_proto

TokenLogprob = tuple[float, tuple[tuple[int, float], ...]]
"""A token's log-probability, and the top tokens at its position with theirs."""


class TurnTaking(FcfsPolicy):
    """First come, first served. The victim is the sequence with the fewest preemptions, then the earliest one."""

    def add(self, sequence: Sequence, now: float) -> None:
        self._waiting.put(sequence, super().preemption_key(sequence))

    def preemption_key(self, sequence: Sequence) -> OrderKey:
        return (-sequence.num_preemptions, -sequence.arrival, *super().preemption_key(sequence)[2:])


@dataclass
class Served:
    """One sequence of a request: its result and its history."""

    sequence: Sequence
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)
    score: float | None = None
    num_returns: int = 0  # how often it was resumed from host memory

    @property
    def num_preemptions(self) -> int:
        """How often it was preempted."""
        return self.sequence.num_preemptions


@dataclass(frozen=True)
class Durations:
    """The speed of a modelled machine, for the core's cost model."""

    token_seconds: float
    """Seconds per token of a step."""
    block_seconds: float
    """Seconds per block of a swap."""


class CoreRunner:
    """Serves requests from beginning to end. Only one at a time may use a worker.

    The core uses `num_blocks` blocks and the method `preemption`. With `durations`, it learns from these instead of
    measured times.
    """

    def __init__(
        self,
        worker: Worker,
        num_blocks: int,
        preemption: str = "auto",
        *,
        num_host_blocks: int | None = None,
        durations: Durations | None = None,
    ) -> None:
        sent = description_to_proto(worker.description, 0, is_draining=False, started_at=0.0)
        about = worker_v1.DescribeResponse.FromString(sent.SerializeToString())
        shape = shape_from_proto(about)
        assert num_blocks <= shape.num_blocks, "the worker has not so many"
        shape = replace(
            shape,
            num_blocks=num_blocks,
            num_host_blocks=shape.num_host_blocks if num_host_blocks is None else num_host_blocks,
        )
        if durations is not None:
            shape = replace(
                shape,
                swap_bytes_per_second=shape.block_bytes / durations.block_seconds,
                prefill_tokens_per_second=1 / durations.token_seconds,
            )
        self._durations = durations
        self._num_moved: dict[tuple[int, int], int] = {}  # blocks, by step and direction
        self._limits = SchedulerLimits(policy="turns", preemption=PreemptionMode(preemption))
        self.core = self._make_core()
        self.replica = Replica(shape)
        self.core.add_replica(self.replica)
        self.may_fail = False
        """Whether requests may fail; then they are in `failed`."""
        self.failed: dict[str, FailedEvent] = {}
        self.peak_blocks = 0  # of the device, that were in use at once
        self.num_copies = 0  # of blocks within the device
        self.num_results: Counter[int] = Counter()  # sequences in steps, by how many tokens these returned for them
        self.prompt_logprobs: defaultdict[str, list[worker_v1.TokenLogprobs]] = defaultdict(list)  # by key
        self._runner = worker.runner
        self._runner.reset()
        opening = worker_v1.StepRequest(epoch=1, generation=1)
        self._validator = ResponseValidator(opening, worker.description.limits.vocab_size, shape.max_sampled_tokens)
        self._launched: deque[tuple[StepPlan, LaunchedStep]] = deque()
        self._last_done = 0.0
        self._served: dict[tuple[str, int], Served] = {}
        self._returns: Counter[int] = Counter()  # by `id` of a sequence

    def serve(
        self, submits: Iterable[scheduler_v1.Submit], indices: Mapping[str, int] | None = None
    ) -> dict[str, list[Served]]:
        """Serves all requests together. Returns the sequences of each, by key and in the order of their index.

        `indices` are the sampling indices of requests with one sequence; the default is 0. Raises AssertionError if a
        request fails that may not, if blocks and owners disagree, or if blocks are left at the end.
        """
        self._served = {}
        alive: dict[str, list[Sequence]] = {}
        for submit in submits:
            request = request_from_proto(scheduler_v1.Submit.FromString(submit.SerializeToString()), time.monotonic())
            assert self.core.submit(request, time.monotonic()) is None
            alive[request.key] = list(self.core.sequences(request.key))
            if indices is not None and request.key in indices:
                alive[request.key][0].index = indices[request.key]
        while self.core.num_running or self.core.num_queued:
            self._step()
        while self.replica.has_pending_updates or self.replica.kv.swaps or self._launched:
            self._step()
        assert not self.replica.kv.device.counts.used, "blocks are left"
        for (key, index), served in self._served.items():
            own = next((s for s in alive[key] if s.index == index), served.sequence)
            served.num_returns = self._returns[id(own)]
        ordered = sorted(self._served.items(), key=lambda item: item[0])
        return {key: [served for (owner, _), served in ordered if owner == key] for key in alive}

    def _make_core(self) -> Scheduler:
        with patch.dict(cast(dict[str, Any], POLICIES), turns=TurnTaking):
            return Scheduler(self._limits)

    def _step(self) -> None:
        """Plans as many steps as may be in flight, and commits the oldest one."""
        while (plan := self._schedule()) is not None:
            self._count(plan)
            self._validator.expect(plan)
            message = plan_to_proto(plan, 1, 1).SerializeToString()
            step = step_from_proto(worker_v1.StepRequest.FromString(message))
            self._launched.append((plan, self._runner.launch(step)))
        assert self._launched, "requests wait and no step is in flight"
        plan, launched = self._launched.popleft()
        outcome = self._runner.finish(launched)
        done = time.perf_counter()
        result = outcome_to_proto(outcome)
        busy = done - max(self._last_done, launched.started) - outcome.stall_seconds
        result.busy_us = max(0, round(busy * 1e6))
        self._last_done = done
        if self._durations is not None:
            self._change_durations(plan, result, self._durations)
        self._report(result)
        response = worker_v1.StepResponse(epoch=1, generation=1, step_id=plan.step_id, result=result)
        response = worker_v1.StepResponse.FromString(response.SerializeToString())
        self.num_results.update(response.result.num_tokens)
        for event in self.core.commit(
            self.replica, self._validator.outcome_of(response, self.replica), time.monotonic()
        ):
            if isinstance(event, PromptLogprobsEvent):
                known = self.prompt_logprobs[event.request.key]
                assert event.offset == 1 + len(known), "a gap, or a token twice"
                known += cast("Seq[worker_v1.TokenLogprobs]", event.logprobs)
                continue
            if isinstance(event, FailedEvent) and self.may_fail:
                self.failed[event.request.key] = event
                continue
            assert isinstance(event, TokensEvent), event
            self._note(event)
        self.replica.check_integrity()

    def _report(self, result: worker_v1.StepResult) -> None:
        """What else the worker reports with a step."""

    def _change_durations(self, plan: StepPlan, result: worker_v1.StepResult, durations: Durations) -> None:
        result.busy_us = round(plan.num_tokens * durations.token_seconds * 1e6)
        for transfer in result.swaps:
            num_blocks = self._num_moved[transfer.step_id, transfer.direction]
            transfer.duration_us = round(num_blocks * durations.block_seconds * 1e6)

    def _schedule(self) -> StepPlan | None:
        swapped = list(self.replica.swapped)
        plan = self.core.schedule(self.replica, time.monotonic())
        self._returns.update(id(s) for s in swapped if s.phase in (Phase.SWAPPING_IN, Phase.RUNNING))
        return plan

    def _count(self, plan: StepPlan) -> None:
        pool = self.replica.kv.device.pool
        self.peak_blocks = max(self.peak_blocks, self.replica.shape.num_blocks - pool.num_available)
        self.num_copies += len(plan.copies)
        self._num_moved[plan.step_id, worker_v1.DIRECTION_OUT] = len(plan.swap_out)
        self._num_moved[plan.step_id, worker_v1.DIRECTION_IN] = len(plan.swap_in)

    def _note(self, event: TokensEvent) -> None:
        """Keeps the events that a gateway would receive."""
        sent = scheduler_v1.Event.FromString(event_to_proto(event).SerializeToString())
        served = self._served.setdefault((sent.key, sent.tokens.index), Served(event.sequence))
        assert sent.tokens.offset == len(served.token_ids), "a gap, or a token twice"
        served.token_ids += sent.tokens.token_ids
        served.logprobs += [
            (logprobs.logprob, tuple((top.token_id, top.logprob) for top in logprobs.top))
            for logprobs in sent.tokens.logprobs
        ]
        served.score = sent.tokens.score if sent.tokens.HasField("score") else None


def submission(
    key: str, prompt: Seq[int], max_tokens: int, n: int = 1, logprobs: int | None = None, **sampling: float | int
) -> scheduler_v1.Submit:
    """A submission as a gateway sends it. `sampling` has fields of quire.worker.v1.SamplingParams; the default is
    greedy."""
    params = worker_v1.SamplingParams(logprobs=logprobs)
    for name, value in {"top_p": 1.0, "repetition_penalty": 1.0, **sampling}.items():
        setattr(params, name, value)
    return scheduler_v1.Submit(
        key=key, prompt_token_ids=prompt, n=n, max_tokens=max_tokens, sampling=params, tenant="default", weight=1.0
    )


def serve_preempted(
    worker: Worker, num_blocks: int, preemption: str, prompts: Seq[Seq[int]], num_tokens: int
) -> list[Served]:
    """Serves all prompts together, greedily, and returns the sequence of each.

    Raises AssertionError if no prompt has a cached prefix, or if none is preempted.
    """
    core_runner = CoreRunner(worker, num_blocks, preemption)
    served = core_runner.serve(submission(str(place), prompt, num_tokens) for place, prompt in enumerate(prompts))
    assert core_runner.core.totals.cache_hits > 0
    assert core_runner.core.totals.preemptions > 0
    return [served[str(place)][0] for place in range(len(prompts))]


def num_blocks_for(num_tokens: int, block_size: int) -> int:
    """The number of blocks for `num_tokens` tokens, the last one possibly partial."""
    return math.ceil(num_tokens / block_size)
