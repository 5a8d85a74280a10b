"""How a role's program is started."""

import subprocess
import sys

import pytest

from svc_common.supervisor.launch import SchedPolicy, launch_command

TELL_POLICY = [sys.executable, "-c", "import os; print(os.sched_getscheduler(0) == os.SCHED_BATCH)"]


@pytest.mark.skipif(sys.platform != "linux", reason="schedulers differ")
@pytest.mark.parametrize(("sched_policy", "is_batch"), [(SchedPolicy.NORMAL, "False"), (SchedPolicy.BATCH, "True")])
def test_patient_programs_interrupt_nobody(sched_policy: SchedPolicy, is_batch: str) -> None:
    assert subprocess.check_output(launch_command(TELL_POLICY, sched_policy), text=True).strip() == is_batch


def test_program_gets_its_arguments_as_they_are() -> None:
    echo = [sys.executable, "-c", "import sys; print(sys.argv[1:])", "", "two words", "--flag"]
    assert subprocess.check_output(launch_command(echo), text=True).strip() == "['', 'two words', '--flag']"
