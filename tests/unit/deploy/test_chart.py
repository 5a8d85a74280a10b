"""The rendered chart: valid for Kubernetes, least privilege, and network access for callers only."""

import json
import re
import shutil
from pathlib import Path

import kubernetes_validate
import pytest
import yaml

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
    workloads,
)

OLDEST_KUBERNETES = "1.27.0"


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
        {"model": {"servedModelName": ["a b"]}},
        {"model": {"servedModelName": ["a", "a"]}},
        {"model": {"name": "org/model"}, "models": [{"name": "org/model"}]},
        {"model": {"overrideGenerationConfig": {"top_k": 3}}, "models": [{"name": "org/model"}]},
        {"models": [{"name": "org/model"}, {"name": "org/model", "revision": "v2"}]},
        {"models": [{"servedModelName": ["a", "b"]}, {"servedModelName": ["c", "b"]}]},
        {"models": [{"servedModelName": ["a.b"]}, {"servedModelName": ["a-b"]}]},
        {"models": [{"volume": {"existingClaim": "models"}}]},
        {"models": [{"workers": -1}]},
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
    assert f"port-forward statefulset/{name} {port} " in notes
