"""The errors of addresses in use."""

import re
import socket
from pathlib import Path

import pytest

from svc_common.addresses import (
    AddressInUse,
    CannotListen,
    HostPort,
    check_can_listen,
    check_unix_socket,
    join_host_port,
)


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


def test_no_port_is_above_the_highest() -> None:
    with pytest.raises(CannotListen, match=r"^cannot listen on 127\.0\.0\.1:65536: the highest port is 65535$"):
        check_can_listen("127.0.0.1", 65536)


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


@pytest.mark.parametrize(
    ("text", "host", "port"),
    [("a.b_c:1", "a.b_c", 1), (" 127.0.0.1:65535 ", "127.0.0.1", 65535), ("[::1]:2", "::1", 2)],
)
def test_an_address_to_connect_to_is_a_host_and_a_port(text: str, host: str, port: int) -> None:
    address = HostPort.parse(text)
    assert address == HostPort(host, port)
    assert HostPort.parse(str(address)) == address


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("a", "is not host:port"),
        (":1", "is not host:port"),
        ("a b:1", "is not host:port"),
        ("::1:2", "an IPv6 address is in brackets"),
        ("[a]:1", "an IPv6 address is in brackets"),
        ("a:", "not a number from 1 to 65535"),
        ("a:0", "not a number from 1 to 65535"),
        ("a:99999", "not a number from 1 to 65535"),
        ("a:-1", "not a number from 1 to 65535"),
        ("a:" + "9" * 5000, "not a number from 1 to 65535"),
        ("a..b:1", "a..b is not a host"),
        ("a" * 64 + ":1", "is not a host"),
    ],
)
def test_what_is_no_address_to_connect_to_is_refused(text: str, why: str) -> None:
    with pytest.raises(ValueError, match=re.escape(why)):
        HostPort.parse(text)


def test_nothing_listens_on_a_host_that_no_resolver_takes() -> None:
    with pytest.raises(CannotListen, match=r"^cannot listen on a\.\.b:1: a\.\.b is not a host$"):
        check_can_listen("a..b", 1)
