"""Checks of ports, with real listeners."""

import os
import socket
from pathlib import Path

import pytest

from ports import lasting_port
from svc_common.doctor.findings import Status
from svc_common.doctor.ports import check_ports, check_socket_path, holder_of


def test_a_held_port_is_named_with_its_process_and_its_variable() -> None:
    free = lasting_port()
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        held, fine = check_ports([("127.0.0.1", port, "QUIRE_HTTP_PORT"), ("127.0.0.1", free, "QUIRE_GRPC_PORT")])
    name = Path("/proc/self/comm").read_text().strip()
    assert (held.status, held.found) == (Status.WRONG, f"127.0.0.1:{port} is held by {name} (process {os.getpid()})")
    assert "QUIRE_HTTP_PORT" in held.next_step
    assert (fine.status, fine.found) == (Status.OK, f"free: 127.0.0.1:{free}")


def test_two_settings_with_one_port_are_wrong() -> None:
    port = lasting_port()
    first, _ = check_ports([("127.0.0.1", port, "QUIRE_HTTP_PORT"), ("127.0.0.1", port, "QUIRE_GRPC_PORT")])
    assert first.problem == f"QUIRE_HTTP_PORT and QUIRE_GRPC_PORT both come to port {port}"


@pytest.mark.parametrize(
    ("first", "second", "status"),
    [
        ("127.0.0.1", "127.0.0.2", Status.OK),
        ("127.0.0.1", "localhost", Status.WRONG),
        ("0.0.0.0", "127.0.0.2", Status.WRONG),
        ("127.0.0.1", "::", Status.WRONG),
    ],
)
def test_one_port_at_two_addresses_is_right_unless_one_stands_for_all(first: str, second: str, status: Status) -> None:
    port = lasting_port()
    findings = list(check_ports([(first, port, "QUIRE_SCHEDULER_PORT"), (second, port, "QUIRE_SCHEDULER_ADMIN_PORT")]))
    assert findings[0].status is status
    assert (f"both come to port {port}" in findings[0].problem) is (status is Status.WRONG)


def test_an_address_of_another_machine_is_wrong() -> None:
    (finding,) = check_ports([("192.0.2.1", lasting_port(), "QUIRE_HTTP_PORT")])
    assert (finding.status, "QUIRE_HOST" in finding.next_step) == (Status.WRONG, True)


def test_nobody_holds_a_free_port() -> None:
    assert holder_of(lasting_port()) is None
    (finding,) = check_ports([("127.0.0.1", 0, "QUIRE_HTTP_PORT")])
    assert finding.found == "all ports are chosen at start"


def test_the_path_of_a_unix_socket_is_free_or_wrong(tmp_path: Path) -> None:
    path = tmp_path / "s"
    (free,) = check_socket_path(path)
    assert (free.status, free.found) == (Status.OK, f"free: {path}")
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(path))
        listener.listen()
        (held,) = check_socket_path(path)
    assert held.problem == "QUIRE_UDS: another process listens there"
    (other,) = check_socket_path(tmp_path / "no" / "s")
    assert "there is no such directory" in other.problem
