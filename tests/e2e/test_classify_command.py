"""`quire classify` with a real model: the labels of lines as transformers has them, and errors that name a line."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer

from bert_models import CONTEXT, save_cross_encoder
from deployment import Deployment, deployment
from quire_command import quire

LABELS = ["sad", "fine", "glad"]


@pytest.fixture(scope="module")
def classifier(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    directory = tmp_path_factory.mktemp("classifier")
    return directory, save_cross_encoder(directory, id2label=dict(enumerate(LABELS)), num_labels=len(LABELS))


@pytest.fixture(scope="module")
def running(classifier: tuple[Path, Any]) -> Iterator[Deployment]:
    with deployment(model=str(classifier[0]), dtype="float32", num_threads=1) as running:
        yield running


def logits(classifier: tuple[Path, Any], text: str) -> torch.Tensor:
    directory, model = classifier
    token_ids = Tokenizer.from_file(str(directory / "tokenizer.json")).encode(text).ids
    with torch.inference_mode():
        found: torch.Tensor = model(torch.tensor([token_ids])).logits[0]
    return found


async def test_each_line_has_its_labels(running: Deployment, classifier: tuple[Path, Any]) -> None:
    lines = [" ".join("abcd"[: 1 + place % 4]) + " hello" * (place % 3) for place in range(300)]  # two calls

    code, out, err = await quire("classify", "--address", running.grpc, given="\n".join(lines))

    assert (code, err) == (0, "")
    found = [dict(part.rsplit(" ", 1) for part in line.split("\t")) for line in out.splitlines()]
    assert len(found) == len(lines)
    for line, numbers in list(zip(lines, found, strict=True))[::30]:
        expected = logits(classifier, line).softmax(0).tolist()
        assert [float(numbers[label]) for label in LABELS] == pytest.approx(expected, abs=2e-4)
        assert next(iter(numbers)) == LABELS[expected.index(max(expected))]


async def test_raw_scores_as_json(running: Deployment, classifier: tuple[Path, Any]) -> None:
    code, out, _ = await quire(
        "classify", "--address", running.grpc, "--raw-scores", "--json", "hello a", "b", given=""
    )
    answer = json.loads(out)
    assert (code, answer["labels"]) == (0, LABELS)
    for text, numbers in zip(("hello a", "b"), answer["scores"], strict=True):
        assert numbers == pytest.approx(logits(classifier, text).tolist(), abs=1e-4)


async def test_an_error_names_the_line(running: Deployment) -> None:
    lines = ["hello"] * 299 + ["hello " * 2 * CONTEXT]

    code, out, err = await quire("classify", "--address", running.grpc, given="\n".join(lines))

    assert (code, len(out.splitlines())) == (1, 256)  # those of the first call
    assert err.startswith("quire: standard input, line 300: ")
