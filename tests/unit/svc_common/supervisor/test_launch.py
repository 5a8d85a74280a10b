"""The start of a role's program."""

import subprocess
import sys

from svc_common.supervisor.launch import launch_command


def test_program_gets_its_arguments_as_they_are() -> None:
    echo = [sys.executable, "-c", "import sys; print(sys.argv[1:])", "", "two words", "--flag"]
    assert subprocess.check_output(launch_command(echo), text=True).strip() == "['', 'two words', '--flag']"
