"""`quire completion`: what a shell that has read the script offers at the next key."""

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from typer.testing import CliRunner

from quire_client.cli.app import app, run
from svc_common.supervisor.vllm_flag_table import SERVED
from tools import tool

BASH = """
source "$1"; shift
COMP_WORDS=("$@") COMP_CWORD=$(($# - 1))
function=$(complete -p quire | sed 's/.* -F \\([^ ]*\\) .*/\\1/')
$function 2>/dev/null  # compopt, which works in a completion only
printf '%s\\n' "${COMPREPLY[@]}"
"""
FISH = 'source $argv[1]; complete -C "$argv[2..-1]"'
ZSH = 'autoload -Uz compinit; compinit -D -u; eval "$(<$1)"; print $_comps[quire]'

Offers = Callable[..., set[str]]


def script_of(shell: str, directory: Path) -> Path:
    result = CliRunner().invoke(app, ["completion", shell])
    assert result.exit_code == 0, result.output
    path = directory / f"quire.{shell}"
    path.write_text(result.stdout)
    return path


def lines_of(*command: str | Path) -> list[str]:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    return done.stdout.splitlines()


@pytest.fixture(scope="module", params=["bash", "fish"])
def offers(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Offers:
    """What a shell offers for the last word of a command line."""
    shell = request.param
    tool(shell)
    script = script_of(shell, tmp_path_factory.mktemp("completion"))
    program = BASH if shell == "bash" else FISH

    def offers(*words: str) -> set[str]:
        own = ("bash",) if shell == "bash" else ()  # $0
        lines = lines_of(shell, "-c", program, *own, script, "quire", *words)
        return {line.partition("\t")[0] for line in lines if line}

    return offers


def test_commands_are_offered(offers: Offers) -> None:
    assert offers("re") == {"resume", "reset-prefix-cache"}
    commands = {command.name or command.callback.__name__.replace("_", "-") for command in app.registered_commands}  # type: ignore[union-attr]
    assert {"run", "serve", "chat", "embed", "batch", "doctor", "completion"} <= commands == offers("")


def test_flags_of_a_command_are_offered_and_no_others(offers: Offers) -> None:
    assert offers("generate", "--pre") == {"--presence-penalty"}
    assert offers("embed", "--d") == {"--dimensions"}
    assert offers("chat", "hello", "--js") == {"--json"}
    assert offers("models", "--temp") == set()


def test_values_are_offered(offers: Offers) -> None:
    assert offers("models", "--output", "") == {"text", "json"}
    assert offers("models", "-o", "j") == {"json"}
    assert offers("generate", "Hi", "--early-stopping", "n") == {"never"}
    assert offers("profile", "st") == {"start", "stop"}
    assert offers("completion", "") == {"bash", "zsh", "fish"}


def test_files_are_offered_where_a_path_is_expected(offers: Offers, tmp_path: Path) -> None:
    (tmp_path / "requests.jsonl").touch()
    for words in (("batch",), ("embed", "--file"), ("serve",)):
        assert offers(*words, f"{tmp_path}/req") == {f"{tmp_path}/requests.jsonl"}


@pytest.mark.parametrize("command", ["run", "serve", "doctor"])
def test_flags_that_are_passed_on_are_offered_with_their_values(offers: Offers, command: str) -> None:
    assert {flag.name for flag in SERVED} | {"--gateways", "--redis-url"} <= offers(command, "--")
    assert offers(command, "--dt") == {"--dtype"}
    assert offers(command, "model", "--dtype", "fl") == {"float", "float16", "float32"}
    assert offers(command, "--scheduling-policy", "") == {"fcfs", "priority", "fair"}
    # The flag of the chat, not vLLM's of that name.
    assert ("--temperature" in offers(command, "--t")) == (command == "run")


def test_the_flags_of_doctor_are_its_own_too(offers: Offers) -> None:
    assert offers("doctor", "--role", "") == {"gateway", "scheduler", "worker"}


def test_zsh_reads_its_script(tmp_path: Path) -> None:
    tool("zsh")
    assert lines_of("zsh", "-f", "-c", ZSH, "zsh", script_of("zsh", tmp_path)) == ["_shtab_quire"]


def test_each_script_has_all_commands_and_flags_of_services(tmp_path: Path) -> None:
    for shell in ("bash", "zsh", "fish"):
        text = script_of(shell, tmp_path).read_text()
        assert all(word in text for word in ("reset-prefix-cache", "presence-penalty", "max-num-batched-tokens"))


def test_without_the_services_commands_have_their_own_flags(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    text = CliRunner().invoke(app, ["completion", "bash"]).stdout
    assert "--temperature" in text
    assert "--max-num-batched-tokens" not in text


def test_without_shtab_only_this_command_fails() -> None:
    program = "import sys; sys.modules['shtab'] = None; from quire_client.cli import main; main()"
    command = (sys.executable, "-c", program)
    done = subprocess.run((*command, "completion", "bash"), capture_output=True, text=True, check=False)
    expected = "quire: the command line needs more packages: pip install typer rich aiohttp shtab\n"
    assert (done.returncode, done.stdout, done.stderr) == (1, "", expected)
    assert lines_of(*command, "--version")


def test_an_unknown_shell_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["completion", "tcsh"]) == 2
    assert "'bash', 'zsh', 'fish'" in capsys.readouterr().err
