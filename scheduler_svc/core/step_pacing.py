"""When the next step of a replica is planned while one runs: late, so that requests that arrive meanwhile take part."""

from math import exp

from scheduler_svc.core.replica import Replica

_SHARE = 0.3  # of the time that the running step is expected to take, for which the next one is planned ahead at most
_LEAST_SECONDS = 0.03  # in which the next step is planned, sent and prepared at most, where steps are short
_LEAST_FACTOR = 0.1
_MOST_LOST = 0.005  # of the device's time, while it waits for steps that were held back
_RATE = 0.02  # by which the lead becomes shorter after each of these for which the device did not wait


class StepPacing:
    """Paces the steps of one replica, by how long they usually take.

    A step that is sent waits at the worker until the one before it has ended, so that the device is never idle, and
    requests that arrive in between wait for both. So the next step is planned only shortly before the running one is
    expected to end. How long before, its *lead*, is learnt: at first 30 % of the running step's time, but at least
    30 ms, then less, down to where the device is idle for 0.5 % of its time. Steps shorter than the lead are planned at
    once, and so are all steps until the replica's costs are known.
    """

    def __init__(self, replica: Replica) -> None:
        self._replica = replica
        self._running: int | None = None  # the step whose end is expected
        self._due_at = 0.0
        self._factor = 1.0  # of the first lead
        self._holds_back = False  # the next step, while one runs
        self._held_back = set[int]()  # the steps in flight that were

    def seconds_until_next(self, now: float) -> float:
        """How long to wait before the next step is planned; 0: not at all.

        It is called whenever a step was sent or has ended, and after the time that it returned.
        """
        in_flight = self._replica.steps_in_flight
        if not in_flight:
            return 0.0
        running = in_flight[0]
        if running.step_id != self._running:  # it has just begun
            costs = self._replica.costs
            expected = costs.plan_seconds(running) if costs.has_learned else 0.0
            self._running = running.step_id
            self._due_at = now + expected - self._factor * max(_SHARE * expected, _LEAST_SECONDS)
        wait = max(0.0, self._due_at - now)
        self._holds_back |= wait > 0
        return wait

    def note_planned(self, step_id: int | None) -> None:
        """A step was planned, and is in flight; None: there was none to plan."""
        if step_id is not None and self._holds_back:
            self._held_back.add(step_id)
        self._holds_back = False

    def note_end(self, step_id: int, busy_seconds: float, idle_seconds: float) -> None:
        """A step has ended that took so long, and before which the device was idle for so long."""
        if step_id in self._held_back:
            self._held_back.remove(step_id)
            lost = idle_seconds / max(busy_seconds + idle_seconds, 1e-6)
            self._factor = min(1.0, max(_LEAST_FACTOR, self._factor * exp(_RATE * (lost / _MOST_LOST - 1))))
