"""The errors of addresses in use."""

import socket

import pytest

from svc_common.addresses import AddressInUse, CannotListen, check_can_listen, join_host_port


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
