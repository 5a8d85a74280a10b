"""The real roles: each service gets its settings as variables that it reads."""

import sys
from pathlib import Path

from svc_common.supervisor.addresses import FreePorts, assign
from svc_common.supervisor.roles import Role, StartTier, service_roles
from svc_common.supervisor.settings import SupervisorSettings

REDIS = "redis://:password@127.0.0.1:7000/0"


def table(**values: object) -> dict[str, Role]:
    settings = SupervisorSettings.model_validate(values)
    models = settings.model_settings()
    with FreePorts() as free_ports:
        addresses = assign(settings, models, free_ports)
    return {role.name: role for role in service_roles(settings, models, addresses, REDIS)}


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
    assert (scheduler["QUIRE_REDIS_URL"], scheduler["QUIRE_REDIS_PREFIX"]) == (REDIS, "quire")
    assert (scheduler["QUIRE_SCHEDULER_ADMIN_HOST"], scheduler["QUIRE_SCHEDULER_ADMIN_PORT"]) == ("127.0.0.1", "50062")
    assert roles["worker-1"].environment["QUIRE_WORKER_PORT"] == "50054"
    assert roles["worker-1"].environment["QUIRE_WORKER_METRICS_PORT"] == "9112"
    assert roles["gateway-1"].environment["QUIRE_SCHEDULERS_AT"] == "127.0.0.1:50052"
    assert roles["gateway-1"].environment["QUIRE_HTTP_PORT"] == "8001"


def test_every_gateway_has_every_scheduler_of_which_the_first_leads() -> None:
    roles = table(schedulers=2, scheduler_port=50052)
    assert roles["gateway"].environment["QUIRE_SCHEDULERS_AT"] == "127.0.0.1:50052,127.0.0.1:50053"
    assert "QUIRE_STANDBY" not in roles["scheduler-0"].environment
    assert roles["scheduler-1"].environment["QUIRE_STANDBY"] == "1"


def test_a_role_dials_mapped_addresses() -> None:
    values: dict[str, object] = {"gateways": 2, "scheduler_port": 50052, "worker_port": 50053}
    settings = SupervisorSettings.model_validate(values)
    models = settings.model_settings()
    with FreePorts() as free_ports:
        addresses = assign(settings, models, free_ports)
    listed = service_roles(settings, models, addresses, REDIS, lambda role, address: f"{role}>{address}")
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


def test_flags_of_model_and_keys_reach_the_services() -> None:
    roles = table(model="/models/tiny", api_keys=Path("keys.txt"))
    assert {roles[name].environment["QUIRE_MODEL"] for name in ("worker", "gateway")} == {"/models/tiny"}
    assert roles["gateway"].environment["QUIRE_API_KEYS"] == "keys.txt"
    assert "QUIRE_API_KEYS" not in roles["worker"].environment


def test_each_gateway_has_a_port_of_metrics_where_one_is_set() -> None:
    assert "QUIRE_GATEWAY_METRICS_PORT" not in table()["gateway"].environment
    roles = table(gateways=2, gateway_metrics_port=9121)
    ports = [roles[f"gateway-{index}"].environment["QUIRE_GATEWAY_METRICS_PORT"] for index in range(2)]
    assert ports == ["9121", "9122"]


def test_gateways_draw_different_seeds() -> None:
    assert "QUIRE_SEED" not in table()["gateway"].environment
    roles = table(gateways=2, seed=2**32 - 1)
    assert [roles[f"gateway-{index}"].environment["QUIRE_SEED"] for index in range(2)] == ["4294967295", "0"]


def test_files_of_tls_reach_gateways_and_certificates_of_roles_reach_nobody() -> None:
    roles = table(tls_cert_file="/tls/crt", tls_key_file="/tls/key")
    assert roles["gateway"].environment["QUIRE_TLS_CERT_FILE"] == "/tls/crt"
    assert roles["gateway"].environment["QUIRE_TLS_KEY_FILE"] == "/tls/key"
    for role in roles.values():
        # A certificate in the supervisor's own environment has one role.
        assert {role.environment[f"QUIRE_MTLS_{name}_FILE"] for name in ("CERT", "KEY", "CA")} == {""}


def test_settings_of_gateways_alone_reach_gateways_alone() -> None:
    given = {
        "chat_template": "{{ messages }}",
        "chat_template_kwargs": "{}",
        "chat_roles": "ipython",
        "tool_format": "hermes",
        "reasoning_format": "none",
        "generation_config": "auto",
        "override_generation_config": "{}",
    }
    roles = table(**given)
    for name, value in given.items():
        assert roles["gateway"].environment[f"QUIRE_{name.upper()}"] == value
        assert f"QUIRE_{name.upper()}" not in {**roles["worker"].environment, **roles["scheduler"].environment}


def test_the_prefix_of_redis_keys_reaches_schedulers() -> None:
    roles = table(redis_prefix="team-b", schedulers=2)
    assert {roles[name].environment["QUIRE_REDIS_PREFIX"] for name in ("scheduler-0", "scheduler-1")} == {"team-b"}


def test_what_names_the_model_and_its_tokenizer_reaches_workers_and_gateways() -> None:
    named = {
        "model": "owner/name",
        "revision": "v1",
        "tokenizer": "other/one",
        "tokenizer_revision": "v2",
        "served_model_name": "one,two",
        "task": "embed",
    }
    roles = table(**named)
    for name in ("worker", "gateway"):
        variables = {f"QUIRE_{key.upper()}": value for key, value in named.items()}
        assert variables.items() <= roles[name].environment.items()
    assert not {f"QUIRE_{key.upper()}" for key in named} & table()["worker"].environment.keys()


def test_a_file_of_models_has_workers_for_each_of_them(tmp_path: Path) -> None:
    file = tmp_path / "models.toml"
    file.write_text(
        '[[models]]\nserved_model_name = "default"\n'
        '[[models]]\nmodel = "owner/name"\nrevision = "v1"\nworkers = 2\n'
        '[[models]]\nmodel = "owner/other"\nserved_model_name = ["o", "other"]\ntokenizer = "owner/name"\n'
    )
    roles = table(models=file, worker_port=50053, gateways=2)
    workers = {name: role.environment for name, role in roles.items() if role.tier is StartTier.WORKER}
    assert list(workers) == ["worker-default-0", "worker-owner/name-0", "worker-owner/name-1", "worker-o-0"]
    keys = ("QUIRE_MODEL", "QUIRE_REVISION", "QUIRE_TOKENIZER", "QUIRE_SERVED_MODEL_NAME")
    assert [[worker.get(key) for key in keys] for worker in workers.values()] == [
        [None, None, None, "default"],
        ["owner/name", "v1", None, None],
        ["owner/name", "v1", None, None],
        ["owner/other", None, "owner/name", "o,other"],
    ]
    ports = [worker["QUIRE_WORKER_PORT"] for worker in workers.values()]
    assert ports == ["50053", "50054", "50055", "50056"]
    addresses = ",".join(f"127.0.0.1:{port}" for port in ports)
    assert roles["scheduler"].environment["QUIRE_WORKERS_AT"] == addresses
    for name in ("gateway-0", "gateway-1"):
        assert roles[name].environment["QUIRE_MODELS"] == str(file)
        assert "QUIRE_MODEL" not in roles[name].environment


def test_a_gateway_has_a_unix_socket_or_a_port(tmp_path: Path) -> None:
    gateway = table(uds=tmp_path / "s")["gateway"].environment
    assert gateway["QUIRE_UDS"] == f"{tmp_path}/s"
    assert "QUIRE_HTTP_PORT" not in gateway
    assert table()["gateway"].environment["QUIRE_UDS"] == ""  # not that of the environment
