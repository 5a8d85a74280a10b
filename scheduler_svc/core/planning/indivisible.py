"""Prompts that are computed in one step each.

Those that fit into a step with others join it. One that does not fit begins the next step, whatever the budget; the
step after that is for the others.
"""

from scheduler_svc.core.planning.step_builder import StepBuilder
from scheduler_svc.core.replica import Replica
from scheduler_svc.core.request import Sequence


def begin_with_due(step: StepBuilder) -> None:
    """Begins a step with the prompt that did not fit into the last one, if there is any."""
    replica = step.replica
    if replica.is_indivisible_due:
        replica.is_indivisible_due = False
        if due := _unplanned(replica):
            step.add_due(due[0])


def add_fitting(step: StepBuilder) -> None:
    """Adds the prompts that fit into the rest of a step. If one does not, the next step begins with it."""
    for sequence in _unplanned(step.replica):
        if not step.takes_whole(sequence):
            step.replica.is_indivisible_due = not step.begins_with_due
            step.is_closed = True
            return
        step.add_indivisible(sequence)


def _unplanned(replica: Replica) -> list[Sequence]:
    return [sequence for sequence in replica.indivisible if not sequence.num_steps_in_flight]
