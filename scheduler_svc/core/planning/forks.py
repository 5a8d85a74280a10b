"""Forks the beams of searches that go on, before a step computes them."""

from collections.abc import Mapping

from scheduler_svc.core.beam_search import BeamGroup
from scheduler_svc.core.policy.waiting import WaitingSequences
from scheduler_svc.core.replica import Replica
from scheduler_svc.core.request import Sequence
from scheduler_svc.core.sequence_ids import SequenceIds


class Forks:
    """Gives each beam of a search its sequence: the one that it continues under another id, or a fork of that.

    A sequence that goes on has another id, since to the worker it has other tokens then.
    """

    def __init__(self, searches: Mapping[str, BeamGroup], waiting: WaitingSequences, ids: SequenceIds) -> None:
        """`searches` are the live ones, by the key of their request."""
        self._searches = searches
        self._waiting = waiting
        self._ids = ids

    def due(self, replica: Replica) -> list[BeamGroup]:
        """The searches on a replica whose beams can be forked, if there is room."""
        groups = (self._searches[key] for key in replica.searches)
        return [group for group in groups if group.is_due]

    def make(self, replica: Replica, group: BeamGroup) -> list[Sequence]:
        """Forks the beams of a search that is due. There is room. Returns those that have one token to compute."""
        sequences = {}
        for step in group.steps:
            for beam, num_shared in step.forks:
                sequences[beam] = self._fork(replica, step.sequence, group.output(beam), num_shared)
            sequence = sequences[step.goes_on_as] = step.sequence
            if new := group.output(step.goes_on_as)[sequence.num_output :]:
                self._waiting.release_all(sequence)
                sequence.append(new)
                replica.rename(sequence, self._ids.of_request(sequence.arrival))
        group.finish_steps(sequences)
        return [beam for beam in sequences.values() if beam.is_decode and beam not in replica.isolated]

    def _fork(self, replica: Replica, parent: Sequence, output: list[int], num_shared: int) -> Sequence:
        tokens = [*parent.request.prompt, *output]
        child = Sequence(self._ids.of_request(parent.arrival), parent.request, 0, parent.arrival, tokens)
        child.num_cached_prompt_tokens = parent.num_cached_prompt_tokens
        child.waited = parent.waited
        child.charge_to(parent.charge)
        child.siblings = parent.siblings
        child.siblings.append(child)
        replica.fork(parent, child, num_shared)
        return child
