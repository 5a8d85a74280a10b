"""What becomes of a request whose call breaks: whether it goes on, when, and from where.

Plain values, shared by both clients: no call is made here, and no clock is read.
"""

import random
from collections.abc import Callable, Mapping

import grpc

from quire.inference.v1 import inference_pb2 as pb
from quire_client.errors import QuireError
from quire_client.results import Acceptance, Chunk, Usage
from quire_client.transcript import Transcript

PATIENCE = 60.0
"""Seconds without progress after which a request is given up, unless told otherwise."""

SILENCE = 10.0
"""Seconds without a message after which a gateway is asked whether it is there."""

PROBE_SECONDS = 2.0
"""What it has to answer that."""

FAREWELL_SECONDS = 2.0
"""What the end of a request may take that is left before its time."""

OnResume = Callable[[QuireError], None]
"""Called with what broke a call, once a break, before the request goes on."""

_FIRST_DELAY = 0.05
_LONGEST_DELAY = 1.0
_FEW_TRIES = 4  # as many as grpc's own retry policy allows
_SOON = 2.0
# A call that lived much longer than a silent gateway is given was with one that answered.
_LONG_CALL = 2 * (SILENCE + PROBE_SECONDS)

# What a connection that broke ends a call with, where no server of ours has said so: a stream that was reset is
# INTERNAL or CANCELLED.
_BROKEN = (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.INTERNAL, grpc.StatusCode.CANCELLED)


class Roster:
    """The places of a client's gateways, from 0, and which of them calls go to: one that answers, until it does not."""

    def __init__(self, num_gateways: int) -> None:
        self.num_gateways = num_gateways
        self.current = 0
        self.has_answered = False
        """Any of them ever said anything."""

    def leave(self, place: int) -> None:
        """Goes on to the next one, where that has not been done since the call at `place` was made."""
        if place == self.current:
            self.current = (place + 1) % self.num_gateways


class Recovery:
    """Decides for one request, each time that a call of it fails, whether it is made again, and when.

    `patience` is for how many seconds calls may fail without progress, None where the request is not resumed: then only
    a call that no gateway took is made again, a few times. `timeout` is in seconds, from the first call on. `draw`
    gives numbers from 0 to 1.
    """

    def __init__(
        self,
        roster: Roster,
        timeout: float | None = None,
        patience: float | None = None,
        on_resume: OnResume | None = None,
        draw: Callable[[], float] = random.random,
    ) -> None:
        self.patience = patience
        self.num_resumes = 0
        self._roster = roster
        self._timeout = timeout
        self._on_resume = on_resume
        self._draw = draw
        self._deadline: float | None = None
        self._call_began_at: float | None = None
        self._fails_since = 0.0
        self._num_failures = 0  # since there was progress
        self._has_begun = False

    def begin_call(self, now: float) -> float | None:
        """Seconds that a call made now may take; None for no limit. Raises QuireError where none are left."""
        if self._call_began_at is None and self._timeout is not None:
            self._deadline = now + self._timeout
        self._call_began_at = now
        if self._deadline is None:
            return None
        if self._deadline <= now:
            code = grpc.StatusCode.DEADLINE_EXCEEDED
            raise QuireError(code, code.name, "no answer within the timeout")
        return self._deadline - now

    def progressed(self) -> None:
        """Something came that was not there before."""
        self._roster.has_answered = True
        self._has_begun = True
        self._num_failures = 0

    def failed(self, error: QuireError, place: int, now: float) -> float:
        """Seconds to wait before the next call, after that at gateway `place` failed. Raises `error` if there is none.

        The other gateways are tried at once, all of them again after a pause.
        """
        if error.is_answer:
            self._roster.has_answered = True
        if not self._is_transient(error):
            raise error
        self._count(now)
        self._roster.leave(place)
        if self._is_patient(error):
            if now - self._fails_since >= (self.patience or 0):
                raise error
            if self._num_failures == 1:
                self.num_resumes += 1
                if self._on_resume is not None:
                    self._on_resume(error)
        elif self._num_failures >= max(_FEW_TRIES, self._roster.num_gateways):
            raise error
        delay = self._delay()
        return delay if self._deadline is None else max(0.0, min(delay, self._deadline - now))

    def _count(self, now: float) -> None:
        # An answer that comes as a whole shows no progress but that its call lives.
        if self.patience is not None and now - (self._call_began_at or now) > _LONG_CALL:
            self._num_failures = 0
        if self._num_failures == 0:
            self._fails_since = now
        self._num_failures += 1

    def _is_transient(self, error: QuireError) -> bool:
        if error.reason == "DEADLINE_TOO_SHORT":  # by the next call it is even shorter
            return False
        if self._is_refusal(error):
            return error.retry_after is None or error.retry_after <= _SOON
        if self.patience is None:
            return error.code is grpc.StatusCode.UNAVAILABLE and not self._has_begun
        return error.code is grpc.StatusCode.UNAVAILABLE if error.is_answer else error.code in _BROKEN

    def _is_patient(self, error: QuireError) -> bool:
        """Whether patience bounds the tries. Where nobody ever answered nobody may be there, and that is told soon."""
        return self.patience is not None and self._roster.has_answered and not self._is_refusal(error)

    def _is_refusal(self, error: QuireError) -> bool:
        """Whether a server that is well has no room for the request: who comes back at once only adds to the crowd."""
        return error.reason == "CAPACITY_EXHAUSTED" and not self._has_begun

    def _delay(self) -> float:
        num_rounds, rest = divmod(self._num_failures, self._roster.num_gateways)
        if rest:
            return 0.0
        longest = min(_LONGEST_DELAY, _FIRST_DELAY * 2.0 ** min(num_rounds - 1, 10))
        return longest * (0.5 + 0.5 * self._draw())


class Course:
    """One stream over as many calls as it takes: what each of them asks for, and what has come."""

    def __init__(
        self,
        request: pb.StreamGenerateRequest | pb.ResumeRequest,
        recovery: Recovery,
        positions: Mapping[int, int] | None = None,
    ) -> None:
        self._request = request
        self._recovery = recovery
        self.transcript = Transcript(positions)

    @property
    def acceptance(self) -> Acceptance | None:
        """Id, model and seed; None before the first chunk."""
        return self.transcript.acceptance

    @property
    def usage(self) -> Usage | None:
        """Tokens processed; None before the end."""
        return self.transcript.usage

    @property
    def is_resumable(self) -> bool:
        """Whether it goes on where a call breaks."""
        return self._recovery.patience is not None

    @property
    def num_resumes(self) -> int:
        """How often a call broke, or was not taken, and the stream went on."""
        return self._recovery.num_resumes

    def begin_call(self, now: float) -> tuple[pb.StreamGenerateRequest | pb.ResumeRequest, float | None]:
        """The request of a call made now, and how many seconds it may take. Raises QuireError where none are left.

        Until there is an acceptance it is the first request again: the server knows it by its name.
        """
        time_left = self._recovery.begin_call(now)
        if self.acceptance is None:
            return self._request, time_left
        positions = [pb.Position(index=i, next_offset=offset) for i, offset in self.transcript.positions.items()]
        return pb.ResumeRequest(request_id=self.acceptance.request_id, positions=positions), time_left

    def read(self, message: pb.StreamGenerateResponse | pb.ResumeResponse) -> Chunk | None:
        """Takes the next message; returns its chunk, where that is new. Raises QuireError where it does not fit."""
        was_accepted = self.acceptance is not None
        chunk = self.transcript.read(message)
        if chunk is not None or not was_accepted or self.usage is not None:
            self._recovery.progressed()
        return chunk

    def failed(self, error: QuireError, place: int, now: float) -> float:
        """Seconds to wait before the next call, after one broke. Raises `error` where the stream does not go on."""
        return 0.0 if self.usage is not None else self._recovery.failed(error, place, now)
