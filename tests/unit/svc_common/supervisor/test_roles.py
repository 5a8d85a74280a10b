"""The real table of roles: each service is told what it needs, by variables that it knows."""

import sys
from pathlib import Path

from svc_common.supervisor.addresses import assign
from svc_common.supervisor.roles import Role, StartTier, service_roles
from svc_common.supervisor.settings import SupervisorSettings

REDIS = "redis://:password@127.0.0.1:7000/0"


def table(**values: object) -> dict[str, Role]:
    settings = SupervisorSettings.model_validate(values)
    return {role.name: role for role in service_roles(settings, assign(settings), REDIS)}


def test_one_of_each_by_default() -> None:
    roles = table()
    assert {name: role.tier for name, role in roles.items()} == {
        "worker": StartTier.WORKER,
        "scheduler": StartTier.SCHEDULER,
        "gateway": StartTier.GATEWAY,
    }
    assert roles["scheduler"].command == (sys.executable, "-m", "scheduler_svc")


def test_services_find_each_other() -> None:
    roles = table(gateways=2, workers=2, grpc_port=50061, worker_port=50053, scheduler_port=50052)
    assert set(roles) == {"worker-0", "worker-1", "scheduler", "gateway-0", "gateway-1"}
    scheduler = roles["scheduler"].environment
    assert scheduler["QUIRE_WORKERS_AT"] == "127.0.0.1:50053,127.0.0.1:50054"
    assert scheduler["QUIRE_REDIS_URL"] == REDIS
    assert (scheduler["QUIRE_SCHEDULER_ADMIN_HOST"], scheduler["QUIRE_SCHEDULER_ADMIN_PORT"]) == ("127.0.0.1", "50062")
    assert roles["worker-1"].environment["QUIRE_WORKER_PORT"] == "50054"
    assert roles["worker-1"].environment["QUIRE_WORKER_METRICS_PORT"] == "9112"
    assert roles["gateway-1"].environment["QUIRE_SCHEDULERS_AT"] == "127.0.0.1:50052"
    assert roles["gateway-1"].environment["QUIRE_HTTP_PORT"] == "8001"


def test_every_gateway_knows_every_scheduler_of_which_the_first_leads() -> None:
    roles = table(schedulers=2, scheduler_port=50052)
    assert roles["gateway"].environment["QUIRE_SCHEDULERS_AT"] == "127.0.0.1:50052,127.0.0.1:50053"
    assert "QUIRE_STANDBY" not in roles["scheduler-0"].environment
    assert roles["scheduler-1"].environment["QUIRE_STANDBY"] == "1"


def test_a_role_dials_where_it_is_told_to() -> None:
    values: dict[str, object] = {"gateways": 2, "scheduler_port": 50052, "worker_port": 50053}
    settings = SupervisorSettings.model_validate(values)
    listed = service_roles(settings, assign(settings), REDIS, lambda role, address: f"{role}>{address}")
    roles = {role.name: role.environment for role in listed}
    assert roles["gateway-1"]["QUIRE_SCHEDULERS_AT"] == "gateway-1>127.0.0.1:50052"
    assert roles["scheduler"]["QUIRE_WORKERS_AT"] == "scheduler>127.0.0.1:50053"
    assert roles["scheduler"]["QUIRE_REDIS_URL"] == f"scheduler>{REDIS}"
    assert roles["scheduler"]["QUIRE_SCHEDULER_PORT"] == "50052"


def test_inner_services_stay_on_the_loopback() -> None:
    roles = table(host="0.0.0.0")
    assert {name: role.environment["QUIRE_HOST"] for name, role in roles.items()} == {
        "worker": "127.0.0.1",
        "scheduler": "127.0.0.1",
        "gateway": "0.0.0.0",
    }


def test_model_and_keys_given_as_flags_reach_the_services() -> None:
    roles = table(model="/models/tiny", api_keys=Path("keys.txt"))
    assert {role.environment["QUIRE_MODEL"] for role in roles.values()} == {"/models/tiny"}
    assert roles["gateway"].environment["QUIRE_API_KEYS"] == "keys.txt"
    assert "QUIRE_API_KEYS" not in roles["worker"].environment


def test_what_names_the_model_and_its_tokenizer_reaches_every_role() -> None:
    named = {"model": "owner/name", "revision": "v1", "tokenizer": "other/one", "tokenizer_revision": "v2"}
    for role in table(**named).values():
        assert {f"QUIRE_{name.upper()}": value for name, value in named.items()}.items() <= role.environment.items()
    assert not {"QUIRE_REVISION", "QUIRE_TOKENIZER", "QUIRE_TOKENIZER_REVISION"} & table()["worker"].environment.keys()
