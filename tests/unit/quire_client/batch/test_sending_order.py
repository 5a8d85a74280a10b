"""Requests of a batch that begin alike are sent one after another."""

import json
from pathlib import Path

import pytest

from quire_client.batch.input import open_input
from quire_client.batch.sending_order import SendingOrder

SYSTEM = 600 * b"s"
FIRST, SECOND = SYSTEM + 2_000 * b"1", SYSTEM + 2_000 * b"2"


@pytest.mark.parametrize(
    ("bodies", "expected"),
    [
        ([], []),
        ([b"c", b"a", b"b", b"a"], [0, 1, 3, 2]),
        ([b"other", FIRST + b"?", SECOND + b"?", FIRST + b"!", SECOND + b"!"], [0, 1, 3, 2, 4]),
        # What begins alike for longer is together within what begins alike.
        ([FIRST + b"?", SYSTEM + b"x", FIRST + b"!", SYSTEM + b"y"], [0, 2, 1, 3]),
        ([SYSTEM + b"%d" % number for number in range(5)], [0, 1, 2, 3, 4]),
    ],
)
def test_what_begins_alike_is_together_and_the_rest_in_its_order(bodies: list[bytes], expected: list[int]) -> None:
    order = SendingOrder()
    for body in bodies:
        order.add(body)
    assert list(order.places()) == expected


def test_each_line_is_read_once_in_that_order_and_those_that_are_done_are_not(tmp_path: Path) -> None:
    document = {"one": 200 * "first ", "two": 200 * "second "}
    lines = ["\ufeff"]
    for number in range(6):
        body = {"prompt": document["one" if number % 2 else "two"] + str(number)}
        lines.append(json.dumps({"custom_id": str(number), "method": "POST", "url": "/v1/completions", "body": body}))
        lines.append("\n" * (1 + number % 3))  # blank lines, too
    (tmp_path / "in").write_text("".join(lines), encoding="utf-8")
    with open_input(str(tmp_path / "in")) as batch:
        assert [line.custom_id for line in batch.requests(lambda _: False)] == ["0", "2", "4", "1", "3", "5"]
        numbers = {line.custom_id: line.number for line in batch.requests(lambda _: False)}
        done = {numbers["2"], numbers["3"]}
        assert [line.custom_id for line in batch.requests(done.__contains__)] == ["0", "4", "1", "5"]
