"""`quire classify`: labels of texts with their numbers, as lines or as JSON."""

import asyncio
import json
from typing import Any

from typer.testing import CliRunner, Result

from quire_client.cli.app import app


async def invoke(*args: str) -> Result:
    return await asyncio.to_thread(CliRunner().invoke, app, ["classify", *args])


async def test_a_line_has_the_labels_by_their_numbers(address: str, service: Any) -> None:
    result = await invoke("a b", "c", "--model", "small", "--raw-scores", "--priority", "3")

    assert (result.exit_code, result.stdout) == (0, "yes 0.5000\tno 0.2500\nno 0.7500\tyes 0.5000\n")
    (request,) = service.requests
    assert ([one.text for one in request.inputs], request.model) == (["a b", "c"], "small")
    assert (request.raw_scores, request.priority) == (True, 3)


async def test_a_label_is_within_its_line_and_field(address: str, service: Any) -> None:
    service.labels = ["glück", "very\tglad\r\nindeed\u2028so"]

    assert (await invoke("x")).stdout == "very glad  indeed so 0.5000\tglück 0.2500\n"
    assert json.loads((await invoke("x", "--json")).stdout)["labels"] == service.labels
