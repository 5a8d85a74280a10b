"""`quire embed` with a real model: vectors of lines as sentence-transformers has them, and errors that name a line."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from tokenizers import Tokenizer
from torch.nn.functional import normalize
from transformers import BertModel

from bert_models import CONTEXT, hidden_states, save_bert
from deployment import Deployment, deployment
from quire_command import quire


@pytest.fixture(scope="module")
def bert(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, BertModel]:
    directory = tmp_path_factory.mktemp("bert")
    return directory, save_bert(directory)


@pytest.fixture(scope="module")
def running(bert: tuple[Path, BertModel]) -> Iterator[Deployment]:
    with deployment(model=str(bert[0]), dtype="float32", num_threads=1) as running:
        yield running


async def test_each_line_has_its_vector(running: Deployment, bert: tuple[Path, BertModel]) -> None:
    directory, model = bert
    tokenizer = Tokenizer.from_file(str(directory / "tokenizer.json"))
    lines = [" ".join("abcd"[: 1 + place % 4]) + " hello" * (place % 3) for place in range(300)]  # two calls

    code, out, err = await quire("embed", "--address", running.grpc, given="\n".join(lines))

    assert (code, err) == (0, "")
    vectors = [[float(number) for number in line.split(" ")] for line in out.splitlines()]
    assert len(vectors) == len(lines)
    for line, vector in list(zip(lines, vectors, strict=True))[::30]:
        expected = normalize(hidden_states(model, tokenizer.encode(line).ids).mean(0), dim=0).tolist()
        assert vector == pytest.approx(expected, abs=1e-4)


async def test_an_error_names_the_line(running: Deployment) -> None:
    lines = ["hello"] * 299 + ["hello " * 2 * CONTEXT]

    code, out, err = await quire("embed", "--address", running.grpc, given="\n".join(lines))

    assert (code, len(out.splitlines())) == (1, 256)  # those of the first call
    assert err.startswith("quire: standard input, line 300: ")


async def test_an_error_names_the_field(running: Deployment) -> None:
    code, out, err = await quire("embed", "--address", running.grpc, "hello", "--dimensions", "999999")
    assert (code, out) == (1, "")
    assert err.startswith("quire: dimensions: ")


async def test_an_empty_line_is_refused(running: Deployment) -> None:
    code, _, err = await quire("embed", "--address", running.grpc, given="a\n\nb\n")
    assert code == 1
    assert err == "quire: standard input, line 2: must not be empty\n"
