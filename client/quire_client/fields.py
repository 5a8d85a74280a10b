"""Sets fields of messages, with errors that name them as the server does."""

from collections.abc import Mapping
from typing import Any, cast

import grpc
from google.protobuf.message import Message as ProtoMessage

from quire_client.errors import QuireError


def assign(message: ProtoMessage, path: str, value: Any, within: str = "") -> None:
    """Sets a field. Errors name its path in the request, as the server's do; `within` is the path of the message.

    Raises TypeError for a value of a wrong type, QuireError INVALID_FIELD for one that the field cannot hold.
    """
    *parents, name = path.split(".")
    target = message
    for parent in parents:
        target = cast(ProtoMessage, getattr(target, parent))
    field = within + path
    try:
        if isinstance(value, Mapping):
            getattr(target, name).update(value)
        elif target.DESCRIPTOR.fields_by_name[name].is_repeated:
            getattr(target, name).extend(value)
        else:
            setattr(target, name, value)
    except (TypeError, AttributeError):  # the latter where one of value and field is a mapping
        raise TypeError(f"{field} cannot be a {type(value).__name__}, or hold what this one holds") from None
    except ValueError as error:
        # Out of a 32 or 64-bit field's range, or text with half of a surrogate pair, as Python reads bytes that are not
        # UTF-8 in arguments: the same error as the server's.
        text = "is not text in UTF-8" if isinstance(error, UnicodeError) else "the value is out of range"
        raise QuireError(grpc.StatusCode.INVALID_ARGUMENT, "INVALID_FIELD", text, field) from None
