"""Lengths of time as messages."""

from google.protobuf.duration_pb2 import Duration


def to_duration(seconds: float) -> Duration:
    """Finite seconds as a message."""
    message = Duration()
    message.FromNanoseconds(round(seconds * 1e9))
    return message


def to_seconds(duration: Duration) -> float:
    """A message as seconds."""
    return duration.ToNanoseconds() / 1e9
