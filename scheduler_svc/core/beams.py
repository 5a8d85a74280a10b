"""Advances beam searches: the core's part of beam search.

`beam_search.py` decides how each beam continues: in no, one or several ways. The first way continues its sequence under
another id, since to the worker it has other tokens now; each other way is a fork.
"""

from scheduler_svc.core.beam_search import BeamStep
from scheduler_svc.core.events import TokensEvent
from scheduler_svc.core.planning.capacity import Capacity
from scheduler_svc.core.policy.waiting import WaitingSequences
from scheduler_svc.core.request import Phase, Sequence
from scheduler_svc.core.request_table import RequestTable
from scheduler_svc.core.step import SampledSequence


class BeamSearches:
    """Takes in what steps return for beams."""

    def __init__(self, requests: RequestTable, waiting: WaitingSequences, capacity: Capacity) -> None:
        self._requests = requests
        self._waiting = waiting
        self._capacity = capacity

    def commit(self, sequence: Sequence, result: SampledSequence) -> list[TokensEvent] | None:
        """Keeps a beam's candidates, and advances its search once all beams have theirs.

        Returns the sequences found if the search has ended with that; None if the worker returned too few candidates.
        """
        request = sequence.request
        if not result.logprobs:
            return None
        group = self._requests.searches[request.key]
        group.take(sequence, result)
        if not group.is_complete:
            return []
        if sequence.charge is not None and request.beam is not None:
            sequence.charge.pay_search(request.beam.width)
        for step in group.advance():
            self._continue(step)
        if not group.is_over:
            return []
        found = group.events()
        if len(found) < request.n:
            return None
        for beam in list(sequence.siblings):
            self._requests.end(beam)
        return found

    def _continue(self, step: BeamStep) -> None:
        sequence, tokens = step.sequence, step.next_tokens
        if not tokens:
            self._requests.end(sequence)
            sequence.siblings.remove(sequence)
            return
        replica = self._requests.replica_of(sequence) if sequence.phase is Phase.RUNNING else None
        for token in tokens[1:]:
            child = Sequence(self._requests.new_id(), sequence.request, 0, sequence.arrival, [*sequence.tokens, token])
            child.num_cached_prompt_tokens = sequence.num_cached_prompt_tokens
            child.waited = sequence.waited
            child.charge_to(sequence.charge)
            child.siblings = sequence.siblings
            child.siblings.append(child)
            step.add_child(child)
            if replica is not None and self._capacity.may_fork(replica):
                replica.fork(sequence, child)
            else:
                self._waiting.add(child)
        sequence.append(tokens[:1])
        if replica is not None:
            self._waiting.release_all(sequence)
            replica.rename(sequence, self._requests.new_id())
