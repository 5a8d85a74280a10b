"""The live requests of one model, and how they end."""

from collections.abc import Iterable, KeysView
from collections.abc import Sequence as Seq
from itertools import chain

from scheduler_svc.core.beam_search import BeamGroup
from scheduler_svc.core.budgets import Budget, Budgets, Charge
from scheduler_svc.core.events import FailedEvent, Failure
from scheduler_svc.core.lazy_heap import LazyHeap
from scheduler_svc.core.planning.isolated_runs import IsolatedRuns
from scheduler_svc.core.policy.waiting import WaitingSequences
from scheduler_svc.core.replica import Replica
from scheduler_svc.core.request import Phase, Request, RestoredSequence, Sequence
from scheduler_svc.core.sequence_ids import SequenceIds


class RequestTable:
    """Requests with sequences that have not ended, by key."""

    def __init__(
        self,
        replicas: Iterable[Replica],
        waiting: WaitingSequences,
        isolated_runs: IsolatedRuns,
        budgets: Budgets,
        searches: dict[str, BeamGroup],
        ids: SequenceIds,
    ) -> None:
        """`replicas` is the owner's own list, which grows and shrinks."""
        self._budgets = budgets
        self.searches = searches  # of requests with beam search
        self._ids = ids
        self._replicas = replicas
        self._waiting = waiting
        self._isolated_runs = isolated_runs
        self._requests: dict[str, list[Sequence]] = {}
        self._deadlines: LazyHeap[str, float] = LazyHeap()
        self._num_requests = 0

    def __contains__(self, key: str) -> bool:
        return key in self._requests

    @property
    def keys(self) -> KeysView[str]:
        """Keys of the live requests."""
        return self._requests.keys()

    def sequences(self, key: str) -> list[Sequence]:
        """The sequences of a live request; none if there is no such request."""
        return self._requests.get(key, [])

    def find(self, key: str, index: int) -> Sequence | None:
        """A sequence that has not ended."""
        sequences = self._requests.get(key, [])
        if index >= len(sequences) or sequences[index].phase is Phase.ENDED:
            return None
        return sequences[index]

    def replica_of(self, sequence: Sequence) -> Replica | None:
        """The replica that a sequence is on."""
        return next((replica for replica in self._replicas if replica.holds(sequence)), None)

    def add(self, request: Request, restored: Seq[RestoredSequence] = ()) -> list[Sequence]:
        """Makes a request's sequences; returns those that have not ended. If all have, the request is not live."""
        sequences = [
            Sequence(self._ids.of_request(self._num_requests), request, index, self._num_requests, request.prompt)
            for index in range(request.n if request.beam is None else 1)
        ]
        self._num_requests += 1
        for sequence, known in zip(sequences, restored, strict=True) if restored else ():
            sequence.restore(known)
        for sequence in sequences:
            sequence.siblings = sequences
            # One with tokens ran before; how long it waited then is not known.
            sequence.start_waiting(self._waiting.now if sequence.num_output else request.arrived_at)
        live = [sequence for sequence in sequences if sequence.phase is not Phase.ENDED]
        if not live:
            return []
        charge = self._charge(request, restored)
        for sequence in live:
            sequence.charge_to(charge)
        self._requests[request.key] = sequences
        self._waiting.accounts.add_request(request)
        if request.beam is not None:
            self.searches[request.key] = BeamGroup(request, request.beam, live[0])
        if request.deadline is not None:
            self._deadlines.put(request.key, request.deadline)
        return live

    def _charge(self, request: Request, restored: Seq[RestoredSequence]) -> Charge | None:
        """What a request will cost: without its prompt where that was paid, as where it has tokens."""
        is_paid = any(known.is_prompt_paid or known.token_ids for known in restored)
        num_prompt = 0 if is_paid else len(request.prompt)
        return self._budgets.charge(request.limits, num_prompt, request.search_tokens, request.arrived_at)

    def unpaid(self, budget: Budget) -> list[tuple[Request, Charge]]:
        """The requests of an account that have deadlines, and neither a paid prompt nor output."""
        first_ones = [self._requests[key][0] for key in self._deadlines]
        return [
            (one.request, one.charge)
            for one in first_ones
            if one.charge is not None and one.charge.budget is budget and not (one.charge.is_paid or one.num_output)
        ]

    def fit_context(self, context_length: int) -> None:
        """The context has changed."""
        for sequence in chain.from_iterable(self._requests.values()):
            sequence.fit_context(context_length)

    def forget_hashes(self) -> None:
        """The block size has changed."""
        for sequence in chain.from_iterable(self._requests.values()):
            sequence.block_hashes.clear()

    # The end of requests.

    def cancel(self, key: str, reason: Failure, message: str) -> FailedEvent | None:
        """Ends all of a request's sequences; None if the key is not live."""
        sequences = self._requests.get(key)
        if sequences is None:
            return None
        for sequence in reversed(sequences):  # the first one last: the others may wait for it
            self.end(sequence)
        return FailedEvent(sequences[0].request, reason, message)

    def cancel_all(self, keys: Iterable[str], reason: Failure, message: str) -> list[FailedEvent]:
        """Ends several requests."""
        return [event for key in keys if (event := self.cancel(key, reason, message)) is not None]

    def take_late(self, now: float) -> list[str]:
        """Keys of the requests whose deadline has passed; each is returned once."""
        late = []
        while (first := self._deadlines.first()) is not None and first[0] < now:
            late.append(first[1])
            self._deadlines.discard(first[1])
        return late

    def end(self, sequence: Sequence, replica: Replica | None = None) -> None:
        """Ends a sequence, wherever it is; on `replica`, if the caller knows."""
        if sequence.phase is Phase.ENDED:
            return
        self._leave(sequence, replica)
        self._waiting.leave_admission(sequence)
        self._waiting.release_all(sequence)
        has_ended = all(sibling.phase is Phase.ENDED for sibling in sequence.siblings)
        if has_ended or sequence.request.beam is None:  # as long as a beam is left, the search is suspected
            self._isolated_runs.clear(sequence, None)
        if has_ended:
            key = sequence.request.key
            self._deadlines.discard(key)
            self.searches.pop(key, None)
            if sequence.charge is not None:
                sequence.charge.close()
            del self._requests[key]
            self._waiting.accounts.remove_request(sequence.request)

    def _leave(self, sequence: Sequence, replica: Replica | None) -> None:
        if sequence.phase is Phase.QUEUED:
            self._waiting.remove(sequence)
            sequence.set_phase(Phase.ENDED)
        elif sequence.phase is Phase.WAITING_FOR_PREFIX:
            self._waiting.prefix_waiters.remove(sequence)
            sequence.set_phase(Phase.ENDED)
        else:
            replica = replica or self.replica_of(sequence)
            assert replica is not None
            replica.end(sequence)
