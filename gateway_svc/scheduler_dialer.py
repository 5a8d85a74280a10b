"""Finds the scheduler that leads: dials all of them, and returns the first one that accepts a session."""

import asyncio
import contextlib
import logging
import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias

import grpc

from quire.scheduler.v1 import scheduler_pb2
from quire.scheduler.v1.scheduler_pb2_grpc import SchedulerServiceStub
from svc_common.channels import end_if_cancelled, is_credential_error
from svc_common.epochs import LatestEpoch
from svc_common.identity import Outbound
from svc_common.protocols import SESSION_PROTOCOLS

logger = logging.getLogger("quire.gateway")

_DIAL_SECONDS = 2.0
_FIRST_BACKOFF_SECONDS = 0.05
_MAX_BACKOFF_SECONDS = 0.5

SessionCall: TypeAlias = "grpc.aio.StreamStreamCall[scheduler_pb2.SessionRequest, scheduler_pb2.SessionResponse]"


@dataclass(frozen=True, slots=True)
class SchedulerConnection:
    """An open session stream, its first message, and the protocol that both sides use."""

    address: str
    channel: grpc.aio.Channel
    call: SessionCall
    first: scheduler_pb2.SessionResponse
    protocol: int


class SchedulerDialer:
    """Dials the schedulers at `addresses`."""

    def __init__(self, addresses: Sequence[str], outbound: Outbound) -> None:
        self._addresses = addresses
        self._outbound = outbound
        self._epoch = LatestEpoch()
        self._logged_ranges: dict[str, tuple[int, int]] = {}
        self._logged_credentials: set[str] = set()

    async def connect(self, epoch: LatestEpoch) -> SchedulerConnection:
        """The first scheduler that accepts a session, and is not of an older epoch.

        All are dialled at once: a scheduler that is stopped does not answer at all, and would delay the search for the
        one that took over.
        """
        self._epoch = epoch
        dials = [asyncio.create_task(self._connect(address)) for address in self._addresses]
        connection = None
        try:
            done, _ = await asyncio.wait(dials, return_when=asyncio.FIRST_COMPLETED)
            connection = done.pop().result()
            return connection
        finally:
            for dial in dials:
                dial.cancel()
            for other in await asyncio.gather(*dials, return_exceptions=True):
                if isinstance(other, SchedulerConnection) and other is not connection:
                    await other.channel.close()

    async def _connect(self, address: str) -> SchedulerConnection:
        """Dials one scheduler until it accepts a session."""
        backoff = _FIRST_BACKOFF_SECONDS
        while True:
            async with contextlib.AsyncExitStack() as stack:
                channel = await stack.enter_async_context(self._outbound.channel(address))
                call: SessionCall = SchedulerServiceStub(channel).Session(metadata=self._outbound.metadata)
                try:
                    async with asyncio.timeout(_DIAL_SECONDS):
                        first = await call.read()
                except (grpc.aio.AioRpcError, TimeoutError) as error:
                    self._log_refusal(address, error)
                else:
                    if isinstance(first, scheduler_pb2.SessionResponse) and self._is_current(address, first):
                        protocol = self._common_protocol(address, first.status)
                        if protocol is not None:
                            self._logged_credentials.discard(address)
                            stack.pop_all()
                            return SchedulerConnection(address, channel, call, first, protocol)
            end_if_cancelled()
            await asyncio.sleep(backoff * random.uniform(0.5, 1.5))
            backoff = min(backoff * 2, _MAX_BACKOFF_SECONDS)

    def _log_refusal(self, address: str, error: grpc.aio.AioRpcError | TimeoutError) -> None:
        """A wrong credential is logged as an error, once per session. Anything else may pass: a start, a standby."""
        code = error.code() if isinstance(error, grpc.aio.AioRpcError) else None
        extra = {"scheduler": address, "code": code.name if code else "TIMEOUT"}
        if not is_credential_error(error, has_credential=self._outbound.has_credential):
            logger.debug("a scheduler did not accept a session", extra=extra)
        elif address not in self._logged_credentials:
            self._logged_credentials.add(address)
            why = error.details() if isinstance(error, grpc.aio.AioRpcError) else None
            logger.error("gateway and scheduler do not accept each other's credentials", extra=extra | {"why": why})

    def _is_current(self, address: str, first: scheduler_pb2.SessionResponse) -> bool:
        if self._epoch.is_older(first.epoch):
            extra = {"scheduler": address, "epoch": first.epoch, "known_epoch": int(self._epoch)}
            logger.warning("rejected a scheduler of an older epoch", extra=extra)
            return False
        return True

    def _common_protocol(self, address: str, status: scheduler_pb2.Status) -> int | None:
        """The protocol to use with a scheduler; None where there is none, which is logged once."""
        accepted = (status.oldest_protocol, status.newest_protocol)
        protocol = SESSION_PROTOCOLS.newest_common(*accepted)
        if protocol is not None:
            self._logged_ranges.pop(address, None)
        elif self._logged_ranges.get(address) != accepted:
            self._logged_ranges[address] = accepted
            extra = {
                "scheduler": address,
                "scheduler_protocols": "{} to {}".format(*accepted),
                "protocols": str(SESSION_PROTOCOLS),
            }
            logger.error("rejected a scheduler that has no session protocol in common", extra=extra)
        return protocol
