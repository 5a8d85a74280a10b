"""A scheduler as a plain value, for tests of a gateway's subscriptions: it takes commands and sends events, both in
order."""

from collections import deque
from dataclasses import dataclass, field

from quire.scheduler.v1 import scheduler_pb2 as scheduler_v1

MAX_TOKENS = 6


@dataclass
class ModelRequest:
    """A request as the scheduler has it. `num_durable` of its tokens are in the store."""

    submission_id: str
    tokens: list[int] = field(default_factory=list)
    num_durable: int = 0
    end: scheduler_v1.SequenceEnd | None = None
    is_attached: bool = False
    awaits_gateway: bool = False
    """The request was restored after a takeover and waits for a gateway to attach."""


class ModelScheduler:
    """The requests of one gateway. Every token is a new number, so a changed token is detected."""

    def __init__(self) -> None:
        self.requests: dict[str, ModelRequest] = {}
        self.commands: deque[scheduler_v1.SessionRequest] = deque()
        self.events: deque[scheduler_v1.Event] = deque()
        self.next_refusal: scheduler_v1.FailureReason | None = None
        self._num_tokens = 0

    # Faults.

    def restart(self, *, forgets: bool, loses_store: bool) -> None:
        """Another scheduler takes over with the requests of the store: all, none, or with fewer tokens than were
        durable."""
        self.commands.clear()
        self.events.clear()
        if forgets:
            self.requests.clear()
        for request in self.requests.values():
            request.num_durable = 0 if loses_store else request.num_durable
            request.is_attached = False
            request.awaits_gateway = True
            if request.end is None:
                del request.tokens[request.num_durable :]

    def fail(self, key: str, reason: scheduler_v1.FailureReason) -> None:
        """Ends a request before its last token."""
        request = self.requests.pop(key)
        if request.is_attached:
            self._send(key, failed=scheduler_v1.Failed(reason=reason))

    # Steps.

    def grow(self, key: str) -> None:
        """Adds a token to a request."""
        request = self.requests[key]
        self._num_tokens += 1
        request.tokens.append(self._num_tokens)
        if len(request.tokens) == MAX_TOKENS:
            request.end = scheduler_v1.SequenceEnd(length=scheduler_v1.Length())
        if request.is_attached:
            offset = len(request.tokens) - 1
            tokens = scheduler_v1.Tokens(offset=offset, token_ids=request.tokens[offset:], end=request.end)
            self._send(key, tokens=tokens)
        request.is_attached &= request.end is None

    def flush(self, key: str) -> None:
        """Makes all tokens of a request durable."""
        request = self.requests[key]
        request.num_durable = len(request.tokens)
        if request.is_attached:
            self._send(key, durable=scheduler_v1.Durable(num_tokens=request.num_durable))

    def handle_command(self) -> None:
        """Handles the oldest command."""
        command = self.commands.popleft()
        match command.WhichOneof("command"):
            case "submit":
                self._submit(command.submit)
            case "attach":
                self._join(command.attach, self.requests.get(command.attach.key))
            case "cancel":
                request = self.requests.get(command.cancel.key)
                by = command.cancel.submission_id
                if request is not None and request.end is None and by in ("", request.submission_id):
                    self.fail(command.cancel.key, scheduler_v1.FAILURE_REASON_CANCELLED)
            case "detach":
                if command.detach.key in self.requests:
                    self.requests[command.detach.key].is_attached = False
            case "finish":
                self._finish(command.finish)

    def _submit(self, submit: scheduler_v1.Submit) -> None:
        request = self.requests.get(submit.key)
        if request is None and self.next_refusal is None:
            request = self.requests[submit.key] = ModelRequest(submit.submission_id)
        self._join(submit, request)

    def _join(self, command: scheduler_v1.Submit | scheduler_v1.Attach, request: ModelRequest | None) -> None:
        refusal, self.next_refusal = self.next_refusal, None
        wanted = command.submission_id if isinstance(command, scheduler_v1.Attach) else ""
        if refusal is None and (request is None or wanted not in ("", request.submission_id)):
            refusal = scheduler_v1.FAILURE_REASON_UNKNOWN_REQUEST
        elif refusal is None and any(one.offset > len(request.tokens) for one in command.unflushed if request):
            refusal = scheduler_v1.FAILURE_REASON_DIVERGED
        if refusal is not None or request is None:
            failed = scheduler_v1.Failed(reason=refusal)
            self._send(command.key, failed=failed, command_id=command.command_id)
            return
        for one in command.unflushed:
            self._merge(request, one)
        request.awaits_gateway = False
        request.is_attached = request.end is None
        is_own = isinstance(command, scheduler_v1.Submit) and command.submission_id == request.submission_id
        if is_own and not request.tokens:
            self._send(command.key, accepted=scheduler_v1.Accepted(), command_id=command.command_id)
            return
        attached = scheduler_v1.Attached(
            submission_id=request.submission_id,
            sequences=[scheduler_v1.Tokens(token_ids=request.tokens, end=request.end)],
        )
        self._send(command.key, attached=attached, command_id=command.command_id)

    def _merge(self, request: ModelRequest, unflushed: scheduler_v1.UnflushedTokens) -> None:
        theirs = list(unflushed.token_ids)
        if request.tokens[unflushed.offset :][: len(theirs)] != theirs:
            request.tokens[unflushed.offset :] = theirs
            request.end = None
        if unflushed.is_truncated:
            del request.tokens[unflushed.offset + len(theirs) :]
            request.end = scheduler_v1.SequenceEnd(stop_string=scheduler_v1.StopString())
        elif len(request.tokens) == MAX_TOKENS and request.end is None:
            request.end = scheduler_v1.SequenceEnd(length=scheduler_v1.Length())
        request.num_durable = min(request.num_durable, len(request.tokens))

    def _finish(self, finish: scheduler_v1.Finish) -> None:
        request = self.requests.get(finish.key)
        if request is not None and request.submission_id == finish.submission_id:
            del request.tokens[finish.num_tokens :]
            request.num_durable = min(request.num_durable, len(request.tokens))
            request.end = scheduler_v1.SequenceEnd(stop_string=scheduler_v1.StopString())
            request.is_attached = False

    def _send(self, key: str, **fields: object) -> None:
        self.events.append(scheduler_v1.Event(key=key, **fields))  # type: ignore[arg-type]
