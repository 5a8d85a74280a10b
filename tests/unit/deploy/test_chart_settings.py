"""Settings in the rendered chart are settings of the services, with the chart's values."""

import json
import os
import subprocess
import time
from pathlib import Path
from typing import get_args

import pytest
import redis
from redis.backoff import NoBackoff
from redis.retry import Retry

from gateway_svc.generation_config import load_generation_defaults
from gateway_svc.message_formats.formats import REASONING_FORMAT_NAMES, TOOL_FORMAT_NAMES
from gateway_svc.settings import GatewaySettings
from helm_chart import (
    CHART,
    CHAT_TEMPLATE,
    SETTINGS,
    VALUES,
    container,
    environment,
    everywhere,
    of_kind,
    of_service,
    pod_specs,
    settings_of,
    workloads,
)
from ports import lasting_port
from scheduler_svc.settings import SchedulerSettings
from svc_common.model_settings import TaskChoice
from svc_common.settings import read_settings
from svc_common.supervisor.embedded_redis import EmbeddedRedis
from worker_svc.settings import WorkerSettings


@everywhere
@pytest.mark.parametrize("service", SETTINGS)
def test_every_variable_is_a_setting_that_takes_its_value(
    values: str, service: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    kind = SETTINGS[service]
    elsewhere = {"QUIRE_CACHE_DIR"}  # read by every process that searches models
    assert of_service(values, service)
    for component in of_service(values, service):
        variables = environment(values, component)
        names = [item["name"] for item in container(values, component)["env"]]
        assert len(names) == len(set(names))
        ours = {name for name in variables if name.startswith("QUIRE_")} - elsewhere
        assert ours <= {f"QUIRE_{field.upper()}" for field in kind.model_fields}
        for name in [name for name in os.environ if name.startswith("QUIRE_")]:
            monkeypatch.delenv(name)
        for name in ours:
            if variables[name]:  # the content of a Secret is not known here
                monkeypatch.setenv(name, variables[name])
        settings = read_settings(kind, [])
        assert settings.host == "0.0.0.0"


@everywhere
def test_services_listen_on_their_pods_ports(values: str) -> None:
    ports = {
        "gateway": ("QUIRE_HTTP_PORT", "QUIRE_GRPC_PORT", "QUIRE_GATEWAY_METRICS_PORT"),
        "scheduler": ("QUIRE_SCHEDULER_PORT", "QUIRE_SCHEDULER_METRICS_PORT"),
        "worker": ("QUIRE_WORKER_PORT", "QUIRE_WORKER_METRICS_PORT"),
    }
    for service, variables in ports.items():
        for name in of_service(values, service):
            declared = {port["containerPort"] for port in container(values, name)["ports"]}
            assert declared == {int(environment(values, name)[variable]) for variable in variables}


@everywhere
def test_the_admin_service_listens_on_loopback_alone(values: str) -> None:
    variables = environment(values, "scheduler")
    assert "QUIRE_SCHEDULER_ADMIN_HOST" not in variables
    assert SchedulerSettings.model_fields["scheduler_admin_host"].default == "127.0.0.1"
    declared = {port["containerPort"] for port in container(values, "scheduler")["ports"]}
    assert int(variables["QUIRE_SCHEDULER_ADMIN_PORT"]) not in declared


@everywhere
def test_probes_ask_what_is_served_without_a_credential(values: str) -> None:
    for service in SETTINGS:
        for name in of_service(values, service):
            item = container(values, name)
            ports = {port["name"] for port in item["ports"]}
            probes = {kind: item[kind]["httpGet"] for kind in ("startupProbe", "livenessProbe", "readinessProbe")}
            assert probes["livenessProbe"]["path"] == "/live"
            # A standby scheduler is ready although it does not lead.
            assert probes["readinessProbe"]["path"] == ("/live" if name == "scheduler" else "/health")
            # Ports of inner services may require a certificate, which Kubernetes does not have.
            assert {probe["port"] for probe in probes.values()} == {"http" if name == "gateway" else "metrics"} <= ports
            has_tls = name == "gateway" and values == "tls"
            assert {probe.get("scheme", "HTTP") for probe in probes.values()} == {"HTTPS" if has_tls else "HTTP"}


def test_a_worker_has_the_configured_time_to_start() -> None:
    assert container("default", "worker")["startupProbe"]["failureThreshold"] == 180
    assert container("everything", "worker")["startupProbe"]["failureThreshold"] == 7


@everywhere
def test_services_find_each_other(values: str) -> None:
    services = of_kind(values, "Service")

    def address(name: str) -> str:
        (port,) = services[name]["spec"]["ports"]
        return f"{services[name]['metadata']['name']}:{port['port']}"

    replicas = workloads(values)["scheduler"]["spec"]["replicas"]
    each = [f"{services['scheduler']['metadata']['name']}-{index}.{address('scheduler')}" for index in range(replicas)]
    assert environment(values, "gateway")["QUIRE_SCHEDULERS_AT"].split(",") == each
    workers = of_service(values, "worker")
    assert len(workers) == max(1, len(VALUES[values].get("models", [])))
    assert environment(values, "scheduler")["QUIRE_WORKERS_AT"].split(",") == [address(name) for name in workers]
    for name in ("scheduler", *workers):
        assert services[name]["spec"]["clusterIP"] == "None"
    if "redis" in services:
        assert address("redis") in environment(values, "scheduler")["QUIRE_REDIS_URL"]
    for workload in of_kind(values, "StatefulSet").values():
        assert workload["spec"]["serviceName"] in {service["metadata"]["name"] for service in services.values()}


@everywhere
def test_releases_may_share_a_redis_under_prefixes(values: str) -> None:
    prefix = environment(values, "scheduler").get("QUIRE_REDIS_PREFIX")
    assert prefix == ("team-b" if values == "external_redis" else None)


def test_a_gateway_drains_before_it_is_killed() -> None:
    spec = pod_specs("default")["gateway"]
    before = int(spec["containers"][0]["lifecycle"]["preStop"]["exec"]["command"][1])
    drain = int(environment("default", "gateway")["QUIRE_DRAIN_GRACE"])
    assert before + drain < spec["terminationGracePeriodSeconds"]


def test_scheduler_values_become_its_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    read = settings_of("everything", "scheduler", monkeypatch)
    assert isinstance(read, SchedulerSettings)
    assert (read.policy, read.ageing_seconds, read.preemption, read.gap_factor) == ("priority", 2.5, "recompute", 3)
    assert (read.max_queued_requests, read.max_queued_tokens) == (9, 3_000_000_000)
    assert (read.max_tenant_queued_requests, read.max_tenant_queued_tokens) == (3, 10**9)


def test_gateway_values_become_its_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    read = settings_of("everything", "gateway", monkeypatch)
    assert isinstance(read, GatewaySettings)
    assert (read.revision, read.tokenizer, read.tokenizer_revision) == ("v1.2", "org/tokenizer", "1234567")
    assert read.chat_template is not None
    assert read.chat_template.replace("$$(", "$(") == CHAT_TEMPLATE  # as Kubernetes reads it
    assert "$(" not in read.chat_template.replace("$$(", "")
    assert read.chat_template_kwargs == '{"enable_thinking":false,"style":"$$(a short one)"}'
    assert read.chat_roles == "ipython,critic"
    assert (read.tool_format, read.reasoning_format, read.task) == ("hermes", "none", "embed")
    assert read.allowed_host_patterns == ("api.example.com", "*.internal")
    assert read.cors_origin_list == ("https://chat.example.com",)
    assert read.generation_config == "auto"
    assert read.override_generation_config is not None
    config = VALUES["everything"]["model"]["overrideGenerationConfig"]
    assert json.loads(read.override_generation_config) == config
    assert load_generation_defaults("quire", read.override_generation_config, Path()).max_tokens == 4_000_000


def test_values_of_formats_are_those_of_the_settings() -> None:
    schema = json.loads((CHART / "values.schema.json").read_text())["properties"]["model"]["properties"]
    assert schema["toolFormat"]["enum"] == ["", *TOOL_FORMAT_NAMES]
    assert schema["reasoningFormat"]["enum"] == ["", *REASONING_FORMAT_NAMES]
    assert schema["task"]["enum"] == ["", *get_args(TaskChoice)]


def test_no_swap_space_is_not_the_same_as_an_absent_value(monkeypatch: pytest.MonkeyPatch) -> None:
    read = settings_of("everything", "worker", monkeypatch)
    assert isinstance(read, WorkerSettings)
    assert (read.swap_space, read.max_model_len) == (0, 131_072)
    assert "QUIRE_SWAP_SPACE" not in environment("default", "worker")


@everywhere
def test_workers_can_write_compiled_kernels(values: str) -> None:
    for name in of_service(values, "worker"):
        volumes = {volume["name"]: volume for volume in pod_specs(values)[name]["volumes"]}
        mounts = container(values, name)["volumeMounts"]
        for variable in ("QUIRE_KERNEL_CACHE_DIR", "TRITON_CACHE_DIR"):
            directory = Path(environment(values, name)[variable])
            (mount,) = [one for one in mounts if directory.is_relative_to(one["mountPath"])]
            assert not mount.get("readOnly")
            assert volumes[mount["name"]]["emptyDir"] == {"sizeLimit": "3Gi" if values == "everything" else "2Gi"}


def test_large_numbers_stay_numbers() -> None:
    assert environment("everything", "worker")["QUIRE_NUM_BLOCKS"] == "2000000"


def test_redis_accepts_its_arguments_and_requires_the_password(tmp_path: Path) -> None:
    executable = EmbeddedRedis.prepare(tmp_path / "run", lasting_port()).command[0]
    filled = {"/data": str(tmp_path), "$(REDISCLI_AUTH)": "password"}
    arguments = [filled.get(str(argument), str(argument)) for argument in container("default", "redis")["args"]]
    port = lasting_port()
    process = subprocess.Popen(
        [executable, "--port", str(port), "--bind", "127.0.0.1", *arguments], stdout=subprocess.DEVNULL
    )
    client = redis.Redis(port=port, password="password", retry=Retry(NoBackoff(), 0))
    try:
        while process.poll() is None:
            try:
                client.ping()
                break
            except redis.ConnectionError:
                time.sleep(0.01)
        settings = client.config_get("*")
        wanted = {"appendonly": "yes", "appendfsync": "everysec", "maxmemory-policy": "noeviction", "save": ""}
        assert settings.items() >= wanted.items()
        stranger = redis.Redis(port=port, retry=Retry(NoBackoff(), 0))
        with pytest.raises(redis.AuthenticationError):
            stranger.ping()
        stranger.close()
    finally:
        client.close()
        process.terminate()
        process.wait()
