"""Decides whether a request whose call broke is resumed, when, and from which offsets.

Plain values, shared by both clients: no calls and no clock.
"""

import math
import random
from collections.abc import Callable, Mapping

import grpc

from quire.inference.v1 import inference_pb2 as pb
from quire_client.errors import QuireError
from quire_client.results import Acceptance, Chunk, ReturnedPrompt, Usage
from quire_client.stream_assembler import StreamAssembler

RESUME_TIMEOUT = 60.0
"""Default of `resume_patience`: seconds without progress after which a request fails."""

KEEPALIVE_SECONDS = 10.0
"""Seconds without a message after which a gateway is probed."""

PROBE_SECONDS = 2.0
"""Timeout of the probe in seconds."""

CANCEL_SECONDS = 2.0
"""Timeout of the cancellation of an abandoned request in seconds."""

OnResume = Callable[[QuireError], None]
"""Called with the error of a broken call, once a break, before the request is resumed."""

_FIRST_DELAY = 0.05
_LONGEST_DELAY = 1.0
_MAX_ATTEMPTS_WITHOUT_RESUME = 4  # as many as grpc's own retry policy allows
_MAX_RETRY_AFTER = 2.0
# After a call of this length the gateway must have responded: a silent one is detected earlier.
_LONG_CALL = 2 * (KEEPALIVE_SECONDS + PROBE_SECONDS)

# Codes of broken connections, where no Quire server sent the error: a stream that was reset is INTERNAL or CANCELLED.
_BROKEN_CODES = (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.INTERNAL, grpc.StatusCode.CANCELLED)


class EndpointList:
    """The index of the gateway that calls go to, until it does not respond."""

    def __init__(self, num_endpoints: int) -> None:
        self.num_endpoints = num_endpoints
        self.current = 0
        self.has_answered = False
        """Whether any gateway ever responded."""

    def advance_from(self, index: int) -> None:
        """Moves to the next gateway, unless another call did so since the call at `index` was made."""
        if index == self.current:
            self.current = (index + 1) % self.num_endpoints


class RetryPolicy:
    """Decides whether and when a failed call of one request is repeated.

    `resume_timeout` is the time in seconds that calls may fail without progress, None where the request is not resumed:
    then only a call that no gateway accepted is repeated, a few times. `timeout` is in seconds from the first call on.
    `random_fraction` returns numbers from 0 to 1.
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
        self._deadline = math.inf
        self._call_began_at: float | None = None
        # Of the calls that failed since there was progress:
        self._num_failures = 0
        self._resume_ends_at = math.inf
        self._retry_from = 0.0  # after the `retry_after` of each that was refused for lack of capacity
        self._has_begun = False

    def begin_call(self, now: float) -> float | None:
        """The timeout of a call that starts now; None for none. Raises QuireError where no time is left."""
        if self._call_began_at is None and self._timeout is not None:
            self._deadline = now + self._timeout
        self._call_began_at = now
        if self._deadline == math.inf:
            return None
        if self._deadline <= now:
            code = grpc.StatusCode.DEADLINE_EXCEEDED
            raise QuireError(code, code.name, "no answer within the timeout")
        return self._deadline - now

    def progressed(self) -> None:
        """A call has brought something new."""
        self._endpoint_list.has_answered = True
        self._has_begun = True
        self._num_failures = 0

    def failed(self, error: QuireError, index: int, now: float) -> float:
        """Seconds to wait before the next call, after that at gateway `index` failed. Raises `error` if there is none.

        The other gateways are tried at once, and all of them again after a delay: at least the longest `retry_after` of
        CAPACITY_EXHAUSTED, at most what is left of `resume_timeout`. One that ends after the deadline allows no further
        call.
        """
        if error.is_answer:
            self._endpoint_list.has_answered = True
        if not self._is_transient(error):
            raise error
        self._count(error, now)
        self._endpoint_list.advance_from(index)
        delay = self._delay(now)
        if delay > 0 and self._retry_from >= self._deadline:
            raise error
        retries_until_timeout = self._retries_until_timeout(error)
        have_all_refused = self._is_refusal(error) and self._is_round_over
        if now >= self._resume_ends_at and (retries_until_timeout or have_all_refused):
            raise error
        if retries_until_timeout:
            if self._num_failures == 1:
                self.num_resumes += 1
                if self._on_resume is not None:
                    self._on_resume(error)
        elif self._num_failures >= max(_MAX_ATTEMPTS_WITHOUT_RESUME, self._endpoint_list.num_endpoints):
            raise error
        return delay

    def _count(self, error: QuireError, now: float) -> None:
        # A unary call shows no progress but its duration.
        if self.resume_timeout is not None and now - (self._call_began_at or now) > _LONG_CALL:
            self._num_failures = 0
        if self._num_failures == 0:
            self._resume_ends_at = math.inf if self.resume_timeout is None else now + self.resume_timeout
            self._retry_from = 0.0
        self._num_failures += 1
        # A gateway that is draining names a time, too, but behind the same address there may be others.
        if error.retry_after is not None and self._is_refusal(error):
            # Random, so that not all clients call again at once.
            self._retry_from = max(self._retry_from, now + error.retry_after * (1.0 + 0.1 * self._random()))

    def _is_transient(self, error: QuireError) -> bool:
        if error.reason == "DEADLINE_TOO_SHORT":  # and shorter with the next call
            return False
        is_soon = error.retry_after is None or error.retry_after <= _MAX_RETRY_AFTER
        if self._is_refusal(error):
            return is_soon
        if self.resume_timeout is None:
            return error.code is grpc.StatusCode.UNAVAILABLE and not self._has_begun and is_soon
        return error.code is grpc.StatusCode.UNAVAILABLE if error.is_answer else error.code in _BROKEN_CODES

    def _retries_until_timeout(self, error: QuireError) -> bool:
        """Whether retries end by `resume_timeout`. Where no gateway ever responded, they end sooner."""
        return self.resume_timeout is not None and self._endpoint_list.has_answered and not self._is_refusal(error)

    def _is_refusal(self, error: QuireError) -> bool:
        """Whether a healthy server has no capacity for the request: retries at once would add load."""
        return error.reason == "CAPACITY_EXHAUSTED" and not self._has_begun

    @property
    def _is_round_over(self) -> bool:
        """Whether a call has failed at each gateway since the last delay."""
        return self._num_failures % self._endpoint_list.num_endpoints == 0

    def _delay(self, now: float) -> float:
        if not self._is_round_over:
            return 0.0
        num_rounds = self._num_failures // self._endpoint_list.num_endpoints
        longest = min(_LONGEST_DELAY, _FIRST_DELAY * 2.0 ** min(num_rounds - 1, 10))
        delay = max(longest * (0.5 + 0.5 * self._random()), self._retry_from - now)
        return max(0.0, min(delay, self._resume_ends_at - now, self._deadline - now))


class ResumableStream:
    """One stream over several calls: the request of each, and the chunks that have come."""

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
    def prompt(self) -> ReturnedPrompt | None:
        """The prompt, if requested; None before the first chunk."""
        return self.assembler.prompt

    @property
    def usage(self) -> Usage | None:
        """Tokens processed; None before the end."""
        return self.assembler.usage

    @property
    def is_resumable(self) -> bool:
        """Whether it is resumed where a call breaks."""
        return self._retry_policy.resume_timeout is not None

    @property
    def num_resumes(self) -> int:
        """How often the request was resumed, or sent again."""
        return self._retry_policy.num_resumes

    def begin_call(self, now: float) -> tuple[pb.StreamGenerateRequest | pb.ResumeRequest, float | None]:
        """The request of a call that starts now, and its timeout. Raises QuireError where no time is left.

        Until there is an acceptance it is the first request again: the server recognizes its id.
        """
        time_left = self._retry_policy.begin_call(now)
        if self.acceptance is None:
            return self._request, time_left
        positions = [pb.Position(index=i, next_offset=offset) for i, offset in self.assembler.positions.items()]
        return pb.ResumeRequest(request_id=self.acceptance.request_id, positions=positions), time_left

    def read(self, message: pb.StreamGenerateResponse | pb.ResumeResponse) -> Chunk | None:
        """Takes the next message; returns its chunk, where that is new. Raises QuireError where tokens are missing."""
        was_accepted = self.acceptance is not None
        chunk = self.assembler.read(message)
        if chunk is not None or not was_accepted or self.usage is not None:
            self._retry_policy.progressed()
        return chunk

    def failed(self, error: QuireError, index: int, now: float) -> float:
        """Seconds to wait before the next call, after one broke. Raises `error` where the stream is not resumed."""
        return 0.0 if self.usage is not None else self._retry_policy.failed(error, index, now)
