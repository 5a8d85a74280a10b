"""Parsing of durations."""

import math

import pytest
from google.protobuf.duration_pb2 import Duration

from svc_common.durations import to_duration, to_seconds


@pytest.mark.parametrize(
    ("seconds", "expected"),
    [
        (0, Duration()),
        (7.25, Duration(seconds=7, nanos=250_000_000)),
        (1e-9, Duration(nanos=1)),
        (-1.5, Duration(seconds=-1, nanos=-500_000_000)),
    ],
)
def test_seconds_and_messages_turn_into_each_other(seconds: float, expected: Duration) -> None:
    assert to_duration(seconds) == expected
    assert to_seconds(expected) == seconds


def test_for_ever_is_no_duration() -> None:
    with pytest.raises(OverflowError):
        to_duration(math.inf)
