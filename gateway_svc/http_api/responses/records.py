"""Responses that are looked up: what is stored with their requests, and their output so far."""

import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import TypeVar

from gateway_svc.http_api.calls import HttpCalls
from gateway_svc.http_api.json_body import invalid
from gateway_svc.http_api.responses.conversation import without_logprobs
from gateway_svc.http_api.responses.events import ResponseEvents, render_event
from gateway_svc.http_api.responses.output_items import Json
from gateway_svc.http_api.responses.stored_response import StoredResponse
from gateway_svc.recorded_output import RecordedOutput
from gateway_svc.request_manager import RequestManager
from gateway_svc.tenant import Tenant
from gateway_svc.work_costs import ATTACHMENT_BYTE, RESPONSE_TOKEN
from quire.scheduler.v1 import scheduler_pb2
from svc_common.errors import QuireError, Reason

T = TypeVar("T")

_ID = re.compile(r"resp_[0-9a-f]{48}")
_MAX_SHOWN = 64
_TOKENS_OF_PART = 200  # of a stream
_CONTINUABLE = ("completed", "incomplete")

Found = tuple[scheduler_pb2.Record, StoredResponse]


@dataclass(frozen=True, slots=True)
class History:
    """The items of a conversation so far, and the bytes in which they are stored."""

    items: list[Json] = field(default_factory=list)
    num_bytes: int = 0


class ResponseRecords:
    """The responses of all tenants, live or ended."""

    def __init__(self, request_manager: RequestManager, calls: HttpCalls) -> None:
        self._request_manager = request_manager
        self._calls = calls

    async def find(self, tenant: Tenant, response_id: str, field: str = "response_id") -> Found:
        """A response of a tenant; one that has a stop string ends there. Raises QuireError."""
        # In OpenAI's words, which clients look for.
        message = f"Response with id '{response_id[:_MAX_SHOWN]}' not found."
        unknown = QuireError(Reason.REQUEST_UNKNOWN, message, field=field)
        if not _ID.fullmatch(response_id):
            raise unknown
        try:
            record = await self._request_manager.look_up(tenant, response_id)
            if await self._end_at_stops(tenant, response_id, record):
                record = await self._request_manager.look_up(tenant, response_id)
        except QuireError as error:
            raise unknown if error.reason is Reason.REQUEST_UNKNOWN else error from None
        stored = await self.work(tenant, record, lambda: StoredResponse.from_bytes(record.attachment))
        if stored is None:
            raise unknown
        return record, stored

    async def _end_at_stops(self, tenant: Tenant, response_id: str, record: scheduler_pb2.Record) -> bool:
        """Ends a response in the background, which no gateway may have searched for stop strings.

        Returns whether it has one.
        """
        if record.HasField("ended_at") or not record.attached.render_options.stops:
            return False
        catalog = self._request_manager.catalog
        output = await self.work(tenant, record, lambda: RecordedOutput.of(record, catalog))
        if not output.stop_matches:
            return False
        submission_id = record.attached.submission_id
        self._request_manager.end_at_stops(tenant, response_id, submission_id, output.stop_matches)
        return True

    async def history(self, tenant: Tenant, previous_id: str | None) -> History:
        """A conversation up to the output of its latest response. Raises QuireError."""
        if previous_id is None:
            return History()
        record, stored = await self.find(tenant, previous_id, "previous_response_id")
        response = await self.work(tenant, record, lambda: self.response(record, stored))
        if response["status"] not in _CONTINUABLE:
            raise invalid("previous_response_id", f"is a response that is {response['status']}")
        items = [*stored.history, *stored.input, *without_logprobs(response["output"])]
        return History(items, len(record.attachment))

    async def work(self, tenant: Tenant, record: scheduler_pb2.Record, work: Callable[[], T]) -> T:
        """Does work on the output of a record or on its attachment; in a thread if that is long."""
        num_tokens = sum(len(tokens.token_ids) for tokens in record.attached.sequences)
        cost = max(RESPONSE_TOKEN * num_tokens, ATTACHMENT_BYTE * len(record.attachment))
        return await self._calls.run_if_long(tenant, cost, work)

    def response(self, record: scheduler_pb2.Record, stored: StoredResponse) -> Json:
        """A response as it is now."""
        events, slices = self._replayed(record, stored)
        for _ in slices:
            pass
        response = events.response
        if response["status"] == "completed" and record.HasField("ended_at"):
            response["completed_at"] = record.ended_at.seconds
        return response

    def _replayed(
        self, record: scheduler_pb2.Record, stored: StoredResponse
    ) -> tuple[ResponseEvents, Iterator[list[Json]]]:
        """A response, and its events so far in slices of a few tokens. The response changes as they are taken. Raises
        QuireError."""
        output = RecordedOutput.of(record, self._request_manager.catalog)
        events = ResponseEvents(stored, output.vocabulary)

        def slices() -> Iterator[list[Json]]:
            if not output.chunks and not record.HasField("ended_at"):
                return  # it may be queued
            yield events.begin()
            for first in range(0, len(output.chunks), _TOKENS_OF_PART):
                chunks = output.chunks[first : first + _TOKENS_OF_PART]
                yield [event for chunk in chunks for event in events.add(chunk, output.usage)]
            if output.failure is not None:
                yield events.fail(output.failure, output.usage)

        return events, slices()

    def parts(self, record: scheduler_pb2.Record, stored: StoredResponse, after: int | None) -> Iterator[bytes]:
        """The rendered events so far, after number `after`. None of the parts is empty."""
        for events in self._replayed(record, stored)[1]:
            if part := rendered(events, after):
                yield part


def rendered(events: Iterable[Json], after: int | None) -> bytes:
    """Events of a stream, from the one after number `after` on."""
    return b"".join([render_event(event) for event in events if after is None or event["sequence_number"] > after])
