"""Request logs for tests of the scheduler."""

import itertools
from hashlib import sha256

from quire.scheduler.v1 import scheduler_pb2 as scheduler_v1
from quire.worker.v1 import worker_pb2 as worker_v1
from scheduler_svc.request_log import RequestLog, SequenceLog, State

_numbers = itertools.count(1)


def request_log(
    name: str | None = None, *, n: int = 1, accepted_at: float = 1000.0, deadline: float | None = None
) -> RequestLog:
    """A request that was just accepted; without `name`, under a key of its own."""
    number = next(_numbers)
    submit = scheduler_v1.Submit(
        key=sha256((name or f"request {number}").encode()).hexdigest(),
        submission_id=f"{number:032x}",
        tenant="default",
        prompt_token_ids=range(1000, 1032),
        n=n,
        max_tokens=1000,
        stop_token_ids=[2],
        cache_salt=b"s" * 32,
        body_digest=b"d" * 32,
        limits=scheduler_v1.AccountLimits(account="default/", max_running=2, max_kv_blocks=1000),
        command_id=number,
    )
    submit.render_options.request_id = name or f"request {number}"
    return RequestLog(submit, accepted_at, deadline, sequences=[SequenceLog() for _ in range(n)])


def length_end() -> scheduler_v1.SequenceEnd:
    """A sequence's end at max_tokens."""
    return scheduler_v1.SequenceEnd(length=scheduler_v1.Length())


def logprobs(*values: float) -> list[worker_v1.TokenLogprobs]:
    """Log-probabilities of one token each, with the top token."""
    return [
        worker_v1.TokenLogprobs(logprob=value, top=[worker_v1.Logprob(token_id=5, logprob=value)]) for value in values
    ]


def end(log: RequestLog, state: State = State.FINISHED, at: float = 2000.0) -> None:
    """Ends the request; in state FINISHED all its sequences have ended."""
    log.state, log.ended_at = state, at
    if state is State.FINISHED:
        for sequence in log.sequences:
            sequence.end = length_end()
