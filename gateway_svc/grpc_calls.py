"""What the gRPC services of the gateway share: the caller, its deadline, and how a call ends with an error."""

import asyncio
import time
import uuid
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import replace
from typing import Any, TypeAlias, TypeVar

import grpc
from grpc_status import rpc_status
from opentelemetry import context as otel

from gateway_svc.auth import CREDENTIAL_HEADERS, Authenticator
from gateway_svc.call_limits import CallLimits
from gateway_svc.chats import conversion_cost
from gateway_svc.client_call import Call
from gateway_svc.common_fields import is_request_id
from gateway_svc.field_paths import FieldPath
from gateway_svc.grpc_admission import current_call, message_bytes
from gateway_svc.metrics import CallOutcome
from gateway_svc.model_catalog import CatalogModel
from gateway_svc.refusals import refusal_of
from gateway_svc.request_manager import RequestManager
from gateway_svc.tenant import Tenant
from gateway_svc.tenant_shares import Share, TenantShares
from gateway_svc.tenant_threads import TenantThreads
from gateway_svc.tracing import Operation
from quire.inference.v1 import inference_pb2
from svc_common.deadlines import CallDeadline
from svc_common.errors import QuireError, Reason

GrpcContext: TypeAlias = "grpc.aio.ServicerContext[Any, Any]"

T = TypeVar("T")

REQUEST_ID = "x-request-id"

# What probes call.
_OPEN_METHODS = (
    "/grpc.health.v1.Health/",
    "/inference.GRPCInferenceService/ServerLive",
    "/inference.GRPCInferenceService/ServerReady",
)
_PUSHBACK = "grpc-retry-pushback-ms"
_LATER_SECONDS = 2.0  # longer than a channel waits between its own retries
_ENDLESS_SECONDS = 1e9  # a deadline decades away counts as none


class GrpcCalls:
    """Calls of the gRPC services. An error has x-request-id in its trailing metadata."""

    def __init__(
        self,
        request_manager: RequestManager,
        authenticator: Authenticator,
        threads: TenantThreads,
        limits: CallLimits,
        slow_messages: TenantShares,
    ) -> None:
        """`threads` are for work that would delay the streams of others, `slow_messages` places of messages that arrive
        slowly.
        """
        self._request_manager = request_manager
        self._authenticator = authenticator
        self._threads = threads
        self._limits = limits
        self._slow_messages = slow_messages

    async def convert(self, tenant: Tenant, chat: inference_pb2.Chat, work: Callable[[], T]) -> T:
        """Converts a message with a chat; in a thread if the chat is long. Raises as `work` does."""
        return await self._threads.run_if_long(tenant.name, conversion_cost(chat), work)

    async def render(self, call: Call, cost: float, work: Callable[[], T]) -> T:
        """Renders a part of an answer in about `cost` microseconds; in a thread if that is long."""
        return await self._threads.run_if_long(call.tenant.name, cost, work)

    def is_allowed(self, method: str, context: GrpcContext) -> bool:
        """Whether the message of a call is to be read: the call needs no credential, or has a valid one."""
        return method.startswith(_OPEN_METHODS) or current_call() is not None

    def counted_tenant(self, method: str, context: GrpcContext) -> Tenant | None:
        """The tenant of a call that is counted; None: its handler needs no credential, or is to refuse the call."""
        if method.startswith(_OPEN_METHODS):
            return None
        try:
            return self._authenticator.tenant(_credentials(context))
        except QuireError:
            return None

    def check_credential(self, _: str, context: GrpcContext) -> None:
        """Raises LoginRefused for a call without a valid credential."""
        self.tenant(context)

    def tenant(self, context: GrpcContext) -> Tenant:
        """The tenant of a call. Raises LoginRefused."""
        return self._authenticator.login(_credentials(context), "grpc", context.peer())

    def call(self, operation: Operation, context: GrpcContext) -> Call:
        """A call to generate. Raises LoginRefused."""
        time_left = context.time_remaining()
        deadline = None
        if time_left is not None and time_left < _ENDLESS_SECONDS:
            deadline = time.monotonic() + time_left
        return Call(
            tenant=self.tenant(context),
            operation=operation,
            body=None if (open_call := current_call()) is None else open_call.body,
            deadline=deadline,
            parent=otel.get_current(),
        )

    def note(self, error: QuireError) -> None:
        """Counts an error of a call, or of a message of one, among the refusals, if it is one."""
        if (refusal := refusal_of(error)) is not None:
            self._request_manager.metrics.refuse("grpc", refusal)

    def slow_messages(self, tenant: Tenant) -> Share:
        """The places of a tenant's stream of messages, none so far."""
        return self._slow_messages.share(tenant.name)

    @contextmanager
    def message(self, operation: Operation, context: GrpcContext) -> Iterator[Call]:
        """A call for the message of a stream that was read last: the credential of the stream must be valid still, and
        has the limits of now. The message's bytes count until its requests are submitted.

        Raises QuireError.
        """
        call = self.call(operation, context)
        body = self._limits.body(call.tenant)
        body.add(message_bytes())
        try:
            yield replace(call, body=body)
        finally:
            body.release()

    def find_model(self, name: str | None, field_path: FieldPath, tenant: Tenant, outcome: CallOutcome) -> CatalogModel:
        """The model that a message names, which the call is for. Raises QuireError MODEL_NOT_FOUND."""
        model = self._request_manager.catalog.find(name, field_path, tenant)
        outcome.model = model.name
        return model

    @asynccontextmanager
    async def answer(self, context: GrpcContext, method: str, request_id: str) -> AsyncIterator[CallOutcome]:
        """Counts a call, and ends it with the status of a QuireError. The block finds the model that it is for.

        An error has no initial metadata, so that a client's retry policy may act on it.
        """
        deadline = CallDeadline(context)
        with self._request_manager.metrics.call("grpc", method, grpc.StatusCode.OK.name) as outcome:
            try:
                yield outcome
            except QuireError as error:
                self.note(error)
                outcome.code = error.code.name
                metadata: list[tuple[str, str | bytes]] = [
                    (rpc_status.GRPC_DETAILS_METADATA_KEY, error.details()),
                    (REQUEST_ID, request_id),
                ]
                if not _is_for_the_channel(error):
                    metadata.append((_PUSHBACK, "-1"))
                await context.abort(error.code, str(error), trailing_metadata=tuple(metadata))
            except (asyncio.CancelledError, GeneratorExit):
                outcome.code = deadline.code_of_departure().name
                raise
            except Exception:
                outcome.code = grpc.StatusCode.INTERNAL.name
                raise


def reply_id(request_id: str = "") -> str:
    """The id of a reply: the client's, where that is a valid one."""
    return request_id if is_request_id(request_id) else uuid.uuid4().hex


def _credentials(context: GrpcContext) -> list[tuple[str, str]]:
    names = {name.lower() for name in CREDENTIAL_HEADERS}
    metadata = context.invocation_metadata() or ()
    return [(name, value) for name, value in metadata if name in names and isinstance(value, str)]


def _is_for_the_channel(error: QuireError) -> bool:
    """Whether a client's own retry policy may act on an error, or must leave it to the caller.

    A retry policy retries at once, which adds to the load, and with the same deadline, which is then harder to meet.
    """
    if error.reason is Reason.DEADLINE_TOO_SHORT:
        return False
    return error.retry_after is None or error.retry_after <= _LATER_SECONDS
