"""The rendered chart: valid for Kubernetes, least privilege, and network access for callers only."""

import json
import re
import subprocess
import sys
from pathlib import Path

import kubernetes_validate
import pytest

from gateway_svc.http_api.hosts import AllowedHosts
from helm_chart import (
    CHART,
    VALUES,
    Object,
    container,
    environment,
    everywhere,
    helm,
    of_kind,
    of_service,
    pod_specs,
    render,
    render_notes,
    render_release,
    validate,
    workloads,
)

OLDEST_KUBERNETES = "1.27.0"


def test_an_image_may_be_named_by_its_digest() -> None:
    digest = f"sha256:{'0a' * 32}"
    services = ("gateway", "scheduler", "worker", "redis")
    values: Object = {"image": {"registry": "example.com", "tag": "unused"}}
    values |= {service: {"image": {"digest": digest}} for service in services}
    specs = [thing.get("spec", {}) for thing in render_release("test", values)]
    pods = [spec["template"]["spec"] for spec in specs if "template" in spec]
    images = {each["image"] for pod in pods for each in (*pod["containers"], *pod.get("initContainers", ()))}
    ours = {f"example.com/quire/{service}@{digest}" for service in services if service != "redis"}
    assert images == ours | {f"example.com/redis@{digest}"}


@everywhere
def test_the_chart_lints(values: str) -> None:
    done = helm("lint", "--strict", str(CHART), values=VALUES[values])
    assert done.returncode == 0, done.stdout + done.stderr


@everywhere
@pytest.mark.parametrize("version", [OLDEST_KUBERNETES, kubernetes_validate.latest_version()])
def test_every_object_is_valid(values: str, version: str) -> None:
    objects = render(values)
    assert {"Deployment", "StatefulSet", "Service", "PodDisruptionBudget"} <= {thing["kind"] for thing in objects}
    for thing in objects:
        validate(thing, version)


@pytest.mark.parametrize(
    "values",
    [
        {"gatway": {}},
        {"gateway": {"image": {"digest": "sha256:abc"}}},
        {"gateway": {"replica": 2}},
        {"model": {"dtype": "int3"}},
        {"model": {"maxModelLen": 2}},
        {"model": {"overrideGenerationConfig": {"temperature": 3}}},
        {"model": {"overrideGenerationConfig": {"max_tokens": 3}}},
        {"model": {"servedModelName": ["a b"]}},
        {"model": {"servedModelName": ["a", "a"]}},
        {"model": {"name": "org/model"}, "models": [{"name": "org/model"}]},
        {"model": {"overrideGenerationConfig": {"top_k": 3}}, "models": [{"name": "org/model"}]},
        {"models": [{"name": "org/model"}, {"name": "org/model", "revision": "v2"}]},
        {"models": [{"servedModelName": ["a", "b"]}, {"servedModelName": ["c", "b"]}]},
        {"models": [{"volume": {"existingClaim": "models"}}]},
        {"models": [{"workers": -1}]},
        {"prepare": {"env": [{"value": "http://proxy:3128"}]}},
        {"prepare": {"env": {"HTTPS_PROXY": "http://proxy:3128"}}},
        {"prepare": {"envFrom": [{"name": "proxy"}]}},
        {"worker": {"gpus": -1}},
        {"worker": {"maxUnavailable": 0}},
        {"worker": {"maxUnavailable": "0%"}},
        {"worker": {"rollingUpdate": {"maxSurge": 0, "maxUnavailable": 0}}},
        {"worker": {"rollingUpdate": {"maxSurge": "0%", "maxUnavailable": 0}}},
        {"worker": {"rollingUpdate": {"maxSurge": -1, "maxUnavailable": 1}}},
        {"gateway": {"maxUnavailable": "one"}},
        {"worker": {"kernelCacheSizeLimit": "much"}},
        {"fullnameOverride": "-"},
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
        {"redis": {"externalUrl": "redis://redis.example.com:6379/0"}},
        {"redis": {"externalUrlSecret": {"name": "store"}}},
        {"redis": {"tls": {"existingSecret": "store"}}},
        {"redis": {"enabled": False, "externalUrl": "redis://a:6379/0", "tls": {"existingSecret": "store"}}},
        {"scheduler": {"replicas": None}},
        {"gateway": {"terminationGracePeriodSeconds": None}},
        {"gateway": {"service": {"httpPort": None}}},
        {"worker": {"startupSeconds": None}},
        {"redis": {"maxMemory": None}},
        {"logLevel": None},
        {"insecure": False},
        {"insecure": False, "mtls": {"secrets": {"gateway": "a", "worker": "b"}}},
        {"mtls": {"secrets": {"gateway": "a", "scheduler": "b", "worker": "c"}}},
        {"mtls": {"secrets": {"admin": "a"}}},
        {"gateway": {"tls": {"secret": "a"}}},
    ],
    ids=json.dumps,
)
def test_wrong_values_are_rejected(values: Object) -> None:
    assert helm("template", "test", str(CHART), values=values).returncode != 0


@everywhere
def test_every_container_has_the_least_privileges(values: str) -> None:
    for spec in pod_specs(values).values():
        assert spec["automountServiceAccountToken"] is False
        # Otherwise Kubernetes sets QUIRE_SCHEDULER_PORT and the like for the Services of a release called quire.
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


def test_one_scheduler_is_a_standby() -> None:
    spec = workloads("default")["scheduler"]["spec"]
    assert (spec["replicas"], spec["podManagementPolicy"]) == (2, "Parallel")
    # The names consist of the set's and the service's.
    assert spec["serviceName"] == of_kind("default", "Service")["scheduler"]["metadata"]["name"]


@everywhere
def test_only_callers_reach_a_service(values: str) -> None:
    policies = of_kind(values, "NetworkPolicy")
    if values == "open":
        assert not policies
        return
    assert set(policies) == set(workloads(values))
    callers = {"scheduler": "gateway", "redis": "scheduler"}
    callers |= dict.fromkeys(of_service(values, "worker"), "scheduler")
    for name, policy in policies.items():
        first, *rest = policy["spec"]["ingress"]
        open_ports = {port["port"] for rule in (first, *rest) for port in rule["ports"]}
        assert open_ports <= {port["containerPort"] for port in container(values, name)["ports"]}
        if values == "everything" and name == "gateway":
            peers = [one.get("podSelector", {}).get("matchLabels", {}) for one in first["from"]]
            assert "test" in [labels.get("app.kubernetes.io/component") for labels in peers]  # helm test
        if name in callers:
            (peer,) = first["from"]
            assert peer["podSelector"]["matchLabels"]["app.kubernetes.io/component"] == callers[name]
        assert len(rest) == (values == "everything" and name in ("gateway", "scheduler", "worker"))
        for rule in rest:  # metrics, which ask for no credential
            assert rule["from"]
            (port,) = rule["ports"]
            named = {port["name"]: port["containerPort"] for port in container(values, name)["ports"]}
            assert port["port"] == named["metrics"]


@everywhere
def test_no_secret_stands_outside_of_secrets(values: str) -> None:
    secrets = {value for thing in of_kind(values, "Secret").values() for value in thing["data"].values()}
    assert bool(secrets) == (VALUES[values].get("redis", {}).get("enabled", True) and values != "everything")
    for name in workloads(values):
        names = [item["name"] for item in container(values, name)["env"]]
        for item in container(values, name)["env"]:
            for used in re.findall(r"\$\((\w+)\)", item.get("value", "")):
                # Kubernetes substitutes only variables defined above.
                assert names.index(used) < names.index(item["name"])
    if "redis" in workloads(values):
        assert "$(REDISCLI_AUTH)" in container(values, "redis")["args"]


def test_gpus_are_requested_and_tolerated() -> None:
    spec = pod_specs("gpu")["worker"]
    assert spec["containers"][0]["resources"]["limits"]["nvidia.com/gpu"] == 2
    assert spec["containers"][0]["resources"]["limits"]["memory"]
    assert {"key": "nvidia.com/gpu", "operator": "Exists", "effect": "NoSchedule"} in spec["tolerations"]
    assert {"operator": "Exists"} in spec["tolerations"]
    assert "nvidia.com/gpu" not in str(pod_specs("default")["worker"])


@everywhere
def test_the_notes_name_what_the_release_has(values: str, tmp_path: Path) -> None:
    notes = render_notes(values, tmp_path)
    objects = {(thing["kind"].lower(), thing["metadata"]["name"]): thing for thing in render(values)}
    for name, workload in workloads(values).items():
        if workload["kind"] == "StatefulSet":
            pod = {"spec": {"ports": [{"port": port} for port in _ports(values, name)]}}
            for index in range(workload["spec"]["replicas"]):
                objects["pod", f"{workload['metadata']['name']}-{index}"] = pod
    named = re.findall(r"\b(deployment|statefulset|service|pod)/(\S+)", notes)
    assert {kind for kind, _ in named} >= {"deployment", "service", "pod"}
    assert [one for one in named if one not in objects] == []

    forwarded = re.findall(r"port-forward (\w+)/(\S+) ([\d: ]+) &", notes)
    ports = [(kind, name, int(pair.split(":")[1])) for kind, name, pairs in forwarded for pair in pairs.split()]
    ports += [("service", name, int(port)) for name, port in re.findall(r"([\w-]+)\.default:(\d+)", notes)]
    assert len(ports) == 4 + workloads(values)["scheduler"]["spec"]["replicas"]
    for kind, name, port in ports:
        assert port in {item["port"] for item in objects[kind, name]["spec"]["ports"]}

    hosts = environment(values, "gateway").get("QUIRE_ALLOWED_HOSTS", "")
    assert ("gateway.allowedHosts" in notes) == bool(hosts)
    assert hosts.replace(",", ", ") in notes

    secrets = re.findall(r"\bsecret (\S+?)\.?\n", f"{notes}\n")
    assert [("secret", name) for name in secrets if ("secret", name) not in objects] == []
    assert bool(secrets) == any(kind == "secret" for kind, _ in objects)


def _ports(values: str, name: str) -> set[int]:
    """Ports of a workload's container, and the scheduler's admin port, which only port-forward reaches."""
    admin = environment(values, name).get("QUIRE_SCHEDULER_ADMIN_PORT")
    return {port["containerPort"] for port in container(values, name)["ports"]} | ({int(admin)} if admin else set())


@pytest.mark.parametrize("secret", ["", "of-clients"])
def test_the_helm_test_sends_a_host_that_every_gateway_allows(secret: str) -> None:
    values: Object = {
        "insecure": True,
        "gateway": {"allowedHosts": ["api.example.com"], "tls": {"existingSecret": secret}},
    }
    (pod,) = (thing for thing in render_release("test", values) if thing["kind"] == "Pod")
    (_, _, program, url) = pod["spec"]["containers"][0]["command"]
    sent = f"""
import sys, urllib.request
urllib.request.urlopen = lambda request, **options: print(request.get_header("Host"), request.full_url)
{program}
"""
    done = subprocess.run([sys.executable, "-c", sent, url], capture_output=True, text=True, check=True, timeout=60)
    host, called = done.stdout.split()
    assert called == url
    AllowedHosts(["api.example.com"]).check(host)


@everywhere
def test_a_drain_evicts_one_of_several_pods_and_is_never_blocked_for_good(values: str) -> None:
    budgets = of_kind(values, "PodDisruptionBudget")
    for name, workload in workloads(values).items():
        if name in of_service(values, "worker"):
            assert (name in budgets) == (workload["spec"]["replicas"] > 1)
    assert {"gateway", "scheduler"} <= set(budgets)
    for name, budget in budgets.items():
        assert budget["spec"]["maxUnavailable"] == 1
        # Pods that are not ready are evicted in any case: a worker may be loading for half an hour.
        assert budget["spec"]["unhealthyPodEvictionPolicy"] == "AlwaysAllow"
        assert budget["spec"]["selector"] == workloads(values)[name]["spec"]["selector"]


@pytest.mark.parametrize(
    ("worker", "expected"),
    [({"replicas": 8, "maxUnavailable": "25%"}, ["25%"]), ({"replicas": 8, "maxUnavailable": None}, [])],
)
def test_the_budget_of_workers_is_a_value(worker: Object, expected: list[str]) -> None:
    objects = render_release("test", {"worker": worker})
    budgets = [thing for thing in objects if thing["kind"] == "PodDisruptionBudget"]
    assert [one["spec"]["maxUnavailable"] for one in budgets if one["metadata"]["name"] == "test-quire-worker"] == (
        expected
    )


@everywhere
def test_a_new_worker_is_ready_before_an_old_one_drains(values: str) -> None:
    for name in of_service(values, "worker"):
        spec = workloads(values)[name]["spec"]
        assert spec["strategy"]["rollingUpdate"] == {"maxSurge": 1, "maxUnavailable": 0}
        probe = container(values, name)["startupProbe"]
        assert spec["progressDeadlineSeconds"] > probe["periodSeconds"] * probe["failureThreshold"]
        assert spec["template"]["spec"]["terminationGracePeriodSeconds"] >= 300


@everywhere
def test_a_gateway_may_wait_for_a_worker_that_loads(values: str) -> None:
    deadline = workloads(values)["gateway"]["spec"]["progressDeadlineSeconds"]
    for name in of_service(values, "worker"):
        assert deadline >= workloads(values)[name]["spec"]["progressDeadlineSeconds"]


def test_an_upgrade_leaves_the_number_of_pods_to_an_autoscaler() -> None:
    alone: Object = {"gateway": {"replicas": None}, "worker": {"replicas": None}}
    for values in (alone, alone | {"models": [{"workers": None}]}):
        objects = render_release("test", values)
        deployments = [one for one in objects if one["kind"] == "Deployment"]
        assert len(deployments) == 2
        assert not any("replicas" in one["spec"] for one in deployments)
        budgets = {one["metadata"]["name"] for one in objects if one["kind"] == "PodDisruptionBudget"}
        assert {one["metadata"]["name"] for one in deployments} < budgets
        for one in objects:
            validate(one, OLDEST_KUBERNETES)


def test_without_room_for_another_worker_old_ones_are_replaced_in_place() -> None:
    in_place = {"maxSurge": 0, "maxUnavailable": "25%"}
    objects = render_release("test", {"worker": {"replicas": 8, "rollingUpdate": in_place}})
    strategies = {one["metadata"]["name"]: one["spec"]["strategy"] for one in objects if one["kind"] == "Deployment"}
    assert strategies["test-quire-worker"] == {"rollingUpdate": in_place}
