"""What becomes of a request whose call breaks: whether it goes on, when, and from where.

Plain values, shared by both clients: no call is made here, and no clock is read.
"""

import random
from collections.abc import Callable, Mapping

import grpc

from quire.inference.v1 import inference_pb2 as pb
from quire_client.errors import QuireError
from quire_client.results import Acceptance, Chunk, Usage
from quire_client.stream_assembler import StreamAssembler

RESUME_TIMEOUT = 60.0
"""Seconds without progress after which a request is given up, unless told otherwise."""

KEEPALIVE_SECONDS = 10.0
"""Seconds without a message after which a gateway is asked whether it is there."""

PROBE_SECONDS = 2.0
"""What it has to answer that."""

CANCEL_SECONDS = 2.0
"""What the end of a request may take that is left before its time."""

OnResume = Callable[[QuireError], None]
"""Called with what broke a call, once a break, before the request goes on."""

_FIRST_DELAY = 0.05
_LONGEST_DELAY = 1.0
_MAX_ATTEMPTS_WITHOUT_RESUME = 4  # as many as grpc's own retry policy allows
_MAX_RETRY_AFTER = 2.0
# A call that lived much longer than a silent gateway is given was with one that answered.
_LONG_CALL = 2 * (KEEPALIVE_SECONDS + PROBE_SECONDS)

# What a connection that broke ends a call with, where no server of ours has said so: a stream that was reset is
# INTERNAL or CANCELLED.
_BROKEN_CODES = (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.INTERNAL, grpc.StatusCode.CANCELLED)


class EndpointList:
    """The places of a client's gateways, from 0, and which of them calls go to: one that answers, until it does not."""

    def __init__(self, num_endpoints: int) -> None:
        self.num_endpoints = num_endpoints
        self.current = 0
        self.has_answered = False
        """Any of them ever said anything."""

    def advance_from(self, index: int) -> None:
        """Goes on to the next one, where that has not been done since the call at `index` was made."""
        if index == self.current:
            self.current = (index + 1) % self.num_endpoints


class RetryPolicy:
    """Decides for one request, each time that a call of it fails, whether it is made again, and when.

    `resume_timeout` is for how many seconds calls may fail without progress, None where the request is not resumed:
    then only a call that no gateway took is made again, a few times. `timeout` is in seconds, from the first call on.
    `random_fraction` gives numbers from 0 to 1.
    """

    def __init__(
        self,
        endpoint_list: EndpointList,
        timeout: float | None = None,
        resume_timeout: float | None = None,
        on_resume: OnResume | None = None,
        random_fraction: Callable[[], float] = random.random,
    ) -> None:
        self.resume_timeout = resume_timeout
        self.num_resumes = 0
        self._endpoint_list = endpoint_list
        self._timeout = timeout
        self._on_resume = on_resume
        self._random = random_fraction
        self._deadline: float | None = None
        self._call_began_at: float | None = None
        self._failing_since = 0.0
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
        self._endpoint_list.has_answered = True
        self._has_begun = True
        self._num_failures = 0

    def failed(self, error: QuireError, index: int, now: float) -> float:
        """Seconds to wait before the next call, after that at gateway `index` failed. Raises `error` if there is none.

        The other gateways are tried at once, all of them again after a pause.
        """
        if error.is_answer:
            self._endpoint_list.has_answered = True
        if not self._is_transient(error):
            raise error
        self._count(now)
        self._endpoint_list.advance_from(index)
        if self._retries_until_timeout(error):
            if now - self._failing_since >= (self.resume_timeout or 0):
                raise error
            if self._num_failures == 1:
                self.num_resumes += 1
                if self._on_resume is not None:
                    self._on_resume(error)
        elif self._num_failures >= max(_MAX_ATTEMPTS_WITHOUT_RESUME, self._endpoint_list.num_endpoints):
            raise error
        delay = self._delay()
        return delay if self._deadline is None else max(0.0, min(delay, self._deadline - now))

    def _count(self, now: float) -> None:
        # An answer that comes as a whole shows no progress but that its call lives.
        if self.resume_timeout is not None and now - (self._call_began_at or now) > _LONG_CALL:
            self._num_failures = 0
        if self._num_failures == 0:
            self._failing_since = now
        self._num_failures += 1

    def _is_transient(self, error: QuireError) -> bool:
        if error.reason == "DEADLINE_TOO_SHORT":  # by the next call it is even shorter
            return False
        if self._is_refusal(error):
            return error.retry_after is None or error.retry_after <= _MAX_RETRY_AFTER
        if self.resume_timeout is None:
            return error.code is grpc.StatusCode.UNAVAILABLE and not self._has_begun
        return error.code is grpc.StatusCode.UNAVAILABLE if error.is_answer else error.code in _BROKEN_CODES

    def _retries_until_timeout(self, error: QuireError) -> bool:
        """Whether patience bounds the tries. Where nobody ever answered nobody may be there, and that is told soon."""
        return self.resume_timeout is not None and self._endpoint_list.has_answered and not self._is_refusal(error)

    def _is_refusal(self, error: QuireError) -> bool:
        """Whether a server that is well has no room for the request: who comes back at once only adds to the crowd."""
        return error.reason == "CAPACITY_EXHAUSTED" and not self._has_begun

    def _delay(self) -> float:
        num_rounds, rest = divmod(self._num_failures, self._endpoint_list.num_endpoints)
        if rest:
            return 0.0
        longest = min(_LONGEST_DELAY, _FIRST_DELAY * 2.0 ** min(num_rounds - 1, 10))
        return longest * (0.5 + 0.5 * self._random())


class ResumableStream:
    """One stream over as many calls as it takes: what each of them asks for, and what has come."""

    def __init__(
        self,
        request: pb.StreamGenerateRequest | pb.ResumeRequest,
        retry_policy: RetryPolicy,
        positions: Mapping[int, int] | None = None,
    ) -> None:
        self._request = request
        self._retry_policy = retry_policy
        self.assembler = StreamAssembler(positions)

    @property
    def acceptance(self) -> Acceptance | None:
        """Id, model and seed; None before the first chunk."""
        return self.assembler.acceptance

    @property
    def usage(self) -> Usage | None:
        """Tokens processed; None before the end."""
        return self.assembler.usage

    @property
    def is_resumable(self) -> bool:
        """Whether it goes on where a call breaks."""
        return self._retry_policy.resume_timeout is not None

    @property
    def num_resumes(self) -> int:
        """How often a call broke, or was not taken, and the stream went on."""
        return self._retry_policy.num_resumes

    def begin_call(self, now: float) -> tuple[pb.StreamGenerateRequest | pb.ResumeRequest, float | None]:
        """The request of a call made now, and how many seconds it may take. Raises QuireError where none are left.

        Until there is an acceptance it is the first request again: the server knows it by its name.
        """
        time_left = self._retry_policy.begin_call(now)
        if self.acceptance is None:
            return self._request, time_left
        positions = [pb.Position(index=i, next_offset=offset) for i, offset in self.assembler.positions.items()]
        return pb.ResumeRequest(request_id=self.acceptance.request_id, positions=positions), time_left

    def read(self, message: pb.StreamGenerateResponse | pb.ResumeResponse) -> Chunk | None:
        """Takes the next message; returns its chunk, where that is new. Raises QuireError where it does not fit."""
        was_accepted = self.acceptance is not None
        chunk = self.assembler.read(message)
        if chunk is not None or not was_accepted or self.usage is not None:
            self._retry_policy.progressed()
        return chunk

    def failed(self, error: QuireError, index: int, now: float) -> float:
        """Seconds to wait before the next call, after one broke. Raises `error` where the stream does not go on."""
        return 0.0 if self.usage is not None else self._retry_policy.failed(error, index, now)
