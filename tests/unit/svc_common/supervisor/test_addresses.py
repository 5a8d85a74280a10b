"""Ports of many roles, and conflicts with the variable that solves them."""

import socket
from pathlib import Path

import pytest
from pydantic import ValidationError

from svc_common.addresses import AddressInUse, CannotListen
from svc_common.supervisor import addresses
from svc_common.supervisor.addresses import Addresses, FreePorts, ListenAddress, assign, free_port
from svc_common.supervisor.settings import SupervisorSettings


def settings(**values: object) -> SupervisorSettings:
    ports = ("http", "grpc", "scheduler", "scheduler_admin", "scheduler_metrics", "worker", "worker_metrics")
    return SupervisorSettings.model_validate({f"{name}_port": 0 for name in ports} | values)


def assigned(chosen: SupervisorSettings) -> Addresses:
    with FreePorts() as free_ports:
        return assign(chosen, chosen.model_settings(), free_ports)


def test_the_ports_of_several_follow_each_other() -> None:
    ports = {"http_port": 8000, "grpc_port": 50051, "worker_port": 50053, "scheduler_metrics_port": 9101}
    addresses = assigned(settings(gateways=2, schedulers=2, workers=3, **ports))
    assert [listener.dial_address for listener in addresses.http] == ["127.0.0.1:8000", "127.0.0.1:8001"]
    assert [listener.port for listener in addresses.grpc] == [50051, 50052]
    assert [listener.port for listener in addresses.workers] == [50053, 50054, 50055]
    assert [listener.port for listener in addresses.scheduler_metrics] == [9101, 9102]
    assert addresses.gateway_metrics == []
    addresses = assigned(settings(gateways=2, gateway_metrics_port=9121))
    assert [listener.port for listener in addresses.gateway_metrics] == [9121, 9122]


def test_port_zero_takes_a_free_one_for_each() -> None:
    addresses = assigned(settings(gateways=2, schedulers=2, workers=2))
    assert len({listener.port for listener in addresses.ports}) == 14
    addresses.check()


def test_no_free_port_is_taken_twice() -> None:
    for _ in range(5):
        addresses = assigned(settings(gateways=64, schedulers=8, workers=64))
        assert len({listener.port for listener in addresses.ports}) == 280


def test_no_free_port_is_one_that_the_settings_give_to_a_role(monkeypatch: pytest.MonkeyPatch) -> None:
    port = free_port()
    monkeypatch.setattr(addresses, "_FIRST_PORT", port)
    monkeypatch.setattr(addresses, "_first_outgoing_port", lambda: port + 1)  # so that it is the first one to be tried
    assigned(settings(worker_metrics_port=port)).check()


def test_a_taken_port_is_kept_for_the_role_that_listens_there() -> None:
    with FreePorts() as free_ports:
        address = ("127.0.0.1", free_ports.take())
        with socket.socket() as other, pytest.raises(OSError, match="in use"):
            other.bind(address)
        for _ in range(2):  # a role, and its restart
            with socket.create_server(address, reuse_port=False), socket.create_connection(address):
                pass
    with socket.create_server(address):
        pass


def test_only_gateways_listen_on_the_configured_host() -> None:
    addresses = assigned(settings(host="0.0.0.0"))
    public = {listener for listener in addresses.ports if listener.variable in ("QUIRE_HTTP_PORT", "QUIRE_GRPC_PORT")}
    assert [listener.host for listener in public] == ["0.0.0.0"] * 2
    assert {listener.host for listener in set(addresses.ports) - public} == {"127.0.0.1"}
    assert addresses.grpc[0].dial_address == f"127.0.0.1:{addresses.grpc[0].port}"


def test_an_ipv6_address_is_reached_in_brackets() -> None:
    assert ListenAddress("::", 8000, "QUIRE_HTTP_PORT").dial_address == "[::1]:8000"


def test_the_error_of_a_port_in_use_names_its_variable() -> None:
    with socket.create_server(("127.0.0.1", 0)) as holder:
        port = holder.getsockname()[1]
        addresses = assigned(settings(worker_metrics_port=port))
        advice = f"^127.0.0.1:{port} is already in use .* set QUIRE_WORKER_METRICS_PORT to another port$"
        with pytest.raises(AddressInUse, match=advice):
            addresses.check()


def test_several_of_each_fit_beside_each_other_by_default() -> None:
    settings = SupervisorSettings.model_validate({"gateways": 3, "schedulers": 3, "workers": 3})
    ports = [listener.port for listener in assigned(settings).ports]
    assert len(set(ports)) == len(ports)


def test_the_error_of_two_roles_on_one_port_names_both_variables() -> None:
    addresses = assigned(settings(gateways=2, grpc_port=50051, scheduler_port=50052))
    with pytest.raises(CannotListen, match="QUIRE_GRPC_PORT and QUIRE_SCHEDULER_PORT both come to port 50052"):
        addresses.check()


def test_the_port_of_the_last_of_several_is_none_above_the_highest() -> None:
    with pytest.raises(CannotListen, match=r"65536: the highest port is 65535 \(QUIRE_HTTP_PORT, QUIRE_HOST\)"):
        assigned(settings(gateways=2, http_port=65535)).check()


def test_a_host_of_another_machine_is_an_error() -> None:
    with pytest.raises(CannotListen, match="QUIRE_HOST"):
        assigned(settings(host="192.0.2.1")).check()


def test_no_connection_of_another_process_takes_a_chosen_port() -> None:
    first_outgoing = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    if first_outgoing <= 20_000:
        pytest.skip("this system gives almost all ports to outgoing connections")
    assert all(listener.port < first_outgoing for listener in assigned(settings(gateways=8)).ports)


def test_a_unix_socket_takes_the_place_of_the_http_port(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    addresses = assigned(settings(uds="quire.sock", http_port=8000))
    assert [one.dial_address for one in addresses.http] == [f"unix:{tmp_path}/quire.sock"]
    assert addresses.to_json()["http"] == [f"unix:{tmp_path}/quire.sock"]
    assert "QUIRE_HTTP_PORT" not in {listener.variable for listener in addresses.ports}
    addresses.check()
    (tmp_path / "quire.sock").touch()
    with pytest.raises(CannotListen, match=r"^QUIRE_UDS: cannot listen at .*quire\.sock: there is something else"):
        addresses.check()


def test_a_unix_socket_is_for_one_gateway() -> None:
    with pytest.raises(ValidationError, match="is for one gateway, and QUIRE_GATEWAYS is more"):
        settings(uds="quire.sock", gateways=2)
