"""Fields of messages that a later version of the public contract has."""

from google.protobuf.message import Message
from google.protobuf.unknown_fields import UnknownFieldSet

from svc_common.errors import QuireError, Reason


def reject_unknown_fields(message: Message, path: str) -> None:
    """Rejects a field of a later version of the contract by its number: it is not served, and must not be ignored."""
    for unknown in UnknownFieldSet(message):  # type: ignore[attr-defined]  # its stub knows only indexing
        text = "is not a field of this version of the contract"
        raise QuireError(Reason.FEATURE_UNSUPPORTED, text, field=f"{path}.{unknown.field_number}")
