"""Whether a call whose client has left was cancelled or reached its deadline."""

from typing import Any

import grpc

# A client sends its timeout rounded up to two or three digits, and resets the stream when its own time is over: up to
# 1 % before the server's.
_ROUNDING = 0.01
_TRANSIT_SECONDS = 0.05


class CallDeadline:
    """The deadline of a call, as it was when the call began."""

    def __init__(self, context: "grpc.aio.ServicerContext[Any, Any]") -> None:
        self._context = context
        self._allowed = context.time_remaining()

    def code_of_departure(self) -> grpc.StatusCode:
        """DEADLINE_EXCEEDED if the client left because its deadline passed, else CANCELLED."""
        left = self._context.time_remaining()
        if left is None or self._allowed is None or left > self._allowed * _ROUNDING + _TRANSIT_SECONDS:
            return grpc.StatusCode.CANCELLED
        return grpc.StatusCode.DEADLINE_EXCEEDED
