"""A gateway's session with schedulers, for a test: one that is kept up, and readers that note what they are told."""

import asyncio
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import Any

from gateway_svc.field_paths import Field
from gateway_svc.session import SchedulerSession
from gateway_svc.subscriptions import Attachment
from gateway_svc.validated_request import ModelInfo
from quire.scheduler.v1 import scheduler_pb2 as scheduler_v1
from scripted_scheduler import ScriptedScheduler
from svc_common.errors import QuireError

FINGERPRINT = b"\x01" * 32
MODEL = scheduler_v1.Model(name="tiny", tokenizer_fingerprint=FINGERPRINT, context_length=64, vocab_size=100)
MODEL_INFO = ModelInfo("tiny", 64, 100)


class RecordingObserver:
    """Notes what it is told, as (what, value), and holds the tokens of its sequences."""

    def __init__(self) -> None:
        self.events: asyncio.Queue[tuple[str, Any]] = asyncio.Queue()
        self.attachment: Attachment | None = None
        self.sequences: dict[int, list[int]] = {}
        self.stop_matches: set[int] = set()

    def field_path(self, which: Field, item_index: int | None = None) -> str:
        return f"my {which}"

    def on_accepted(self, is_durable: bool) -> None:
        self.events.put_nowait(("accepted", is_durable))

    def on_attached(self, attached: scheduler_v1.Attached) -> None:
        for tokens in attached.sequences:
            self._extend(tokens)
        self.events.put_nowait(("attached", {one.index: list(one.token_ids) for one in attached.sequences}))

    def on_tokens(self, tokens: scheduler_v1.Tokens) -> None:
        if tokens.index == 99:
            raise RuntimeError("secret")
        self._extend(tokens)
        self.events.put_nowait(("tokens", list(tokens.token_ids)))

    def on_failed(self, error: QuireError) -> None:
        self.events.put_nowait(("failed", error))

    def unflushed(self, offsets: Mapping[int, int]) -> list[scheduler_v1.UnflushedTokens]:
        return [
            scheduler_v1.UnflushedTokens(
                index=index,
                offset=(offset := min(offsets.get(index, 0), len(token_ids))),
                token_ids=token_ids[offset:],
                is_truncated=index in self.stop_matches,
            )
            for index, token_ids in self.sequences.items()
        ]

    def match_stop(self, index: int, num_tokens: int) -> None:
        """Finds a stop string."""
        assert self.attachment is not None
        del self.sequences[index][num_tokens:]
        self.stop_matches.add(index)
        self.attachment.finish(index, num_tokens)

    def disconnect(self, on_disconnect: Any) -> None:
        """Has its client leave."""
        assert self.attachment is not None
        self.attachment.release(on_disconnect)

    async def next(self) -> tuple[str, Any]:
        """What it is told next."""
        async with asyncio.timeout(60):
            return await self.events.get()

    async def failure(self) -> QuireError:
        """The error that it is told next."""
        what, error = await self.next()
        assert what == "failed"
        assert isinstance(error, QuireError)
        return error

    def _extend(self, tokens: scheduler_v1.Tokens) -> None:
        held = self.sequences.setdefault(tokens.index, [])
        held.extend(tokens.token_ids[len(held) - tokens.offset :])


class SessionClient:
    """A session that is kept up, and a way to wait for its readiness."""

    def __init__(self, addresses: Sequence[str], reconnect_timeout: float) -> None:
        self._changed = asyncio.Condition()
        self.session = SchedulerSession(addresses, "tiny", FINGERPRINT, self._on_change, reconnect_timeout)
        self._notes: set[asyncio.Task[None]] = set()

    def submit(self, key: str, deadline: float | None = None, body_digest: bytes = b"") -> RecordingObserver:
        """Has a request run."""
        submit = scheduler_v1.Submit(key=key, n=1, prompt_token_ids=[1, 2], body_digest=body_digest)
        observer = RecordingObserver()
        observer.attachment = self.session.subscribe(key, submit, observer, deadline)
        return observer

    def attach(self, key: str) -> RecordingObserver:
        """Takes part in a request that must be there."""
        observer = RecordingObserver()
        observer.attachment = self.session.subscribe(key, None, observer, None)
        return observer

    async def running(self, scheduler: ScriptedScheduler, key: str = "k") -> RecordingObserver:
        """A request that is accepted."""
        observer = self.submit(key)
        await scheduler.next("submit")
        scheduler.session.accept(key)
        assert await observer.next() == ("accepted", True)
        return observer

    async def wait_for(self, model: ModelInfo | None) -> None:
        """Waits until the session has this model."""
        async with asyncio.timeout(60), self._changed:
            await self._changed.wait_for(lambda: self.session.model == model)

    def _on_change(self) -> None:
        self._notes.add(asyncio.create_task(self._note()))

    async def _note(self) -> None:
        async with self._changed:
            self._changed.notify_all()


@asynccontextmanager
async def dialling(*addresses: str, reconnect_timeout: float = 60.0) -> AsyncIterator[SessionClient]:
    """A session that dials."""
    client = SessionClient(addresses, reconnect_timeout)
    task = asyncio.create_task(client.session.run())
    try:
        yield client
    finally:
        task.cancel()
        await asyncio.wait([task], timeout=60)
        assert task.done(), "it must end when it is told to"


def there(key: str = "k", submission_id: str = "there", seed: int = 7) -> scheduler_v1.Submit:
    """A request as a scheduler has it."""
    submit = scheduler_v1.Submit(key=key, n=1, prompt_token_ids=[1, 2], submission_id=submission_id)
    submit.sampling.seed = seed
    return submit


def sequence(*token_ids: int, index: int = 0, end: scheduler_v1.SequenceEnd | None = None) -> scheduler_v1.Tokens:
    """All of a sequence."""
    return scheduler_v1.Tokens(index=index, token_ids=token_ids, end=end)


async def grown(scheduler: ScriptedScheduler, request: RecordingObserver, *token_ids: int, key: str = "k") -> None:
    """Has a request draw tokens, one by one."""
    for token_id in token_ids:
        scheduler.session.tokens(key, [token_id], len(request.sequences.get(0, [])))
        assert await request.next() == ("tokens", [token_id])
