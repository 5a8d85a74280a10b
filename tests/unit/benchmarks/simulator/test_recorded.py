"""Recordings: what is written can be replayed, and errors name their line."""

from pathlib import Path

import pytest

from benchmarks.simulator.arrivals import Arrival, Prefix
from benchmarks.simulator.recorded import RecordingError, read_recording, write_recording

ARRIVALS = [
    Arrival(0.0, 3, 4, 4),
    Arrival(0.5, 200, 6, 9, "b", 2.0, 1, Prefix("system", 100), None, 30.0, 4),
    Arrival(0.5, 2, 1, 1, prompt=(7, 8)),
]


def read(text: str, folder: Path) -> list[Arrival]:
    path = folder / "recording.jsonl"
    path.write_text(text)
    return list(read_recording(path))


def test_what_is_written_is_read(tmp_path: Path) -> None:
    path = tmp_path / "recording.jsonl"
    assert write_recording(path, ARRIVALS) == 3
    assert list(read_recording(path)) == ARRIVALS


def test_most_of_a_line_may_be_left_out(tmp_path: Path) -> None:
    text = '{"at": 1, "output_tokens": 4, "prompt_tokens": 3}\n{"at": 2, "output_tokens": 1, "prompt": [5, 6]}\n'
    assert read(text, tmp_path) == [Arrival(1.0, 3, 4, 4), Arrival(2.0, 2, 1, 1, prompt=(5, 6))]


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        ('{"at": 3, "prompt_tokens": 3}', "output_tokens is missing"),
        ('{"at": 3, "output_tokens": 1}', "prompt_tokens"),
        ('{"at": 1, "output_tokens": 1, "prompt_tokens": 1}', "arrives before the line above"),
        ('{"at": 3, "output_tokens": 1.5, "prompt_tokens": 1}', "output_tokens must be a whole number"),
        ('{"at": 3, "output_tokens": 0, "prompt_tokens": 1}', "output_tokens"),
        ('{"at": 3, "output_tokens": 9, "prompt_tokens": 1, "max_tokens": 8}', "max_tokens"),
        ('{"at": 3, "output_tokens": 1, "prompt": []}', "a prompt"),
        ('{"at": 3, "output_tokens": 1, "prompt_tokens": 1, "weight": 0}', "a weight"),
        ('{"at": 3, "output_tokens": 1, "prompt_tokens": 1, "n": 0}', "n and a weight above 0"),
        ('{"at": 3, "output_tokens": 1, "prompt_tokens": 1, "owner": "me"}', "does not know owner"),
        (
            '{"at": 3, "output_tokens": 1, "prompt_tokens": 1, "prefix": {"name": "a", "num_tokens": 2}}',
            "a prefix longer than its prompt",
        ),
        ("{", "line 2"),
    ],
)
def test_a_wrong_line_is_named(line: str, reason: str, tmp_path: Path) -> None:
    with pytest.raises(RecordingError, match=rf"line 2: .*{reason}" if line != "{" else "line 2"):
        read(f'{{"at": 2, "output_tokens": 1, "prompt_tokens": 1}}\n{line}\n', tmp_path)


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(RecordingError, match=r"nowhere: no such file"):
        list(read_recording(tmp_path / "nowhere"))
