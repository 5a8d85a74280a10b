"""Server-sent events of OpenAI's API, as their texts."""

import json
from typing import Any

DONE = "data: [DONE]"


def events_of(text: str) -> list[Any]:
    """The events of a stream, parsed, without comments; the last one of a whole stream is DONE."""
    rows = [row for row in text.split("\n\n") if row and not row.startswith(":")]
    return [row if row == DONE else json.loads(row.removeprefix("data: ")) for row in rows]
