"""What commands read: files and standard input with other bytes than text, and streams that the caller has closed."""

import asyncio
import os
import sys
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from quire_client.cli.app import app

ROOT = Path(__file__).parents[4]
ENVIRONMENT = {**os.environ, "PYTHONPATH": os.pathsep.join(str(ROOT / path) for path in ("protos", "client"))}


async def invoke(*args: str, given: bytes | None = None) -> Result:
    """Runs a command in this process."""
    return await asyncio.to_thread(CliRunner().invoke, app, args, given)


async def with_streams(redirection: str, *args: str) -> tuple[int | None, str]:
    """Runs `quire` under a shell's redirection. Returns its exit code and its standard error."""
    process = await asyncio.create_subprocess_exec(
        *("sh", "-c", f'exec "$0" -m quire_client "$@" {redirection}', sys.executable, *args),
        env=ENVIRONMENT,
        stderr=asyncio.subprocess.PIPE,
    )
    _, err = await asyncio.wait_for(process.communicate(), 60)
    return process.returncode, err.decode()


@pytest.mark.parametrize("option", ["--json-schema", "--grammar"])
async def test_a_file_that_is_not_text_is_refused_by_name(
    option: str, address: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("file").write_bytes(b"\xff\xfe")
    result = await invoke("generate", "x", option, "file")
    assert result.exit_code == 2
    assert "file is not text in UTF-8" in result.stderr


async def test_the_mark_at_the_beginning_of_a_file_is_no_part_of_its_text(
    address: str, service: Any, tmp_path: Path
) -> None:
    file = tmp_path / "file"
    file.write_bytes(b"\xef\xbb\xbfone\r\ntwo\r\n")
    assert (await invoke("embed", "--file", str(file))).exit_code == 0
    assert [one.text for one in service.requests[0].inputs] == ["one", "two"]

    service.answer("a")
    assert (await invoke("generate", "-", given=b"\xef\xbb\xbfone\n")).exit_code == 0
    assert service.requests[1].generation.text == "one"


async def test_an_argument_that_is_not_text_is_refused(address: str) -> None:
    result = await invoke("generate", os.fsdecode(b"a\xff"))
    assert result.exit_code == 1
    assert "generation.text: is not text in UTF-8" in str(result.exception)


@pytest.mark.parametrize("seconds", ["0", "-1"])
async def test_a_timeout_is_above_zero(seconds: str, address: str) -> None:
    result = await invoke("generate", "x", f"--timeout={seconds}")
    assert result.exit_code == 2
    assert "must be above 0" in result.stderr


async def test_closed_standard_input_is_empty(address: str) -> None:
    code, err = await with_streams("<&-", "chat", "--address", address)
    assert (code, err) == (0, "")


@pytest.mark.parametrize("redirection", [">&-", ">&- <&-"])
async def test_closed_standard_output_gets_nothing(redirection: str, address: str, service: Any) -> None:
    service.answer("a")
    code, err = await with_streams(redirection, "generate", "x", "--address", address)
    assert (code, err) == (0, "")


_INTERRUPTED_IMPORT = """
import sys
class Interrupt:
    def find_spec(self, name, *_):
        if name == sys.argv[1]:
            raise KeyboardInterrupt
sys.meta_path.insert(0, Interrupt())
from quire_client.cli import main
main()
"""


@pytest.mark.parametrize("module", ["typer", "grpc", "quire_client.cli.app"])
async def test_ctrl_c_before_the_command_line_is_read_has_no_trace(module: str) -> None:
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-c", _INTERRUPTED_IMPORT, module), env=ENVIRONMENT, stderr=asyncio.subprocess.PIPE
    )
    _, err = await asyncio.wait_for(process.communicate(), 60)
    assert (process.returncode, err) == (130, b"")
