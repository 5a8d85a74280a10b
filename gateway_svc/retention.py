"""How long Redis keeps a request's record: what clients may ask for, and the defaults."""

from dataclasses import dataclass, replace

from gateway_svc.field_paths import Field, FieldPath
from quire.inference.v1 import inference_pb2
from quire.scheduler.v1 import scheduler_pb2
from svc_common.errors import QuireError, Reason

PATTERN = r"^(none|until_end|[1-9][0-9]{0,8})$"
"""A retention as text: `none`, `until_end`, or seconds."""


@dataclass(frozen=True, slots=True, order=True)
class Retention:
    """A smaller one keeps less. `seconds` are counted from the request's end; 0: until the end.

    "Until the end" has the scheduler's QUIRE_DETACH_GRACE after it, of `most_seconds` at most; 0: however long it is.
    """

    is_recorded: bool
    seconds: int = 0
    most_seconds: int = 0

    @classmethod
    def parse(cls, text: str) -> "Retention":
        """From a text that matches `PATTERN`."""
        match text:
            case "none":
                return NONE
            case "until_end":
                return UNTIL_END
        return cls(is_recorded=True, seconds=int(text))

    @classmethod
    def from_proto(cls, message: inference_pb2.Retention) -> "Retention | None":
        """From the public contract. None: it has no kind, or 0 seconds."""
        match message.WhichOneof("kind"):
            case "none":
                return NONE
            case "until_end":
                return UNTIL_END
            case "seconds" if message.seconds:
                return cls(is_recorded=True, seconds=message.seconds)
        return None

    def to_proto(self) -> scheduler_pb2.Retention:
        return scheduler_pb2.Retention(
            is_unrecorded=not self.is_recorded, seconds=self.seconds, most_seconds=self.most_seconds
        )

    def __str__(self) -> str:
        if not self.is_recorded:
            return "none"
        return f"{self.seconds} seconds" if self.seconds else "until_end"


NONE = Retention(is_recorded=False)
UNTIL_END = Retention(is_recorded=True)


@dataclass(frozen=True, slots=True)
class RetentionRules:
    """The operator's rules. `named` and `unnamed` are the defaults; None: the scheduler's QUIRE_RECORD_TTL."""

    max_seconds: int
    named: Retention | None
    unnamed: Retention | None

    def resolve(
        self, asked: Retention | None, *, is_named: bool, limit: Retention | None, field_path: FieldPath
    ) -> Retention | None:
        """The retention of a request; None: the scheduler's QUIRE_RECORD_TTL.

        `limit` is the most that the client's key allows, and the default of its requests where it is less than the
        operator's. Raises QuireError where the request asks for more.
        """
        if asked is None:
            default = self.named if is_named else self.unnamed
            asked = min((one for one in (default, limit) if one is not None), default=None)
        elif asked.seconds > self.max_seconds:
            raise _invalid(field_path, f"must be at most {self.max_seconds} seconds")
        elif limit is not None and asked > limit:
            raise _invalid(field_path, f"must be at most {limit}, which is the limit of the API key")
        if asked == UNTIL_END and limit is not None:
            return replace(asked, most_seconds=limit.seconds)
        return asked


def _invalid(field_path: FieldPath, message: str) -> QuireError:
    return QuireError(Reason.INVALID_FIELD, message, field=field_path(Field.RETENTION))
