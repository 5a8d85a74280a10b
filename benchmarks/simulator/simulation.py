"""The event loop: arrivals, and starts and ends of steps, from one heap of events."""

import heapq
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any

from benchmarks.simulator.arrivals import Arrival, Traffic
from benchmarks.simulator.device import Device, StepCompletion
from benchmarks.simulator.driver import MAX_STEPS_IN_FLIGHT, CoreDriver, Replica, Setup, SimulatedStep, StepPacing
from benchmarks.simulator.prompts import Tokens
from benchmarks.simulator.recorder import RunRecorder, Sample
from benchmarks.simulator.request_record import RequestRecord
from scheduler_svc.core.events import Event

_DEADLINE_TICK = 0.05  # seconds between checks of deadlines, as in the service
_TRIES = 4  # replicas with a step in flight that are checked after each event for a waiting request


class SimulationStalled(Exception):  # noqa: N818
    """Requests are live, and no event is left."""


@dataclass(slots=True, eq=False)
class _SimulatedReplica:
    """A replica and its worker."""

    replica: Replica
    device: Device
    pacing: StepPacing
    num_steps_in_flight: int = 0


class Simulation:
    """One run. `now` is in seconds from its start; independent of the real clock.

    A replica is sent a step when its pacing allows it, it has fewer than MAX_STEPS_IN_FLIGHT, and there is work.
    Replicas without work are checked again after events, the idle ones first; as in the service, the first one takes
    waiting requests.
    """

    def __init__(self, setup: Setup, traffic: Traffic, *, seed: int = 0, sample_seconds: float = 0.1) -> None:
        self.setup = setup
        self.recorder = RunRecorder(sample_seconds)
        self.now = 0.0
        self.num_steps = 0
        self.after_schedule: Callable[[Replica, SimulatedStep], None] | None = None
        self.after_commit: Callable[[Replica, StepCompletion], None] | None = None
        self.driver = CoreDriver(setup, tokens := Tokens(seed))
        self._tokens = tokens
        self._traffic = traffic
        self._simulated = [
            _SimulatedReplica(replica, Device(setup.machine), StepPacing(replica)) for replica in self.driver.replicas
        ]
        self._by_replica = {simulated.replica: simulated for simulated in self._simulated}
        self._idle = dict.fromkeys(self._simulated)  # nothing in flight, and no work at the last check
        self._short: dict[_SimulatedReplica, None] = {}  # the same, with a step in flight
        self._heap: list[tuple[float, int, Callable[[Any], object], Any]] = []
        self._num_pushed = 0
        self._checks_deadlines = False

    @property
    def device_seconds(self) -> float:
        """The sum of all devices' computing time."""
        return sum(simulated.device.busy_seconds for simulated in self._simulated)

    def call_at(self, at: float, call: Callable[[], None]) -> None:
        """Calls a function at a time in seconds."""
        self._push(at, lambda _: call(), None)

    def run(self, until: float | None = None) -> None:
        """Runs until every request has ended, or until a time. Raises SimulationStalled."""
        for arrival in self._traffic.first():
            self._push(arrival.at, self._arrive, arrival)
        self._push(0.0, self._sample, None)
        while self._heap:
            at, _, handle, value = heapq.heappop(self._heap)
            if until is not None and at > until:
                self.now = until
                return
            self.now = at
            handle(value)
        if self.recorder.num_live:
            raise SimulationStalled(f"{self.recorder.num_live} requests are live, and nothing happens any more")

    # Events.

    def _arrive(self, arrival: Arrival) -> None:
        following = self._traffic.after_arrival()
        if following is not None:
            self._push(following.at, self._arrive, following)
        recorder = self.recorder
        number = len(recorder.records)
        prompt = self._tokens.prompt(arrival, number)
        script = self._tokens.script(arrival, len(prompt))
        record = RequestRecord(number, arrival, script, len(prompt), recorder.usage_by_tenant[arrival.tenant])
        recorder.on_arrival(record)
        refusal = self.driver.submit(record, prompt, self.now)
        if refusal is not None:
            self._deliver([refusal])
            return
        if arrival.deadline is not None and not self._checks_deadlines:
            self._checks_deadlines = True
            self._push(self.now + _DEADLINE_TICK, self._check_deadlines, None)
        self._wake()

    def _complete(self, flight: tuple[_SimulatedReplica, SimulatedStep, StepCompletion]) -> None:
        simulated, step, done = flight
        simulated.num_steps_in_flight -= 1
        self._deliver(self.driver.commit(simulated.replica, step, done, self.now))
        simulated.pacing.note_end(step.plan.step_id, done.seconds, done.idle_seconds)
        if self.after_commit is not None:
            self.after_commit(simulated.replica, done)
        self._short.pop(simulated, None)
        self._dispatch(simulated)
        self._wake()

    def _check_deadlines(self, _: None) -> None:
        expired = self.driver.expire(self.now)
        if expired:
            self._deliver(expired)
            self._wake()
        if self.recorder.num_live:
            self._push(self.now + _DEADLINE_TICK, self._check_deadlines, None)
        else:
            self._checks_deadlines = False

    def _sample(self, _: None) -> None:
        recorder = self.recorder
        sample = Sample(self.now, self.driver.memory(), self.driver.num_waiting, recorder.num_generated)
        recorder.timeline.add(sample)
        if self._heap:  # events are left
            self._push(self.now + recorder.timeline.gap, self._sample, None)

    # Their effects.

    def _push(self, at: float, handle: Callable[[Any], object], value: Any) -> None:
        self._num_pushed += 1
        heapq.heappush(self._heap, (at, self._num_pushed, handle, value))

    def _deliver(self, events: Sequence[Event]) -> None:
        for _ in range(self.recorder.on_events(events, self.now)):
            arrival = self._traffic.after_end(self.now)
            if arrival is not None:
                self._push(arrival.at, self._arrive, arrival)

    def _wake(self) -> None:
        """Checks replicas without work, while waiting requests are placed."""
        driver = self.driver
        while driver.num_waiting and self._idle:
            simulated = next(iter(self._idle))
            if not self._dispatch(simulated):
                break
        if driver.num_waiting and self._short:
            for simulated in list(islice(self._short, _TRIES)):
                self._dispatch(simulated)

    def _dispatch(self, simulated: _SimulatedReplica) -> bool:
        """Sends a replica, and others that got work, their next steps. Returns whether there was any."""
        has_work = self._fill(simulated)
        while placed := self.driver.take_placed():
            has_work = True
            for replica in placed:
                self._fill(self._by_replica[replica])
        return has_work

    def _fill(self, simulated: _SimulatedReplica) -> bool:
        self._idle.pop(simulated, None)
        self._short.pop(simulated, None)
        num_before = simulated.num_steps_in_flight
        while simulated.num_steps_in_flight < MAX_STEPS_IN_FLIGHT:
            if seconds := simulated.pacing.seconds_until_next(self.now):
                self._push(self.now + seconds, self._dispatch, simulated)
                break
            step = self.driver.schedule(simulated.replica, self.now)
            simulated.pacing.note_planned(None if step is None else step.plan.step_id)
            if step is None:
                (self._short if simulated.num_steps_in_flight else self._idle)[simulated] = None
                break
            if self.after_schedule is not None:
                self.after_schedule(simulated.replica, step)
            self.recorder.on_admission(step.admitted, self.now)
            done = simulated.device.run(step.plan.step_id, step.work, self.now)
            simulated.num_steps_in_flight += 1
            self.num_steps += 1
            self._push(done.at, self._complete, (simulated, step, done))
        return simulated.num_steps_in_flight > num_before
