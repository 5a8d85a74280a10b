"""The start of a role's program."""

import subprocess
import sys

import pytest

from svc_common.supervisor.launch import launch_command

PRINT_POLICY = [sys.executable, "-c", "import os; print(os.sched_getscheduler(0) == os.SCHED_BATCH)"]


@pytest.mark.skipif(sys.platform != "linux", reason="schedulers differ")
@pytest.mark.parametrize("is_batch", [False, True])
def test_a_program_has_the_batch_policy_where_asked_for(is_batch: bool) -> None:
    printed = subprocess.check_output(launch_command(PRINT_POLICY, is_batch=is_batch), text=True)
    assert printed.strip() == str(is_batch)


def test_program_gets_its_arguments_as_they_are() -> None:
    echo = [sys.executable, "-c", "import sys; print(sys.argv[1:])", "", "two words", "--flag"]
    assert subprocess.check_output(launch_command(echo), text=True).strip() == "['', 'two words', '--flag']"
