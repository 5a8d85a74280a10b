"""Monitoring by the chart: what Prometheus scrapes, and alerts and a dashboard that see it."""

import json
from pathlib import Path

import pytest
import yaml

from docs.tools.alerts import read_alerts
from healthy_series import HEALTHY
from helm_chart import (
    CHART,
    MONITORING,
    VALUES,
    Object,
    container,
    everywhere,
    helm,
    of_kind,
    of_service,
    render_notes,
    render_release,
    workloads,
)
from promtool import check_firing, promtool

NAMES = ("metrics", "alerts", "dashboard")
DASHBOARD = CHART / "files" / "dashboard.json"


def rules_of(release: str, namespace: str, **values: Object) -> Object:
    """The spec of a release's PrometheusRule, which is a file of rules for Prometheus."""
    objects = render_release(release, {"monitoring": MONITORING} | values, CHART, "--namespace", namespace)
    (rules,) = (thing for thing in objects if thing["kind"] == "PrometheusRule")
    return dict(rules["spec"])


def job_of(release: str, namespace: str) -> str:
    """The label that Prometheus gives the series of a release's PodMonitor."""
    objects = render_release(release, {"monitoring": MONITORING}, CHART, "--namespace", namespace)
    (monitor,) = (thing["metadata"] for thing in objects if thing["kind"] == "PodMonitor")
    return f"{monitor['namespace']}/{monitor['name']}"


@everywhere
def test_objects_are_made_where_they_are_enabled(values: str) -> None:
    monitoring = VALUES[values].get("monitoring", {})
    assert bool(of_kind(values, "PodMonitor")) == ("podMonitor" in monitoring)
    assert bool(of_kind(values, "PrometheusRule")) == ("rules" in monitoring)
    assert ("dashboard" in of_kind(values, "ConfigMap")) == ("dashboard" in monitoring)


@pytest.mark.parametrize("values", ["monitoring", "everything"])
def test_all_services_are_scraped(values: str) -> None:
    (monitor,) = of_kind(values, "PodMonitor").values()
    labels = monitor["spec"]["selector"]["matchLabels"].items()
    (endpoint,) = monitor["spec"]["podMetricsEndpoints"]
    scraped = {
        name
        for name, workload in workloads(values).items()
        if labels <= workload["spec"]["template"]["metadata"]["labels"].items()
        and endpoint["port"] in [port["name"] for port in container(values, name)["ports"]]
    }
    assert scraped == {"gateway", "scheduler", *of_service(values, "worker")}
    assert len(of_service(values, "worker")) == (2 if values == "monitoring" else 1)


def test_labels_and_the_interval_are_values() -> None:
    objects = [of_kind("everything", kind) for kind in ("PodMonitor", "PrometheusRule", "ConfigMap")]
    monitor, rules, dashboard = (of_kinds[name] for of_kinds, name in zip(objects, NAMES, strict=True))
    labels = [thing["metadata"]["labels"] for thing in (monitor, rules, dashboard)]
    assert [each["team"] for each in labels] == ["ml", "ml", "ml"]
    assert [each.get("release") for each in labels] == ["a", "b", None]
    assert (labels[2]["folder"], labels[2]["grafana_dashboard"]) == ("c", "1")
    assert monitor["spec"]["podMetricsEndpoints"] == [{"port": "metrics", "interval": "15s"}]


@pytest.mark.parametrize(
    "monitoring",
    [
        {"rules": {"enabled": True}},
        {"podMonitor": {"enabled": True, "interval": "15"}},
        {"podMonitor": {"enabled": True, "labels": {"app.kubernetes.io/name": "a"}}},
        {"alerts": {"enabled": True}},
    ],
    ids=json.dumps,
)
def test_wrong_values_are_rejected(monitoring: Object) -> None:
    assert helm("template", "test", str(CHART), values={"monitoring": monitoring}).returncode != 0


def test_the_rules_are_those_of_the_file_with_matchers_for_the_release(tmp_path: Path) -> None:
    rules = rules_of("test", "ml")
    (tmp_path / "rules.yaml").write_text(yaml.safe_dump(rules))
    promtool("check", "rules", str(tmp_path / "rules.yaml"))
    job = f'job="{job_of("test", "ml")}"'
    for rule, original in zip(rules["groups"][0]["rules"], read_alerts(), strict=True):
        expression = rule["expr"]
        assert expression.count(job) == original["expr"].count("quire_")
        assert expression.replace(f"{{{job}}}", "").replace(f"{job},", "") == original["expr"]
        assert rule["annotations"] == original["annotations"]


def test_alerts_of_a_release_do_not_see_another_one(tmp_path: Path) -> None:
    places = [("test", "ml"), ("test", "other"), ("test-b", "ml")]
    groups = [group for place in places for group in rules_of(*place)["groups"]]
    named = [group | {"name": f"{number}"} for number, group in enumerate(groups)]
    (tmp_path / "rules.yaml").write_text(yaml.safe_dump({"groups": named}))
    jobs = [job_of(*place) for place in places]
    assert len(set(jobs)) == 3
    series = {
        name.replace("{", f'{{job="{job}",'): values
        for job in jobs
        for name, values in HEALTHY.items()
        if job != jobs[1]
    }
    apart = f'quire_workers_set_apart{{job="{jobs[2]}",instance="s0",worker="10.0.0.1:50053"}}'
    missing = [
        {"alertname": alert, "job": jobs[1], "namespace": "other"} for alert in ("QuireNoLeader", "QuireNoGateway")
    ]
    set_apart = {"alertname": "QuireWorkerSetApart", "job": jobs[2], "namespace": "ml"}
    check_firing(tmp_path / "rules.yaml", series | {apart: "1x100"}, {"12m": [*missing, set_apart]}, tmp_path)


def test_the_dashboard_is_the_file() -> None:
    dashboard = of_kind("monitoring", "ConfigMap")["dashboard"]
    assert dashboard["metadata"]["labels"]["grafana_dashboard"] == "1"
    assert json.loads(dashboard["data"]["quire.json"]) == json.loads(DASHBOARD.read_text())


@everywhere
def test_the_notes_say_where_prometheus_cannot_connect(values: str, tmp_path: Path) -> None:
    assert ("networkPolicy.metricsFrom" in render_notes(values, tmp_path)) == (values == "monitoring")
