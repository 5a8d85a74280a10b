"""The command line of the doctor, and its report as text."""

import subprocess
import sys

import pytest

from svc_common.doctor.__main__ import DoctorOptions, UsageError, line_of, summary
from svc_common.doctor.findings import Finding, Status, ok, warning, wrong
from svc_common.doctor.groups import ROLES, installed_roles


def test_a_model_and_flags_of_quire_serve_set_variables() -> None:
    options = DoctorOptions.parse(["--json", "some/model", "--port", "8100", "--role", "gateway", "--role=worker"])
    assert (options.roles, options.as_json) == (("gateway", "worker"), True)
    assert options.variables() == {"QUIRE_MODEL": "some/model", "QUIRE_HTTP_PORT": "8100"}
    assert DoctorOptions.parse(["some/model"]).variables() == {"QUIRE_MODEL": "some/model"}


def test_keys_among_the_flags_are_neither_written_nor_kept() -> None:
    assert DoctorOptions.parse(["--api-key", "a-key-that-nobody-sees"]).variables() == {}


@pytest.mark.parametrize("arguments", [["--role", "gardener"], ["--role"], ["--no-such-flag"], ["a", "b"]])
def test_a_command_line_that_cannot_be_used_is_refused(arguments: list[str]) -> None:
    with pytest.raises(UsageError):
        DoctorOptions.parse(arguments).variables()


def test_a_finding_is_one_line_with_what_to_do() -> None:
    finding = wrong("127.0.0.1:1 is held by a (process 2)", "the port is in use", "set\nanother")
    finding = Finding.from_json({**finding.to_json(), "role": "gateway", "check": "ports"})
    line = "wrong    gateway: ports: 127.0.0.1:1 is held by a (process 2): the port is in use → set another"
    assert line_of(finding) == line
    assert summary([ok("a"), ok("b"), warning("c", "d", "e")]) == "2 ok, 1 warning, 0 wrong"


def test_a_finding_survives_json() -> None:
    finding = Finding(Status.SKIPPED, "", "nothing", role="worker", check="model")
    assert Finding.from_json(finding.to_json()) == finding


def test_the_program_starts_with_the_standard_library_alone() -> None:
    """It reports packages that are missing, so it must not need them."""
    program = "import sys; import svc_common.doctor.__main__; print(*sys.modules)"
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert not {"grpc", "pydantic", "google.protobuf", "redis", "torch"} & set(ended.stdout.split())


def test_all_roles_are_installed_in_a_clone() -> None:
    assert installed_roles() == ROLES
