"""A response as an object, and as the numbered events of its stream: both a function of its output's tokens."""

from enum import StrEnum
from typing import Any

from gateway_svc.http_api.errors import HttpError
from gateway_svc.http_api.events import long_json, named_event, to_json
from gateway_svc.http_api.responses.namespaces import Namespaces
from gateway_svc.http_api.responses.output_items import Json, OutputItems
from gateway_svc.http_api.responses.stored_response import StoredResponse
from gateway_svc.output import Chunk, FinishReason, Usage
from gateway_svc.vocabulary import Vocabulary
from svc_common.errors import QuireError, Reason


class ResponseStatus(StrEnum):
    """The values are OpenAI's."""

    QUEUED = "queued"
    IN_PROGRESS = "in_progress"
    COMPLETED = "completed"
    INCOMPLETE = "incomplete"
    CANCELLED = "cancelled"
    FAILED = "failed"


class ResponseEvents:
    """A response, from its first event on. Events are numbered from 0.

    Chunks must be those of single tokens, so that every gateway makes the same events of the same tokens.
    """

    def __init__(self, stored: StoredResponse, vocabulary: Vocabulary) -> None:
        self._stored = stored
        namespaces = Namespaces(stored.head["tools"])
        self._items = OutputItems(
            stored.id,
            vocabulary,
            namespaces,
            has_logprobs=stored.has_logprobs and not stored.hides_reasoning,
            hides_reasoning=stored.hides_reasoning,
        )
        self._status = ResponseStatus.QUEUED if stored.is_background else ResponseStatus.IN_PROGRESS
        self._usage: Usage | None = None
        self._error: QuireError | None = None
        self._next_number = 0

    @property
    def last_number(self) -> int:
        """The number of the latest event."""
        return self._next_number - 1

    @property
    def response(self) -> Json:
        """The response as it is now."""
        status, usage = self._status, None
        if self._usage is not None:
            usage = _usage(self._usage)
        error = None
        if self._error is not None and status is ResponseStatus.FAILED:
            error = {"code": _error_code(self._error), "message": str(self._error)}
        is_cut = status is ResponseStatus.INCOMPLETE
        has_failed = status in (ResponseStatus.FAILED, ResponseStatus.CANCELLED)
        return {
            **self._stored.head,
            "status": status.value,
            "error": error,
            "incomplete_details": {"reason": "max_output_tokens"} if is_cut else None,
            "output": self._items.interrupted() if has_failed else self._items.snapshot,
            "usage": usage,
            "completed_at": None,  # the tokens do not say when
        }

    def begin(self) -> list[Json]:
        """The first events."""
        created = self._about_response("response.created")
        queued = [self._about_response("response.queued")] if self._stored.is_background else []
        self._status = ResponseStatus.IN_PROGRESS
        return [created, *queued, self._about_response("response.in_progress")]

    def add(self, chunk: Chunk, usage: Usage) -> list[Json]:
        """The events of one token, or of the end. `usage` is that up to the end."""
        self._status = ResponseStatus.IN_PROGRESS
        events = [self._numbered(event) for event in self._items.add(chunk)]
        if chunk.finish is None:
            return events
        is_cut = chunk.finish.reason is FinishReason.LENGTH
        self._status = ResponseStatus.INCOMPLETE if is_cut else ResponseStatus.COMPLETED
        self._usage = usage
        return [*events, self._about_response(f"response.{self._status.value}")]

    def fail(self, error: QuireError, usage: Usage) -> list[Json]:
        """The last event of a response that failed or was cancelled."""
        self._status = ResponseStatus.CANCELLED if error.reason is Reason.CANCELLED else ResponseStatus.FAILED
        self._usage, self._error = usage, error
        return [self._about_response("response.failed")]

    def _about_response(self, kind: str) -> Json:
        return self._numbered({"type": kind, "response": self.response})

    def _numbered(self, event: Json) -> Json:
        event["sequence_number"] = self._next_number
        self._next_number += 1
        return event


def render_event(event: Json) -> bytes:
    """A server-sent event with its type as its name."""
    return named_event(event["type"], event, to_json if "delta" in event else long_json)


def error_event(error: QuireError, last_number: int) -> bytes:
    """The event of a stream that ends before its response. It has the number of the latest event: the client continues
    after that one."""
    failed = HttpError.of(error)
    fields: dict[str, Any] = {"code": failed.code, "message": failed.message, "param": failed.param}
    return render_event({"type": "error", **fields, "sequence_number": max(0, last_number)})


def _usage(usage: Usage) -> Json:
    return {
        "input_tokens": usage.prompt_tokens,
        "input_tokens_details": {"cached_tokens": usage.cached_tokens, "cache_write_tokens": 0},
        "output_tokens": usage.completion_tokens,
        "output_tokens_details": {"reasoning_tokens": usage.reasoning_tokens},
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
    }


def _error_code(error: QuireError) -> str:
    match HttpError.of(error).status:
        case 429:
            return "rate_limit_exceeded"
        case status if status >= 500:
            return "server_error"
    return "invalid_prompt"
