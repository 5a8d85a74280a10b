"""Files of streams."""

import json
from pathlib import Path

import pytest

from benchmarks.simulator.streams_file import StreamsError, read_streams
from benchmarks.simulator.synthetic import ArrivalProcess, ArrivalStream, Lengths, Prefixes


def test_a_stream_is_read_with_all_that_it_can_say(tmp_path: Path) -> None:
    path = tmp_path / "streams.json"
    entry = {
        "tenant": "b",
        "rate": 5,
        "prompt": [16, 64],
        "output": [64, 64],
        "process": "bursts",
        "burst": 8,
        "weight": 2,
        "priorities": {"0": 0.9, "2": 0.1},
        "sequences": {"1": 0.8, "4": 0.2},
        "deadline": 30,
        "max_tokens": 100,
        "prefixes": {"count": 4, "num_tokens": 512, "share": 0.5},
    }
    path.write_text(json.dumps([entry, {"rate": 1, "prompt": [1, 2], "output": [3, 4]}]))
    assert read_streams(path) == [
        ArrivalStream(
            *(5.0, Lengths(16, 64), Lengths(64, 64), "b", 2.0, ArrivalProcess.BURSTS, 8, ((0, 0.9), (2, 0.1))),
            prefixes=Prefixes(4, 512, 0.5),
            deadline=30.0,
            sequences=((1, 0.8), (4, 0.2)),
            max_tokens=100,
        ),
        ArrivalStream(1.0, Lengths(1, 2), Lengths(3, 4)),
    ]


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("[]", "holds no streams"),
        ("{", "wrong.json"),
        ("[3]", "wrong.json"),
        ('[{"rate": 1, "prompt": [1, 2]}]', "output"),
        ('[{"rate": 1, "prompt": [1, 2], "output": [1, 2], "load": 2}]', "does not know load"),
        ('[{"rate": 1, "prompt": [1, 2], "output": [1, 2], "process": "now"}]', "now"),
    ],
)
def test_errors_name_the_reason(text: str, reason: str, tmp_path: Path) -> None:
    path = tmp_path / "wrong.json"
    path.write_text(text)
    with pytest.raises(StreamsError, match=reason):
        read_streams(path)
