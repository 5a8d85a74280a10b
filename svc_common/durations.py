"""Durations as messages."""

from google.protobuf.duration_pb2 import Duration


def to_duration(seconds: float) -> Duration:
    """A Duration of finite seconds."""
    message = Duration()
    message.FromNanoseconds(round(seconds * 1e9))
    return message


def to_seconds(duration: Duration) -> float:
    """The seconds of a Duration."""
    return duration.ToNanoseconds() / 1e9
