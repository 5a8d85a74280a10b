"""The chart as real helm renders it: valid for Kubernetes, and at one with the services that it runs."""

import json
import os
import re
import shutil
import subprocess
import sys
import time
from functools import cache
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import redis
import yaml
from redis.backoff import NoBackoff
from redis.retry import Retry

from gateway_svc.generation_config import load_generation_defaults
from gateway_svc.settings import GatewaySettings
from ports import lasting_port
from quire.inference.v1 import inference_pb2
from quire.scheduler.v1 import scheduler_pb2
from quire.worker.v1 import worker_pb2
from scheduler_svc.settings import SchedulerSettings
from svc_common.server import LIVENESS
from svc_common.settings import ServiceSettings, read_settings
from svc_common.supervisor.embedded_redis import EmbeddedRedis
from worker_svc.settings import WorkerSettings

CHART = Path(__file__).parents[3] / "deploy" / "helm" / "quire"
HELM = str(Path(sys.executable).with_name("helm"))
OLDEST_KUBERNETES = "1.27.0"

Object = dict[str, Any]

CHAT_TEMPLATE = """{%- for message in messages %}
  {{- "$(" + message.role + ") '" + message['content'] }}\\n
{%- endfor %}
"""

VALUES: dict[str, Object] = {
    "default": {},
    "gpu": {
        "worker": {"gpus": 2, "replicas": 3, "runtimeClassName": "nvidia", "tolerations": [{"operator": "Exists"}]}
    },
    "external_redis": {"redis": {"enabled": False, "externalUrl": "redis://redis.example.com:6379/0"}},
    "external_redis_secret": {"redis": {"enabled": False, "externalUrlSecret": {"name": "store"}}},
    "open": {"networkPolicy": {"enabled": False}, "serviceAccount": {"create": False}},
    "everything": {
        "fullnameOverride": "llm",
        "commonLabels": {"team": "ml"},
        "image": {"registry": "registry.example.com/ml", "tag": "1.2.3"},
        "imagePullSecrets": [{"name": "pull"}],
        "model": {
            "name": "org/model",
            "revision": "v1.2",
            "tokenizer": "org/tokenizer",
            "tokenizerRevision": "1234567",
            "chatTemplate": CHAT_TEMPLATE,
            "generationConfig": "auto",
            "overrideGenerationConfig": {"temperature": 0.5, "top_k": 0, "max_new_tokens": 4_000_000},
            "dtype": "bfloat16",
            "maxModelLen": 131_072,
            "hubToken": {"existingSecret": "hub"},
            "volume": {"existingClaim": "models"},
        },
        "budgets": {
            "blockSize": 16,
            "numBlocks": 2_000_000,
            "maxStepTokens": 2048,
            "maxSequences": 128,
            "swapSpace": 0,
        },
        "auth": {"existingSecret": "keys"},
        "otel": {"endpoint": "http://collector:4317"},
        "gateway": {
            "service": {"type": "LoadBalancer", "httpPort": 80, "annotations": {"a": "b"}},
            "podAnnotations": {"a": "b"},
            "nodeSelector": {"disk": "fast"},
            "topologySpreadConstraints": [
                {"maxSkew": 1, "topologyKey": "kubernetes.io/hostname", "whenUnsatisfiable": "ScheduleAnyway"}
            ],
            "extraEnv": [{"name": "OTEL_TRACES_SAMPLER", "value": "always_on"}],
        },
        "scheduler": {
            "policy": "priority",
            "ageingSeconds": 2.5,
            "preemption": "recompute",
            "gapFactor": 3,
            "queue": {
                "maxRequests": 9,
                "maxTokens": 3_000_000_000,
                "maxTenantRequests": 3,
                "maxTenantTokens": 10**9,
            },
        },
        "worker": {"affinity": {"nodeAffinity": {}}, "startupSeconds": 61},
        "redis": {"existingSecret": "redis", "storage": {"storageClassName": "ssd"}},
        "networkPolicy": {
            "gatewayFrom": [{"namespaceSelector": {"matchLabels": {"name": "apps"}}}],
            "metricsFrom": [{"namespaceSelector": {"matchLabels": {"name": "monitoring"}}}],
        },
    },
}
everywhere = pytest.mark.parametrize("values", VALUES)


class StrictLoader(yaml.SafeLoader):
    """Refuses a key that stands twice, which YAML readers otherwise settle in silence."""

    def construct_mapping(self, node: Any, deep: bool = False) -> Any:
        keys = [key.value for key, _ in node.value]
        assert len(keys) == len(set(keys)), f"a key stands twice in {keys}"
        return super().construct_mapping(node, deep)


def helm(*arguments: str, values: Object) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [HELM, *arguments, "--values", "-"], input=json.dumps(values), capture_output=True, text=True, check=False
    )


@cache
def render(values: str) -> tuple[Object, ...]:
    done = helm("template", "test", str(CHART), values=VALUES[values])
    assert done.returncode == 0, done.stderr
    return tuple(document for document in yaml.load_all(done.stdout, StrictLoader) if document)


def of_kind(values: str, *kinds: str) -> dict[str, Object]:
    return {component(thing): thing for thing in render(values) if thing["kind"] in kinds}


def component(thing: Object) -> str:
    return str(thing["metadata"]["labels"]["app.kubernetes.io/component"])


def workloads(values: str) -> dict[str, Object]:
    return of_kind(values, "Deployment", "StatefulSet")


def pod_specs(values: str) -> dict[str, Object]:
    specs = {name: workload["spec"]["template"]["spec"] for name, workload in workloads(values).items()}
    return specs | {name: pod["spec"] for name, pod in of_kind(values, "Pod").items()}


def container(values: str, name: str) -> Object:
    (only,) = workloads(values)[name]["spec"]["template"]["spec"]["containers"]
    return dict(only)


def environment(values: str, name: str) -> dict[str, str]:
    return {item["name"]: item.get("value", "") for item in container(values, name)["env"]}


@everywhere
def test_it_lints(values: str) -> None:
    done = helm("lint", "--strict", str(CHART), values=VALUES[values])
    assert done.returncode == 0, done.stdout + done.stderr


@everywhere
@pytest.mark.parametrize("version", [OLDEST_KUBERNETES, kubernetes_validate.latest_version()])
def test_every_object_is_valid(values: str, version: str) -> None:
    objects = render(values)
    assert {"Deployment", "StatefulSet", "Service", "PodDisruptionBudget"} <= {thing["kind"] for thing in objects}
    for thing in objects:
        kubernetes_validate.validate(thing, version, strict=True)


@pytest.mark.parametrize(
    "values",
    [
        {"gatway": {}},
        {"gateway": {"replica": 2}},
        {"model": {"dtype": "int3"}},
        {"model": {"maxModelLen": 2}},
        {"model": {"overrideGenerationConfig": {"temperature": 3}}},
        {"model": {"overrideGenerationConfig": {"max_tokens": 3}}},
        {"worker": {"gpus": -1}},
        {"budgets": {"blockSize": 0}},
        {"budgets": {"swapSpace": -1}},
        {"scheduler": {"policy": "no name"}},
        {"scheduler": {"ageingSeconds": 0}},
        {"scheduler": {"preemption": "kill"}},
        {"scheduler": {"gapFactor": 1}},
        {"scheduler": {"queue": {"maxRequests": 0}}},
        {"scheduler": {"queue": {"maxTokens": 1.5}}},
        {"scheduler": {"queue": {"requests": 1}}},
        {"otel": {"endpoint": "collector"}},
        {"redis": {"enabled": False}},
    ],
    ids=json.dumps,
)
def test_wrong_values_are_refused(values: Object) -> None:
    assert helm("template", "test", str(CHART), values=values).returncode != 0


@everywhere
def test_every_container_may_do_nothing_that_it_need_not(values: str) -> None:
    for spec in pod_specs(values).values():
        assert spec["automountServiceAccountToken"] is False
        # Else Kubernetes sets QUIRE_SCHEDULER_PORT and the like after the Services of a release called quire.
        assert spec["enableServiceLinks"] is False
        assert spec["securityContext"]["runAsNonRoot"] is True
        assert spec["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
        for item in spec["containers"] + spec.get("initContainers", []):
            security = item["securityContext"]
            assert security["readOnlyRootFilesystem"] is True
            assert security["allowPrivilegeEscalation"] is False
            assert security["capabilities"] == {"drop": ["ALL"]}
            assert item["resources"]["requests"]
            assert item["resources"]["limits"]["memory"]


@everywhere
def test_volumes_are_there_for_every_mount(values: str) -> None:
    for name, spec in pod_specs(values).items():
        volumes = {volume["name"] for volume in spec.get("volumes", [])}
        volumes |= {
            claim["metadata"]["name"]
            for claim in workloads(values).get(name, {}).get("spec", {}).get("volumeClaimTemplates", [])
        }
        mounts = {
            mount["name"]
            for item in spec["containers"] + spec.get("initContainers", [])
            for mount in item.get("volumeMounts", [])
        }
        assert mounts == volumes


SETTINGS: dict[str, type[ServiceSettings]] = {
    "gateway": GatewaySettings,
    "scheduler": SchedulerSettings,
    "worker": WorkerSettings,
}


@everywhere
@pytest.mark.parametrize("service", SETTINGS)
def test_every_variable_is_a_setting_that_takes_its_value(
    values: str, service: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    variables = environment(values, service)
    names = [item["name"] for item in container(values, service)["env"]]
    assert len(names) == len(set(names))
    kind = SETTINGS[service]
    elsewhere = {"QUIRE_CACHE_DIR"}  # read where models are found, by whatever process does that
    ours = {name for name in variables if name.startswith("QUIRE_")} - elsewhere
    assert ours <= {f"QUIRE_{field.upper()}" for field in kind.model_fields}
    for name in [name for name in os.environ if name.startswith("QUIRE_")]:
        monkeypatch.delenv(name)
    for name in ours:
        if variables[name]:  # what a Secret holds is not known here
            monkeypatch.setenv(name, variables[name])
    settings = read_settings(kind, [])
    assert settings.host == "0.0.0.0"


@everywhere
def test_services_listen_where_their_pods_say(values: str) -> None:
    ports = {
        "gateway": ("QUIRE_HTTP_PORT", "QUIRE_GRPC_PORT"),
        "scheduler": ("QUIRE_SCHEDULER_PORT", "QUIRE_SCHEDULER_METRICS_PORT"),
        "worker": ("QUIRE_WORKER_PORT", "QUIRE_WORKER_METRICS_PORT"),
    }
    for name, variables in ports.items():
        declared = {port["containerPort"] for port in container(values, name)["ports"]}
        assert declared == {int(environment(values, name)[variable]) for variable in variables}


@everywhere
def test_what_tells_of_every_tenant_listens_inside_its_pod_alone(values: str) -> None:
    variables = environment(values, "scheduler")
    assert "QUIRE_SCHEDULER_ADMIN_HOST" not in variables
    assert SchedulerSettings.model_fields["scheduler_admin_host"].default == "127.0.0.1"
    declared = {port["containerPort"] for port in container(values, "scheduler")["ports"]}
    assert int(variables["QUIRE_SCHEDULER_ADMIN_PORT"]) not in declared


@everywhere
def test_probes_ask_what_is_served(values: str) -> None:
    files = (inference_pb2, scheduler_pb2, worker_pb2)
    served = {service.full_name for file in files for service in file.DESCRIPTOR.services_by_name.values()}
    for name in SETTINGS:
        item = container(values, name)
        ports = {port["containerPort"] for port in item["ports"]}
        probes = {kind: item[kind]["grpc"] for kind in ("startupProbe", "livenessProbe", "readinessProbe")}
        assert probes["livenessProbe"]["service"] == LIVENESS
        # A scheduler that stands by leads nobody, and is as ready as it can be.
        assert probes["readinessProbe"]["service"] in (served if name != "scheduler" else {LIVENESS})
        assert {probe["service"] for probe in probes.values()} <= served | {LIVENESS}
        assert {probe["port"] for probe in probes.values()} <= ports


def test_a_worker_has_the_time_that_it_was_given_to_start() -> None:
    assert container("default", "worker")["startupProbe"]["failureThreshold"] == 180
    assert container("everything", "worker")["startupProbe"]["failureThreshold"] == 7


@everywhere
def test_a_service_leads_to_the_pods_of_its_component_alone(values: str) -> None:
    for name, service in of_kind(values, "Service").items():
        selector = service["spec"]["selector"].items()
        labels = {
            other: workload["spec"]["template"]["metadata"]["labels"] for other, workload in workloads(values).items()
        }
        assert [other for other in labels if selector <= labels[other].items()] == [name]
        named = {port["name"] for port in container(values, name)["ports"]}
        assert {port["targetPort"] for port in service["spec"]["ports"]} <= named


@everywhere
def test_services_find_each_other(values: str) -> None:
    services = of_kind(values, "Service")

    def address(name: str) -> str:
        (port,) = services[name]["spec"]["ports"]
        return f"{services[name]['metadata']['name']}:{port['port']}"

    replicas = workloads(values)["scheduler"]["spec"]["replicas"]
    each = [f"{services['scheduler']['metadata']['name']}-{index}.{address('scheduler')}" for index in range(replicas)]
    assert environment(values, "gateway")["QUIRE_SCHEDULERS_AT"].split(",") == each
    assert environment(values, "scheduler")["QUIRE_WORKERS_AT"] == address("worker")
    for name in ("scheduler", "worker"):
        assert services[name]["spec"]["clusterIP"] == "None"
    if "redis" in services:
        assert address("redis") in environment(values, "scheduler")["QUIRE_REDIS_URL"]
    for workload in of_kind(values, "StatefulSet").values():
        assert workload["spec"]["serviceName"] in {service["metadata"]["name"] for service in services.values()}


def test_one_scheduler_stands_by() -> None:
    spec = workloads("default")["scheduler"]["spec"]
    assert (spec["replicas"], spec["podManagementPolicy"]) == (2, "Parallel")
    # Their names are made of the set's and the service's.
    assert spec["serviceName"] == of_kind("default", "Service")["scheduler"]["metadata"]["name"]


@everywhere
def test_only_callers_reach_a_service(values: str) -> None:
    policies = of_kind(values, "NetworkPolicy")
    if values == "open":
        assert not policies
        return
    assert set(policies) == set(workloads(values))
    callers = {"scheduler": "gateway", "worker": "scheduler", "redis": "scheduler"}
    for name, policy in policies.items():
        first, *rest = policy["spec"]["ingress"]
        open_ports = {port["port"] for rule in (first, *rest) for port in rule["ports"]}
        assert open_ports <= {port["containerPort"] for port in container(values, name)["ports"]}
        if name in callers:
            (peer,) = first["from"]
            assert peer["podSelector"]["matchLabels"]["app.kubernetes.io/component"] == callers[name]
        assert len(rest) == (values == "everything" and name in ("scheduler", "worker"))


@everywhere
def test_no_secret_stands_outside_of_secrets(values: str) -> None:
    secrets = {value for thing in of_kind(values, "Secret").values() for value in thing["data"].values()}
    assert bool(secrets) == (VALUES[values].get("redis", {}).get("enabled", True) and values != "everything")
    for name in workloads(values):
        names = [item["name"] for item in container(values, name)["env"]]
        for item in container(values, name)["env"]:
            for used in re.findall(r"\$\((\w+)\)", item.get("value", "")):
                # Kubernetes fills in only what stands above.
                assert names.index(used) < names.index(item["name"])
    if "redis" in workloads(values):
        assert "$(REDISCLI_AUTH)" in container(values, "redis")["args"]


@everywhere
def test_the_model_is_prepared_where_it_is_read(values: str) -> None:
    for name in ("gateway", "worker"):
        (prepare,) = workloads(values)[name]["spec"]["template"]["spec"]["initContainers"]
        told = {item["name"]: item.get("value") for item in prepare["env"]}
        named = ("QUIRE_MODEL", "QUIRE_REVISION", "QUIRE_TOKENIZER", "QUIRE_TOKENIZER_REVISION")
        assert told.keys() & set(named) == (set(named) if values == "everything" else set())
        for variable in ("QUIRE_CACHE_DIR", "HF_HOME", *named):
            assert told.get(variable) == environment(values, name).get(variable)
        assert prepare["image"] == container(values, "worker")["image"]


def test_a_gateway_drains_before_it_is_killed() -> None:
    spec = pod_specs("default")["gateway"]
    before = int(spec["containers"][0]["lifecycle"]["preStop"]["exec"]["command"][1])
    drain = int(environment("default", "gateway")["QUIRE_DRAIN_GRACE"])
    assert before + drain < spec["terminationGracePeriodSeconds"]


def test_gpus_are_asked_for_and_tolerated() -> None:
    spec = pod_specs("gpu")["worker"]
    assert spec["containers"][0]["resources"]["limits"]["nvidia.com/gpu"] == 2
    assert spec["containers"][0]["resources"]["limits"]["memory"]
    assert {"key": "nvidia.com/gpu", "operator": "Exists", "effect": "NoSchedule"} in spec["tolerations"]
    assert {"operator": "Exists"} in spec["tolerations"]
    assert "nvidia.com/gpu" not in str(pod_specs("default")["worker"])


def settings_of(values: str, service: str, monkeypatch: pytest.MonkeyPatch) -> ServiceSettings:
    """What a service reads of its variables, as it reads them."""
    for name, value in environment(values, service).items():
        if name.startswith("QUIRE_") and value:
            monkeypatch.setenv(name, value)
    return read_settings(SETTINGS[service], [])


def test_what_the_scheduler_decides_by_is_as_told(monkeypatch: pytest.MonkeyPatch) -> None:
    told = settings_of("everything", "scheduler", monkeypatch)
    assert isinstance(told, SchedulerSettings)
    assert (told.policy, told.ageing_seconds, told.preemption, told.gap_factor) == ("priority", 2.5, "recompute", 3)
    assert (told.max_queued_requests, told.max_queued_tokens) == (9, 3_000_000_000)
    assert (told.max_tenant_queued_requests, told.max_tenant_queued_tokens) == (3, 10**9)


def test_what_the_gateway_fills_in_is_as_told(monkeypatch: pytest.MonkeyPatch) -> None:
    told = settings_of("everything", "gateway", monkeypatch)
    assert isinstance(told, GatewaySettings)
    assert (told.revision, told.tokenizer, told.tokenizer_revision) == ("v1.2", "org/tokenizer", "1234567")
    assert told.chat_template is not None
    assert told.chat_template.replace("$$(", "$(") == CHAT_TEMPLATE  # as Kubernetes reads it
    assert "$(" not in told.chat_template.replace("$$(", "")
    assert told.generation_config == "auto"
    assert told.override_generation_config is not None
    config = VALUES["everything"]["model"]["overrideGenerationConfig"]
    assert json.loads(told.override_generation_config) == config
    assert load_generation_defaults("quire", told.override_generation_config, Path()).max_tokens == 4_000_000


def test_no_swap_space_is_not_the_same_as_an_untold_one(monkeypatch: pytest.MonkeyPatch) -> None:
    told = settings_of("everything", "worker", monkeypatch)
    assert isinstance(told, WorkerSettings)
    assert (told.swap_space, told.max_model_len) == (0, 131_072)
    assert "QUIRE_SWAP_SPACE" not in environment("default", "worker")


@everywhere
def test_the_notes_lead_to_the_admin_port_by_the_releases_names(values: str, tmp_path: Path) -> None:
    # helm shows notes of what it installs only: they are rendered here as a template like others.
    chart = shutil.copytree(CHART, tmp_path / "quire")
    (chart / "templates" / "NOTES.txt").rename(chart / "notes")
    (chart / "templates" / "notes.yaml").write_text('{{ dict "notes" (tpl (.Files.Get "notes") .) | toYaml }}\n')
    done = helm("template", "test", str(chart), "--show-only", "templates/notes.yaml", values=VALUES[values])
    assert done.returncode == 0, done.stderr
    notes = yaml.safe_load(done.stdout)["notes"]
    name = workloads(values)["scheduler"]["metadata"]["name"]
    port = environment(values, "scheduler")["QUIRE_SCHEDULER_ADMIN_PORT"]
    assert f"port-forward deployment/{name} {port} " in notes


def test_large_numbers_stay_numbers() -> None:
    assert environment("everything", "worker")["QUIRE_NUM_BLOCKS"] == "2000000"


def test_redis_takes_its_arguments_and_asks_for_the_password(tmp_path: Path) -> None:
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
