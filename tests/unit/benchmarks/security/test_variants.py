"""Key files that gateways accept, and roles with their certificates."""

import dataclasses
from pathlib import Path

import pytest

from benchmarks.security.supervisor import with_certificate
from benchmarks.security.variants import LIMITS, NUM_TENANTS, Part, api_key, key_file, make_variants
from gateway_svc.key_file import digest_of, read_key_file
from gateway_svc.key_tables import ALLOWANCE_FIELDS
from svc_common.supervisor.addresses import FreePorts, assign
from svc_common.supervisor.roles import service_roles
from svc_common.supervisor.settings import SupervisorSettings


def test_the_limits_are_all_that_a_key_may_have() -> None:
    assert {*LIMITS, "models", "weight"} == {*ALLOWANCE_FIELDS, "expires"}


@pytest.mark.parametrize("has_limits", [False, True])
def test_each_tenant_has_a_key(has_limits: bool, tmp_path: Path) -> None:
    path = tmp_path / "keys.toml"
    path.write_text(key_file("tiny", has_limits=has_limits))
    keys = read_key_file(path).keys
    assert [key.digest for key in keys] == [digest_of(api_key(tenant)) for tenant in range(NUM_TENANTS)]
    assert len({key.tenant.name for key in keys}) == NUM_TENANTS
    for key in keys:
        assert key.tenant.limits is not None
        limits = dataclasses.asdict(key.tenant.limits)
        assert all((limits[name] is not None) == has_limits for name in LIMITS if name in limits)
        assert (key.expires is not None) == (key.tenant.models is not None) == has_limits


def test_one_variant_has_the_parts_and_one_has_none() -> None:
    without, with_parts = make_variants([Part.TLS])
    assert (without.parts, with_parts.parts) == (frozenset(), frozenset({Part.TLS}))
    assert (without.title, with_parts.title) == ("without TLS", "with TLS")


def test_each_role_has_its_own_certificate_and_no_token() -> None:
    ports = ("http", "grpc", "scheduler", "scheduler_admin", "scheduler_metrics", "worker", "worker_metrics")
    settings = SupervisorSettings.model_validate({f"{port}_port": 0 for port in ports} | {"insecure": True})
    models = settings.model_settings()
    with FreePorts() as free_ports:
        roles = service_roles(settings, models, assign(settings, models, free_ports), "redis://127.0.0.1")
    assert [role.name for role in roles] == ["worker", "scheduler", "gateway"]
    for role in roles:
        changed = with_certificate(Path("folder"), role).environment
        assert changed["QUIRE_MTLS_CERT_FILE"] == f"folder/{role.name}.crt"
        assert changed["QUIRE_MTLS_KEY_FILE"] == f"folder/{role.name}.key"
        assert changed["QUIRE_MTLS_CA_FILE"] == "folder/ca.crt"
        assert changed["QUIRE_INSECURE"] == "0"
        assert "QUIRE_DEPLOYMENT_SECRET_FILE" not in changed
