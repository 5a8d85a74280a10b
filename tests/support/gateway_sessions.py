"""A gateway's session with schedulers, and readers that record their events."""

import asyncio
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import Any

from gateway_svc.reader import ReaderAction, Release, StopFound
from gateway_svc.session import SchedulerSession
from gateway_svc.subscriptions import Attachment
from gateway_svc.validated_request import ModelInfo, OnDisconnect
from quire.scheduler.v1 import scheduler_pb2 as scheduler_v1
from scripted_scheduler import ScriptedScheduler
from svc_common.errors import QuireError

FINGERPRINT = b"\x01" * 32
MODEL = scheduler_v1.Model(name="tiny", tokenizer_fingerprint=FINGERPRINT, context_length=64, vocab_size=100)
MODEL_INFO = ModelInfo("tiny", 64, 100)
OTHER_FINGERPRINT = b"\x02" * 32
OTHER_MODEL = scheduler_v1.Model(
    name="other", tokenizer_fingerprint=OTHER_FINGERPRINT, context_length=32, vocab_size=50
)
OTHER_INFO = ModelInfo("other", 32, 50)


class RecordingReader:
    """Records its events as (kind, value), and keeps the tokens of its sequences."""

    def __init__(self) -> None:
        self.events: asyncio.Queue[tuple[str, Any]] = asyncio.Queue()
        self.attachment: Attachment | None = None
        self.sequences: dict[int, list[int]] = {}
        self.stop_matches: dict[int, int] = {}
        self._stops_at: dict[int, int] = {}
        self._actions_at_stop: list[ReaderAction] = []

    def field_path(self, which: str, item_index: int | None = None) -> str:
        return f"my {which}"

    def on_accepted(self, is_durable: bool) -> None:
        self.events.put_nowait(("accepted", is_durable))

    def on_attached(self, attached: scheduler_v1.Attached, *, is_durable: bool) -> Sequence[ReaderAction]:
        actions = [action for tokens in attached.sequences for action in self._extend(tokens)]
        self.events.put_nowait(("attached", {one.index: list(one.token_ids) for one in attached.sequences}))
        return actions

    def on_tokens(self, tokens: scheduler_v1.Tokens) -> Sequence[ReaderAction]:
        if tokens.index == 99:
            raise RuntimeError("secret")
        actions = self._extend(tokens)
        self.events.put_nowait(("tokens", list(tokens.token_ids)))
        return actions

    def on_prompt_logprobs(self, prompt_logprobs: scheduler_v1.PromptLogprobs) -> None:
        self.events.put_nowait(("prompt_logprobs", prompt_logprobs.offset))

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

    def stop_at(self, index: int, num_tokens: int, *, is_last: bool = False) -> None:
        """Reports a stop string after the first `num_tokens` tokens of a sequence. With `is_last`, the request has
        ended."""
        self._stops_at[index] = num_tokens
        self._actions_at_stop = [Release(None)] if is_last else []

    def disconnect(self, on_disconnect: OnDisconnect) -> None:
        """Disconnects the client."""
        assert self.attachment is not None
        self.attachment.release(on_disconnect)

    async def next(self) -> tuple[str, Any]:
        """Its next event."""
        async with asyncio.timeout(60):
            return await self.events.get()

    async def failure(self) -> QuireError:
        """The error of its next event."""
        what, error = await self.next()
        assert what == "failed"
        assert isinstance(error, QuireError)
        return error

    def _extend(self, tokens: scheduler_v1.Tokens) -> Sequence[ReaderAction]:
        known = self.sequences.setdefault(tokens.index, [])
        if tokens.index not in self.stop_matches:
            known.extend(tokens.token_ids[len(known) - tokens.offset :])
        stops_at = self._stops_at.get(tokens.index)
        if stops_at is None or len(known) < stops_at:
            return ()
        del known[stops_at:]
        self.stop_matches[tokens.index] = stops_at
        return (StopFound(tokens.index, stops_at), *self._actions_at_stop)


class SessionClient:
    """A session that stays open, with a way to wait for its models."""

    def __init__(self, addresses: Sequence[str], reconnect_timeout: float) -> None:
        self._changed = asyncio.Condition()
        fingerprints = {"tiny": FINGERPRINT, "other": OTHER_FINGERPRINT}
        self.session = SchedulerSession(addresses, fingerprints, self._on_change, reconnect_timeout)
        self._notes: set[asyncio.Task[None]] = set()

    def submit(
        self,
        key: str,
        deadline: float | None = None,
        body_digest: bytes = b"",
        model: str = "tiny",
        retention: scheduler_v1.Retention | None = None,
        call: scheduler_v1.CountedCall | None = None,
        *,
        is_named: bool = False,
    ) -> RecordingReader:
        """Submits a request, of a `call` of several."""
        submit = scheduler_v1.Submit(key=key, n=1, prompt_token_ids=[1, 2], body_digest=body_digest, model=model)
        submit.detachable = is_named
        if retention is not None:
            submit.retention.CopyFrom(retention)
        if call is not None:
            submit.call.CopyFrom(call)
        reader = RecordingReader()
        reader.attachment = self.session.subscribe(key, submit, reader, deadline)
        return reader

    def attach(self, key: str) -> RecordingReader:
        """Attaches to a request that must exist."""
        reader = RecordingReader()
        reader.attachment = self.session.subscribe(key, None, reader, None)
        return reader

    async def running(self, scheduler: ScriptedScheduler, key: str = "k") -> RecordingReader:
        """Submits a request and waits until it is accepted."""
        reader = self.submit(key)
        await scheduler.next("submit")
        scheduler.session.accept(key)
        assert await reader.next() == ("accepted", True)
        return reader

    async def wait_for(self, *models: ModelInfo) -> None:
        """Waits until the session has these models."""
        async with asyncio.timeout(60), self._changed:
            await self._changed.wait_for(lambda: self.session.models == {model.name: model for model in models})

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
        assert task.done(), "a session must end when it is cancelled"


def there(key: str = "k", submission_id: str = "there", seed: int = 7) -> scheduler_v1.Submit:
    """A request of the scheduler."""
    submit = scheduler_v1.Submit(key=key, n=1, prompt_token_ids=[1, 2], submission_id=submission_id)
    submit.sampling.seed = seed
    return submit


def sequence(*token_ids: int, index: int = 0, end: scheduler_v1.SequenceEnd | None = None) -> scheduler_v1.Tokens:
    """All of a sequence."""
    return scheduler_v1.Tokens(index=index, token_ids=token_ids, end=end)


async def grown(scheduler: ScriptedScheduler, request: RecordingReader, *token_ids: int, key: str = "k") -> None:
    """Sends tokens of a request, one by one."""
    for token_id in token_ids:
        scheduler.session.tokens(key, [token_id], len(request.sequences.get(0, [])))
        assert await request.next() == ("tokens", [token_id])
