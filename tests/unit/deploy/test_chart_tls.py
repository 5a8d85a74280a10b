"""TLS in the rendered chart: each service reads the Secret of its role, or QUIRE_INSECURE stands in its variables."""

import subprocess
from pathlib import Path

import pytest

from gateway_svc.settings import GatewaySettings
from helm_chart import (
    CHART,
    HELM,
    SETTINGS,
    VALUES,
    component,
    container,
    environment,
    everywhere,
    of_service,
    pod_specs,
    render,
    render_notes,
    settings_of,
)
from svc_common.settings import InnerSettings


def mounted_files(values: str, component: str) -> dict[str, str]:
    """The Secret at the directory of each mount."""
    volumes = {
        volume["name"]: volume["secret"] for volume in pod_specs(values)[component]["volumes"] if "secret" in volume
    }
    assert {secret["defaultMode"] for secret in volumes.values()} <= {0o440}
    mounts = [mount for mount in container(values, component)["volumeMounts"] if mount["name"] in volumes]
    assert all(mount["readOnly"] for mount in mounts)
    return {mount["mountPath"]: volumes[mount["name"]]["secretName"] for mount in mounts}


@pytest.mark.parametrize("service", SETTINGS)
def test_each_service_reads_the_certificate_of_its_role(service: str, monkeypatch: pytest.MonkeyPatch) -> None:
    settings = settings_of("tls", service, monkeypatch)
    assert isinstance(settings, InnerSettings)
    assert not settings.insecure
    files = mounted_files("tls", service)
    paths = [path for path in settings.mtls_files.values() if path is not None]
    assert [files[str(path.parent)] for path in paths] == [f"of-{service}s"] * 3
    assert [path.name for path in paths] == ["tls.crt", "tls.key", "ca.crt"]


def test_gateways_read_the_certificate_for_clients(monkeypatch: pytest.MonkeyPatch) -> None:
    settings = settings_of("tls", "gateway", monkeypatch)
    assert isinstance(settings, GatewaySettings)
    assert settings.tls_cert_file is not None
    assert settings.tls_key_file is not None
    assert mounted_files("tls", "gateway")[str(settings.tls_cert_file.parent)] == "of-clients"
    assert settings.tls_key_file.parent == settings.tls_cert_file.parent
    (probe,) = pod_specs("tls")["test"]["containers"]
    assert probe["command"][-1].startswith("https://")


def test_a_secret_that_is_set_to_null_is_none(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setitem(VALUES, "cleared", {"gateway": {"tls": {"existingSecret": None}}})
    gateway = container("cleared", "gateway")
    schemes = {gateway[f"{kind}Probe"]["httpGet"]["scheme"] for kind in ("startup", "liveness", "readiness")}
    assert schemes == {"HTTP"}
    (probe,) = pod_specs("cleared")["test"]["containers"]
    assert probe["command"][-1].startswith("http://")
    assert "https://" not in render_notes("cleared", tmp_path)


def test_ports_have_the_protocols_that_they_serve() -> None:
    def protocols(values: str) -> dict[str, list[str | None]]:
        services = [one for one in render(values) if one["kind"] == "Service"]
        ports = {component(one): one["spec"]["ports"] for one in services}
        return {name: [port.get("appProtocol") for port in ports[name]] for name in ("gateway", "scheduler", "worker")}

    assert protocols("default") == {"gateway": ["http", "grpc"], "scheduler": ["grpc"], "worker": ["grpc"]}
    assert protocols("tls") == {"gateway": ["https", None], "scheduler": [None], "worker": [None]}


@everywhere
def test_without_certificates_it_is_visible_that_nobody_is_checked(values: str, tmp_path: Path) -> None:
    notes = render_notes(values, tmp_path)
    assert ("do not check who calls them" in notes) == (values != "tls")
    assert ("Clients connect without TLS" in notes) == (values != "tls")
    for service in SETTINGS:
        for name in of_service(values, service):
            variables = environment(values, name)
            assert variables.get("QUIRE_INSECURE") == (None if values == "tls" else "1")
            assert ("QUIRE_MTLS_CERT_FILE" in variables) == (values == "tls")


def test_the_default_requires_certificates() -> None:
    done = subprocess.run([HELM, "template", "test", str(CHART)], capture_output=True, text=True, check=False)
    assert done.returncode != 0
    assert "insecure is false: set mtls.secrets.gateway" in done.stderr
