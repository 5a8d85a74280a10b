"""The client of the session stream: keeps one stream open, to whichever scheduler leads."""

import asyncio
import contextlib
import itertools
import logging
import random
from collections.abc import Callable, Mapping, Sequence
from enum import Enum
from functools import partial

import grpc

from gateway_svc import request_errors
from gateway_svc.reader import Reader
from gateway_svc.record_calls import RecordCalls
from gateway_svc.scheduler_dialer import SchedulerConnection, SchedulerDialer
from gateway_svc.subscriptions import Attachment, Subscriptions
from gateway_svc.validated_request import ModelInfo
from quire.scheduler.v1 import scheduler_pb2
from quire.worker.v1 import worker_pb2
from svc_common.channels import end_if_cancelled
from svc_common.epochs import LatestEpoch
from svc_common.identity import PLAIN, Outbound
from svc_common.message_queue import MAX_TAKEN, MessageQueue

logger = logging.getLogger("quire.gateway")

_Outbox = MessageQueue[scheduler_pb2.SessionRequest]

_HAS_BATCHES = 4  # the protocol from which a message may have several commands
_SUBMIT_TIMEOUT_SECONDS = 10.0
_MAX_RECONNECT_DELAY_SECONDS = 0.05
# A scheduler sends a message every half second at least. A gateway that was itself suspended counts one missed
# heartbeat, however long it was suspended, and so keeps a scheduler whose messages are still unread.
_HEARTBEAT_CHECK_SECONDS = 0.5
_MAX_MISSED_HEARTBEATS = 5


class MemoryPressure(Enum):
    """How short the memory of a worker's machine or container is."""

    NONE = "none"
    HIGH = "high"
    CRITICAL = "critical"


_PRESSURES = {
    worker_pb2.MEMORY_PRESSURE_HIGH: MemoryPressure.HIGH,
    worker_pb2.MEMORY_PRESSURE_CRITICAL: MemoryPressure.CRITICAL,
}


class SchedulerSession:
    """One gateway's session with the scheduler that leads.

    `models` are the models of this gateway that requests can be submitted for, by name. When a session is lost, its
    models stay for as long as a submission waits for the next session. Subscriptions last over reconnections, until
    their readers leave.
    """

    def __init__(
        self,
        addresses: Sequence[str],
        fingerprints: Mapping[str, bytes],
        on_change: Callable[[], None],
        reconnect_timeout: float = 60.0,
        outbound: Outbound = PLAIN,
    ) -> None:
        """`fingerprints` are those of this gateway's tokenizers, by model name. `reconnect_timeout` is how many seconds
        accepted requests wait without a scheduler."""
        self._dialer = SchedulerDialer(addresses, outbound)
        self._fingerprints = fingerprints
        self._on_change = on_change
        self._reconnect_timeout = reconnect_timeout
        self._outbox: _Outbox | None = None
        command_ids = itertools.count(1)
        self._subscriptions = Subscriptions(self._send, reconnect_timeout, command_ids)
        self.records = RecordCalls(self._send, command_ids)
        self._epoch = LatestEpoch()
        self._has_received = False
        self._unready_timers = {name: _OneShotTimer(partial(self._give_up_model, name)) for name in fingerprints}
        self._unreachable_timer = _OneShotTimer(self._give_up_attaches)
        self._give_up_timer = _OneShotTimer(self._give_up)
        self._logged_mismatches: dict[str, dict[str, str]] = {}
        self.models: dict[str, ModelInfo] = {}
        self.is_store_degraded = False
        self.memory_pressure = MemoryPressure.NONE
        """The highest of the workers of `models`."""
        self.num_workers_set_apart = 0
        """Workers, of any model, that get no steps until they are restarted."""

    # Commands.

    def subscribe(
        self, key: str, submit: scheduler_pb2.Submit | None, reader: Reader, deadline: float | None
    ) -> Attachment:
        """Adds a reader to the request of `submit` or, with None, to one that must exist.

        `deadline` is on the monotonic clock, in seconds. Raises QuireError where the model is not ready, or where no
        scheduler can be reached.
        """
        if submit is not None and submit.model not in self.models:
            raise request_errors.model_not_ready(submit.model)
        if submit is None and self._outbox is None and not self.models:
            raise request_errors.no_model_ready()
        return self._subscriptions.subscribe(key, submit, reader, deadline)

    def cancel(self, key: str) -> None:
        """Cancels a request, wherever its readers are; those here fail with CANCELLED.

        Raises QuireError where no scheduler can be reached and the request has no reader here.
        """
        if not self._subscriptions.cancel(key):
            raise request_errors.unavailable("no scheduler can be reached")

    def finish(self, key: str, submission_id: str, stop_matches: Mapping[int, int]) -> None:
        """Ends sequences of a request without a reader here after so many tokens, by index."""
        for index, num_tokens in stop_matches.items():
            finish = scheduler_pb2.Finish(key=key, index=index, num_tokens=num_tokens, submission_id=submission_id)
            self._send(scheduler_pb2.SessionRequest(finish=finish))

    def _send(self, request: scheduler_pb2.SessionRequest) -> bool:
        """Sends a command while a session is open; returns whether it was sent."""
        if self._outbox is None:
            return False
        self._outbox.put(request)
        return True

    # The stream.

    async def run(self) -> None:
        """Keeps a session open until cancelled."""
        while True:
            connection = await self._dialer.connect(self._epoch)
            try:
                await self._run_session(connection)
            finally:
                await connection.channel.close()
            end_if_cancelled()
            # Jitter, so that gateways that lost the same scheduler do not dial the next one all at once.
            await asyncio.sleep(_MAX_RECONNECT_DELAY_SECONDS * random.uniform(0.0, 1.0))

    async def _run_session(self, connection: SchedulerConnection) -> None:
        """One session, to its end."""
        extra = {"scheduler": connection.address, "epoch": connection.first.epoch, "protocol": connection.protocol}
        logger.info("session opened", extra=extra)
        self._outbox = MessageQueue()
        self._connected(connection.protocol)
        writer = asyncio.create_task(_write(connection, self._outbox))
        why = "the scheduler closed the stream"
        response: object = connection.first
        try:
            async with asyncio.timeout(None) as limit:
                watchdog = asyncio.create_task(self._watch_heartbeats(limit))
                try:
                    while isinstance(response, scheduler_pb2.SessionResponse):
                        self._handle_response(response)
                        response = await connection.call.read()
                finally:
                    watchdog.cancel()
        except grpc.aio.AioRpcError as error:
            why = error.code().name
        except TimeoutError:
            why = "no message from the scheduler"
        finally:
            writer.cancel()
            self._outbox = None
            self._disconnected()
        logger.warning("session lost", extra={**extra, "why": why})

    async def _watch_heartbeats(self, limit: asyncio.Timeout) -> None:
        """Ends a session whose scheduler sends nothing."""
        num_missed = 0
        while num_missed < _MAX_MISSED_HEARTBEATS:
            self._has_received = False
            await asyncio.sleep(_HEARTBEAT_CHECK_SECONDS)
            num_missed = 0 if self._has_received else num_missed + 1
        limit.reschedule(asyncio.get_running_loop().time())

    def _handle_response(self, response: scheduler_pb2.SessionResponse) -> None:
        self._has_received = True
        if not self._epoch.take(response.epoch):
            return
        if response.HasField("status"):
            self._handle_status(response.status)
        dispatch, is_waiting = self._subscriptions.dispatch, self.records.is_waiting
        for event in response.events:
            if not (is_waiting and self.records.handle(event)):
                dispatch(event)

    # Models.

    def _handle_status(self, status: scheduler_pb2.Status) -> None:
        self.is_store_degraded = status.is_store_degraded
        self.num_workers_set_apart = status.num_workers_set_apart
        # Protocol 1 has one model, and no list.
        listed = status.models or ([status.model] if status.HasField("model") else [])
        # While versions with different tokenizers serve, a name is listed more than once.
        by_name = {model.name: model for model in listed}
        by_name |= {model.name: model for model in listed if self._has_tokenizer(model)}
        self._log_mismatches(by_name)
        served = [model for name in self._fingerprints if (model := by_name.get(name)) and self._has_tokenizer(model)]
        highest = max((model.memory_pressure for model in served), default=worker_pb2.MEMORY_PRESSURE_UNSPECIFIED)
        self.memory_pressure = _PRESSURES.get(highest, MemoryPressure.NONE)
        self._set_models({model.name: ModelInfo.from_proto(model) for model in served})
        self._subscriptions.set_status(self.models.keys(), is_store_degraded=status.is_store_degraded)

    def _has_tokenizer(self, model: scheduler_pb2.Model) -> bool:
        return self._fingerprints.get(model.name) == model.tokenizer_fingerprint

    def _log_mismatches(self, listed: Mapping[str, scheduler_pb2.Model]) -> None:
        """Logs, once until it changes, each model that the scheduler has with another tokenizer, or may have under
        another name: the scheduler does not list it, and lists a model that this gateway does not have."""
        has_others = not listed.keys() <= self._fingerprints.keys()
        for name, fingerprint in self._fingerprints.items():
            model = listed.get(name)
            mismatch: dict[str, str] = {}
            if model is None and has_others:
                mismatch = {"scheduler_models": ", ".join(sorted(listed))}
            elif model is not None and model.tokenizer_fingerprint != fingerprint:
                mismatch = {
                    "tokenizer_fingerprint": fingerprint.hex(),
                    "scheduler_tokenizer_fingerprint": model.tokenizer_fingerprint.hex(),
                }
            if mismatch and mismatch != self._logged_mismatches.get(name):
                problem = "does not serve a model of this gateway" if model is None else "has another tokenizer"
                logger.error(f"the scheduler {problem}", extra={"model": name, **mismatch})
            self._logged_mismatches[name] = mismatch

    def _set_models(self, models: dict[str, ModelInfo]) -> None:
        for name, timer in self._unready_timers.items():
            if name in models:
                timer.stop()
            else:
                timer.start(_SUBMIT_TIMEOUT_SECONDS)
        if models != self.models:
            self.models = models
            self._on_change()

    def _connected(self, protocol: int) -> None:
        self._give_up_timer.stop()
        self._unreachable_timer.stop()
        self._subscriptions.open()
        self.records.open(protocol)

    def _disconnected(self) -> None:
        """The stream broke. Running requests and new ones wait for the next session."""
        self._subscriptions.close()
        for timer in self._unready_timers.values():
            timer.start(_SUBMIT_TIMEOUT_SECONDS)
        self._unreachable_timer.start(_SUBMIT_TIMEOUT_SECONDS)
        self._give_up_timer.start(self._reconnect_timeout)

    def _give_up_model(self, name: str) -> None:
        if name in self.models:
            self.models = {other: info for other, info in self.models.items() if other != name}
            self._on_change()
        self._subscriptions.give_up_submissions(name, request_errors.unavailable("no scheduler can run the request"))

    def _give_up_attaches(self) -> None:
        self._subscriptions.give_up_attaches(request_errors.unavailable("no scheduler can be reached"))

    def _give_up(self) -> None:
        self._subscriptions.give_up(request_errors.unavailable("the connection to the scheduler was lost"))


class _OneShotTimer:
    """Calls `action` once, unless it is stopped before its time has passed."""

    def __init__(self, action: Callable[[], None]) -> None:
        self._action = action
        self._timer: asyncio.TimerHandle | None = None

    def start(self, seconds: float) -> None:
        """Starts the timer, unless it runs."""
        if self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(seconds, self._end)

    def stop(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _end(self) -> None:
        self._timer = None
        self._action()


async def _write(connection: SchedulerConnection, outbox: _Outbox) -> None:
    call, protocol = connection.call, connection.protocol
    # The reader of the call reports why it ended.
    with contextlib.suppress(grpc.aio.AioRpcError, asyncio.InvalidStateError):
        if protocol > 1:  # protocol 1 does not have the command
            await call.write(scheduler_pb2.SessionRequest(hello=scheduler_pb2.Hello(protocol=protocol)))
        while True:
            commands = await outbox.take(MAX_TAKEN if protocol >= _HAS_BATCHES else 1)
            if len(commands) > 1:
                batch = scheduler_pb2.CommandBatch(commands=commands)
                await call.write(scheduler_pb2.SessionRequest(batch=batch))
            else:
                await call.write(commands[0])
