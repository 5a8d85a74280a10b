"""A client's position in a sequence, from which it receives the rest."""

from dataclasses import dataclass
from enum import Enum

from svc_common.errors import QuireError, Reason


class EndDelivery(Enum):
    """Whether a client that has all tokens of a sequence has received its end."""

    MISSING = "missing"
    GIVEN = "given"
    UNKNOWN = "unknown"
    """The end is sent again; its text was sent with the last token."""


@dataclass(frozen=True, slots=True)
class ResumePosition:
    """A client's position in a sequence, in tokens. `where` is the field that holds it, as the client spells it."""

    num_tokens: int = 0
    ending: EndDelivery = EndDelivery.MISSING
    where: str = ""

    @property
    def is_beginning(self) -> bool:
        """Whether the client has nothing."""
        return self.num_tokens == 0

    def offset_error(self) -> QuireError:
        """The error where the sequence has fewer tokens, or more although its end was received."""
        return QuireError(Reason.RESUME_OFFSET_INVALID, "does not lie within the sequence", field=self.where)
