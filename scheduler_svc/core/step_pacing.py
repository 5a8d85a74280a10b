"""When the next step of a replica is planned while one runs: late, so that requests that arrive meanwhile take part."""

from scheduler_svc.core.replica import Replica

_SHARE = 0.3  # of the time that the running step is expected to take, for which the next one is planned ahead
_LEAST_SECONDS = 0.03  # ahead, in which the next step is planned, sent and prepared


class StepPacing:
    """Paces the steps of one replica, by how long they usually take.

    A step that is sent waits at the worker until the one before it has ended, so that the device is never idle, and
    requests that arrive in between wait for both. So the next step is planned only shortly before the running one is
    expected to end: for 30 % of its time, which may vary, but at least 30 ms. Steps shorter than that are planned at
    once, and so are all steps until the replica's costs are known.
    """

    def __init__(self, replica: Replica) -> None:
        self._replica = replica
        self._running: int | None = None  # the step whose end is expected
        self._due_at = 0.0

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
            self._due_at = now + expected - max(_SHARE * expected, _LEAST_SECONDS)
        return max(0.0, self._due_at - now)
