"""The errors of addresses in use."""

import socket
from pathlib import Path

import pytest

from svc_common.addresses import AddressInUse, CannotListen, check_can_listen, check_unix_socket, join_host_port


def test_a_taken_port_is_named() -> None:
    with socket.create_server(("127.0.0.1", 0)) as holder:
        port = holder.getsockname()[1]
        with pytest.raises(AddressInUse, match=f"^127.0.0.1:{port} is already in use by another process$"):
            check_can_listen("127.0.0.1", port)
    check_can_listen("127.0.0.1", port)


def test_an_address_of_another_machine_is_not_called_in_use() -> None:
    with pytest.raises(CannotListen, match=r"^cannot listen on 192\.0\.2\.1:8000: cannot assign") as raised:
        check_can_listen("192.0.2.1", 8000)
    assert not isinstance(raised.value, AddressInUse)


def test_ipv6_addresses_are_bracketed() -> None:
    assert join_host_port("::1", 8000) == "[::1]:8000"
    assert join_host_port("127.0.0.1", 8000) == "127.0.0.1:8000"


def test_a_path_is_free_where_nobody_listens(tmp_path: Path) -> None:
    path = tmp_path / "s"
    check_unix_socket(path)
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(path))
        listener.listen()
        with pytest.raises(AddressInUse, match=f"^{path} is already in use by another process$"):
            check_unix_socket(path)
    check_unix_socket(path)
    assert path.is_socket()


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("file", "there is something else than a socket"),
        ("no/s", "there is no such directory"),
        ("s" * 99, "107 bytes"),
    ],
)
def test_a_path_that_can_be_no_socket_is_refused_with_the_reason(name: str, why: str, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(CannotListen, match=f"^cannot listen at {tmp_path / name}: .*{why}") as raised:
        check_unix_socket(tmp_path / name)
    assert not isinstance(raised.value, AddressInUse)
