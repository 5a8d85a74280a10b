"""Takes in what steps return for beams: the core's part of beam search.

`beam_search.py` decides how each beam continues: in no, one or several ways. `planning/forks.py` carries that out.
"""

from scheduler_svc.core.events import TokensEvent
from scheduler_svc.core.request_table import RequestTable
from scheduler_svc.core.step import SampledSequence, ScheduledSequence


class BeamSearches:
    """Takes in what steps return for beams."""

    def __init__(self, requests: RequestTable) -> None:
        self._requests = requests

    def commit(self, part: ScheduledSequence, result: SampledSequence) -> tuple[int, list[TokensEvent]] | None:
        """Keeps a beam's candidates, and advances its search once all beams have theirs.

        Returns how many beams have advanced, and the sequences found if the search has ended with that; None if the
        worker returned too few candidates.
        """
        sequence = part.sequence
        request = sequence.request
        if not result.logprobs:
            return None
        group = self._requests.searches[request.key]
        group.take(sequence, part.start + part.num_tokens, result)
        if not group.is_complete:
            return 0, []
        num_beams = len(sequence.siblings)
        if sequence.charge is not None and request.beam is not None:
            sequence.charge.pay_search(request.beam.width)
        for beam in group.advance():
            self._requests.end(beam)
            sequence.siblings.remove(beam)
        if not group.is_over:
            return num_beams, []
        found = group.events()
        if len(found) < request.n:
            return None
        for beam in list(sequence.siblings):
            self._requests.end(beam)
        return num_beams, found
