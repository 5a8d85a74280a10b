"""The parts of gateways' endpoints that both clients share."""

from collections.abc import Sequence
from dataclasses import dataclass
from time import monotonic
from typing import Any, Generic, TypeVar

from quire.inference.v1 import inference_pb2 as pb
from quire_client.connection import Connection
from quire_client.resumable_stream import EndpointList, ResumableStream

CallT = TypeVar("CallT")


@dataclass(eq=False, slots=True)
class WatchedCall(Generic[CallT]):
    """A call that is cancelled when its gateway does not respond any more."""

    call: CallT
    is_abandoned: bool = False


class BaseEndpoint:
    """One address: a gateway, or those behind one name. `index` is that in the endpoint list."""

    def __init__(self, index: int, connection: Connection) -> None:
        self.index = index
        self.name = connection.name  # all addresses: callers do not choose one
        self._address = connection.addresses[index]
        self._connection = connection
        self._last_activity = 0.0
        self._is_closed = False

    def record_activity(self) -> None:
        """The gateway has sent something just now."""
        self._last_activity = monotonic()


EndpointT = TypeVar("EndpointT", bound=BaseEndpoint)


class BaseEndpointPool(Generic[EndpointT]):
    """The endpoints of one client, and the requests that end with it."""

    def __init__(self, connection: Connection, endpoints: Sequence[EndpointT]) -> None:
        self._connection = connection
        self._endpoints = endpoints
        self.endpoint_list = EndpointList(len(endpoints))
        self._request_ids: set[str] = set()

    def _begin_stream_call(
        self, resumable: ResumableStream, traceparent: str | None
    ) -> tuple[EndpointT, pb.StreamGenerateRequest | pb.ResumeRequest, dict[str, Any]]:
        """Endpoint, request and options of a stream's next call. Raises QuireError where there is no time left."""
        request, timeout = resumable.begin_call(monotonic())
        options = {"timeout": timeout, "metadata": self._connection.metadata(traceparent)}
        return self._endpoints[self.endpoint_list.current], request, options
