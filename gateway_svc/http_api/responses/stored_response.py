"""What a gateway stores with the request of a response, besides what the scheduler stores of any request."""

import json
from dataclasses import dataclass, field
from typing import Any

from gateway_svc.http_api.responses.output_items import Json
from svc_common.errors import QuireError, Reason

_VERSION = 1


@dataclass(frozen=True, slots=True)
class StoredResponse:
    """`head` has the fields of the response that do not change. `history` has the items of earlier responses, and
    `input` those of this one."""

    head: Json
    history: list[Json] = field(default_factory=list)
    input: list[Json] = field(default_factory=list)
    has_logprobs: bool = False
    hides_reasoning: bool = False

    @property
    def id(self) -> str:
        return str(self.head["id"])

    @property
    def is_background(self) -> bool:
        return bool(self.head["background"])

    def to_bytes(self) -> bytes:
        """JSON. Raises QuireError where a text is not valid Unicode."""
        fields = {
            "history": self.history,
            "input": self.input,
            "has_logprobs": self.has_logprobs,
            "hides_reasoning": self.hides_reasoning,
        }
        try:
            return json.dumps({"version": _VERSION, "head": self.head, **fields}, ensure_ascii=False).encode()
        except UnicodeEncodeError:
            raise QuireError(Reason.MALFORMED_MESSAGE, "the body has text that is not valid Unicode") from None

    @classmethod
    def from_bytes(cls, data: bytes) -> "StoredResponse | None":
        """None: the request is not a response, or is one of another version."""
        try:
            values: Any = json.loads(data)
        except ValueError:
            return None
        match values:
            case {
                "version": version,
                "head": {"id": str(), "background": bool()} as head,
                "history": list() as history,
                "input": list() as given,
                "has_logprobs": bool() as has_logprobs,
            } if version == _VERSION:
                # Records of earlier releases do not have the last one.
                return cls(head, history, given, has_logprobs, values.get("hides_reasoning") is True)
        return None
