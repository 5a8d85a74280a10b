"""`quire bench --offline` and `quire batch --offline`: a model in the command's own process."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from bert_models import save_bert
from quire_client.cli.app import run
from quire_offline import LLM, SamplingParams

ROOT = Path(__file__).parents[3]
SETTINGS = {"QUIRE_DTYPE": "float32", "QUIRE_NUM_THREADS": "1", "QUIRE_NUM_BLOCKS": "96", "QUIRE_SWAP_SPACE": "0"}


@pytest.fixture(autouse=True)
def settings(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in SETTINGS.items():
        monkeypatch.setenv(name, value)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "in.jsonl"


def write(path: Path, *requests: tuple[str, dict[str, Any]]) -> None:
    lines = [
        {"custom_id": f"c{number}", "method": "POST", "url": url, "body": body}
        for number, (url, body) in enumerate(requests)
    ]
    path.write_text("".join(f"{json.dumps(line)}\n" for line in lines))


def answers(path: Path) -> dict[str, dict[str, Any]]:
    """The responses of an output by custom_id, each of which is there once."""
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    found = {line["custom_id"]: line["response"] for line in lines}
    assert len(found) == len(lines)
    return found


# Batches.


def test_lines_are_answered_as_by_a_server(
    model: Path, llm: LLM, path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    greedy = {"temperature": 0, "max_tokens": 8, "ignore_eos": True}
    message = {"role": "user", "content": "hello"}
    write(
        path,
        ("/v1/completions", {"prompt": "hello", **greedy}),
        ("/v1/chat/completions", {"messages": [message], "model": llm.model, **greedy}),
        ("/v1/responses", {"input": "hello", "max_output_tokens": 8}),
        ("/v1/messages", {"model": llm.model, "messages": [message], "max_tokens": 8}),
        ("/tokenize", {"prompt": "hello"}),
        ("/v1/completions", {"prompt": "hello", "temperature": 9}),
        ("/v1/completions", {"prompt": "hello", "model": "other"}),
        ("/v1/embeddings", {"input": "hello"}),
    )
    assert run(["batch", str(path), "--offline", "-m", str(model)]) == 1

    found = answers(path.with_name("in.out.jsonl"))
    assert [found[f"c{number}"]["status_code"] for number in range(8)] == [200] * 5 + [400, 404, 400]
    params = SamplingParams(**greedy)
    assert found["c0"]["body"]["choices"][0]["text"] == llm.generate("hello", params)[0].outputs[0].text
    assert found["c1"]["body"]["choices"][0]["message"]["content"] == llm.chat([message], params)[0].outputs[0].text
    assert "temperature" in found["c5"]["body"]["error"]["message"]
    assert all(response["request_id"] for response in found.values())
    assert "8 requests, 3 errors" in capsys.readouterr().out


def test_embeddings_and_scores_are_lines_too(tmp_path: Path, path: Path) -> None:
    save_bert(tmp_path / "bert")
    write(path, ("/v1/embeddings", {"input": ["hello", "a"]}), ("/score", {"text_1": "hello", "text_2": "hello"}))
    assert run(["batch", str(path), "--offline", "-m", str(tmp_path / "bert")]) == 0
    found = answers(path.with_name("in.out.jsonl"))
    assert len(found["c0"]["body"]["data"]) == 2
    assert found["c1"]["body"]["data"][0]["score"] == pytest.approx(1)


def test_a_path_that_does_not_exist_is_refused_before_anything_is_computed(
    model: Path, path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write(path, ("/v1/completions", {"prompt": "hello"}), ("/v1/nothing", {}))
    assert run(["batch", str(path), "--offline", "-m", str(model)]) == 1
    assert "line 2: url: /v1/nothing is no path of this process that takes POST" in capsys.readouterr().err
    assert not path.with_name("in.out.jsonl").exists()


def start(*args: object) -> "subprocess.Popen[bytes]":
    """Starts the command as a process of its own."""
    paths = os.pathsep.join(str(ROOT / folder) for folder in ("", "protos", "kernels", "client"))
    command = [sys.executable, "-m", "quire_client", *map(str, args)]
    return subprocess.Popen(command, env=os.environ | {"PYTHONPATH": paths}, stderr=subprocess.PIPE)


@pytest.fixture(params=[signal.SIGKILL, signal.SIGINT])
def interrupted(request: pytest.FixtureRequest, model: Path, path: Path) -> bytes:
    """A batch whose process was ended in its middle: what the output has."""
    write(path, *(("/v1/completions", {"prompt": [5 + i], "max_tokens": 100, "ignore_eos": True}) for i in range(60)))
    output = path.with_name("in.out.jsonl")
    process = start("batch", path, "--offline", "-m", model, "-c", 3)
    limit = time.monotonic() + 120
    while not output.exists() or output.read_bytes().count(b"\n") < 5:
        assert process.poll() is None, process.stderr and process.stderr.read()
        assert time.monotonic() < limit
        time.sleep(0.01)
    process.send_signal(request.param)
    process.communicate(timeout=60)
    assert process.returncode == (-signal.SIGKILL if request.param == signal.SIGKILL else 130)
    data = output.read_bytes()
    assert 5 <= data.count(b"\n") < 60
    return data[: data.rfind(b"\n") + 1]


def test_a_batch_whose_process_was_ended_goes_on(
    interrupted: bytes, model: Path, path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["batch", str(path), "--offline", "-m", str(model), "--json"]) == 0
    output = path.with_name("in.out.jsonl")
    assert output.read_bytes().startswith(interrupted)
    assert len(answers(output)) == 60
    summary = json.loads(capsys.readouterr().out)
    assert (summary["answered_before"], summary["errors"]) == (interrupted.count(b"\n"), 0)
    # A complete one needs no model.
    assert run(["batch", str(path), "--offline", "-m", "nowhere"]) == 0


# Measurements.


def test_a_load_is_measured_by_the_definitions_of_servers(model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["bench", "--offline", "-m", str(model), "-n", "6", "-c", "3", "--mix", _mix(model), "--json"]) == 0
    result = json.loads(capsys.readouterr().out)
    assert (result["address"], result["concurrency"], result["failures"], result["num_short"]) == (
        "this process",
        3,
        {},
        0,
    )
    summary = result["summary"]
    assert (summary["num_requests"], summary["prompt_tokens"], summary["output_tokens"]) == (6, 6 * 4, 6 * 9)
    assert summary["output_tokens_per_second"] > 0
    assert summary["inter_token"]["p50"] > 0


def test_the_table_says_where(model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["bench", "--offline", "-m", str(model), "-n", "2", "--mix", _mix(model)]) == 0
    assert " in this process, 16 requests at a time" in capsys.readouterr().out


def test_outputs_that_do_not_fit_the_context_fail(model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    # Shorter ones would be measured in their place.
    mix = _mix(model, output_tokens=500)
    run(["bench", "--offline", "-m", str(model), "-n", "2", "--mix", mix, "--json"])
    ((failure, number),) = json.loads(capsys.readouterr().out)["failures"].items()
    assert ("do not fit the context" in failure, number) == (True, 2)


def _mix(model: Path, output_tokens: int = 9) -> str:
    path = model.with_name("mix.json")
    path.write_text(json.dumps({"requests": [{"prompt_token_ids": [5, 6, 7, 8], "output_tokens": output_tokens}]}))
    return str(path)


# Errors.


@pytest.mark.parametrize("command", [["bench"], ["batch", "IN"]])
@pytest.mark.parametrize(
    ("args", "text"),
    [
        (["-m", "/nowhere/at/all"], "/nowhere/at/all"),
        (["--url", "http://127.0.0.1:1"], "--url: is about a server"),
        (["--api-key", "x"], "--api-key: is about a server"),
        (["--timeout", "3"], "--timeout: is about a server"),
    ],
)
def test_what_cannot_be_used_is_named(
    command: list[str], args: list[str], text: str, path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write(path, ("/v1/completions", {"prompt": "hello"}))
    given = [str(path) if one == "IN" else one for one in command]
    assert run([*given, "--offline", *args]) != 0
    error = capsys.readouterr().err
    assert text in error.replace("'", "")
    assert error.count("\n") == 1


def test_a_model_is_named_only_for_offline(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write(path, ("/v1/completions", {"prompt": "hello"}))
    assert run(["batch", str(path), "-m", "tiny"]) == 2
    assert "is for --offline" in capsys.readouterr().err


def test_without_the_parts_of_a_server_the_error_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "quire_offline.commands", None)
    assert run(["bench", "--offline"]) == 1
    assert "pip install --editable '.[local]'" in capsys.readouterr().err
