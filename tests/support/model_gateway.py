"""A gateway as a plain value, and a store that may be unavailable, for tests of live requests."""

from quire.scheduler.v1 import scheduler_pb2 as scheduler_v1
from scheduler_svc.gateway_session import GatewaySession
from scheduler_svc.request_log import RequestLog
from scheduler_svc.store.base import Gap, KeyTaken, StoreUnavailable, WriteBatch
from scheduler_svc.store.redis import RedisStore


class UnsteadyStore(RedisStore):
    """A real Redis that may be unreachable for some time."""

    is_away = False

    async def put(self, log: RequestLog, epoch: int) -> RequestLog | None:
        self._check()
        return await super().put(log, epoch)

    async def write(self, batch: WriteBatch, epoch: int) -> list[Gap | KeyTaken]:
        self._check()
        return await super().write(batch, epoch)

    async def read(self, key: str) -> RequestLog | None:
        self._check()
        return await super().read(key)

    def _check(self) -> None:
        if self.is_away:
            raise StoreUnavailable("away")


class ModelGateway(GatewaySession):
    """A gateway whose clients have received the tokens of `known`. These never change, and have no gap."""

    def __init__(self, known: dict[str, tuple[str, list[int]]], errors: list[AssertionError]) -> None:
        super().__init__()
        self.known = known  # by key: the submission, and its tokens
        self.attached: set[str] = set()
        self.unknown: set[str] = set()  # keys that the scheduler does not know
        self.asked: dict[int, str] = {}  # by command id, the submission
        self._errors = errors

    def send(self, message: scheduler_v1.SessionResponse, *, delay: float = 0.0) -> None:
        for event in message.events:
            try:
                self._receive(event)
            except AssertionError as error:  # the scheduler would only log it
                self._errors.append(error)

    def _receive(self, event: scheduler_v1.Event) -> None:
        match event.WhichOneof("kind"):
            case "tokens":
                assert event.key in self.attached, "events before the answer"
                self._extend(event.key, event.tokens)
            case "accepted":
                submission_id = self.asked.pop(event.command_id)
                known = self.known.get(event.key)
                assert known is None or known[0] != submission_id or not known[1], "tokens are missing"
                self.known[event.key] = (submission_id, [])
                self.attached.add(event.key)
            case "attached":
                self._attach(event)
            case "durable":
                assert event.durable.num_tokens <= len(self.known[event.key][1])
            case "failed" if event.HasField("command_id"):
                del self.asked[event.command_id]
                if event.failed.reason == scheduler_v1.FAILURE_REASON_UNKNOWN_REQUEST:
                    self.unknown.add(event.key)
                elif event.failed.reason != scheduler_v1.FAILURE_REASON_UNAVAILABLE:
                    self.known.pop(event.key, None)  # its readers fail
            case "failed":
                self.attached.discard(event.key)
                self.known.pop(event.key, None)

    def _attach(self, event: scheduler_v1.Event) -> None:
        del self.asked[event.command_id]
        submission_id, tokens = event.attached.submission_id, list(event.attached.sequences[0].token_ids)
        known = self.known.get(event.key)
        if known is not None and known[0] == submission_id:
            assert tokens[: len(known[1])] == known[1], "tokens that were given have changed"
        self.known[event.key] = (submission_id, [])
        self.attached.add(event.key)
        self._extend(event.key, event.attached.sequences[0])

    def _extend(self, key: str, tokens: scheduler_v1.Tokens) -> None:
        known = self.known[key][1]
        assert tokens.offset <= len(known), "tokens are missing"
        num_again = len(known) - tokens.offset
        assert known[tokens.offset :] == tokens.token_ids[:num_again], "tokens that were given have changed"
        known += tokens.token_ids[num_again:]
        if tokens.HasField("end"):
            self.attached.discard(key)
