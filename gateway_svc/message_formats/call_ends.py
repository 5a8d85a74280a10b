"""Parses the marker after the last call of a group."""

from gateway_svc.message_formats.source import Parse, TurnSource
from gateway_svc.message_formats.writer import EventWriter


def parse_end(source: TurnSource, end: str | None, writer: EventWriter) -> Parse[bool]:
    """Whether the last unit begins this marker, which is then accepted. If not, only that unit has been read."""
    if end is None or (yield from source.match((end,))) is None:
        return False
    writer.add_marker()
    source.accept()
    return True
