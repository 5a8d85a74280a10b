"""Every setting of a service can be set in the chart: by a value of its own, or by its variable in `settings`."""

import json
import re
from typing import Any

import pytest

from helm_chart import CHART, SETTINGS, Object, component, helm, render_release
from svc_common.settings import read_settings
from worker_svc.settings import WorkerSettings

SCHEMA = json.loads((CHART / "values.schema.json").read_text())
WITHOUT_A_VALUE = {
    "QUIRE_UDS",  # probes and Services need the HTTP port
    "QUIRE_DEPLOYMENT_SECRET_FILE",  # for services on loopback
    "QUIRE_SCHEDULER_ADMIN_HOST",  # operators reach the admin port by port-forward
}
services = pytest.mark.parametrize("service", SETTINGS)


def offered(service: str) -> dict[str, Any]:
    """The schemas of a service's `settings` by variable."""
    return dict(SCHEMA["definitions"][f"{service}Settings"]["properties"])


def set_by_templates(service: str) -> set[str]:
    texts = [(CHART / "templates" / name).read_text() for name in (f"{service}.yaml", "_helpers.tpl")]
    return set(re.findall(r"QUIRE_[A-Z_]+", " ".join(texts)))


def environments(values: Object) -> dict[str, dict[str, str]]:
    """The variables of each component's container."""
    pods = {
        component(thing): thing["spec"]["template"]["spec"]
        for thing in render_release("test", values)
        if thing["kind"] in ("Deployment", "StatefulSet")
    }
    return {
        name: {item["name"]: item.get("value", "") for item in pod["containers"][0]["env"]}
        for name, pod in pods.items()
    }


@services
def test_every_setting_can_be_set_in_one_place(service: str) -> None:
    documented = {f"QUIRE_{name.upper()}" for name in SETTINGS[service].model_fields}
    assert set(offered(service)) == documented - set_by_templates(service) - WITHOUT_A_VALUE


@services
def test_the_schema_of_settings_has_the_bounds_of_the_code(service: str) -> None:
    properties = SETTINGS[service].model_json_schema()["properties"]
    for variable, schema in offered(service).items():
        declared = properties[variable.removeprefix("QUIRE_").lower()]
        declared = declared.get("anyOf", [declared])[0]
        if "enum" in declared:
            assert schema == {"enum": [*declared["enum"], None]}, variable
        else:
            bounds = {key: declared[key] for key in declared if key.endswith(("inimum", "aximum"))}
            assert schema == {"type": [declared["type"], "null"], **bounds}, variable


def test_settings_become_variables_that_the_service_reads(monkeypatch: pytest.MonkeyPatch) -> None:
    settings = {
        "QUIRE_CPU_KV_BYTES": 16 * 2**30,
        "QUIRE_QUANTIZATION": "w4a16",
        "QUIRE_DETERMINISTIC": True,
        "QUIRE_MEMORY_FRACTION": 0.25,
        "QUIRE_DRAFTER": "$(HOME)",
        "QUIRE_NUM_THREADS": None,
    }
    variables = environments({"worker": {"settings": settings}})["worker"]
    assert "QUIRE_NUM_THREADS" not in variables
    assert variables["QUIRE_DRAFTER"] == "$$(HOME)"  # which Kubernetes turns into $(HOME)
    for name in settings:
        monkeypatch.delenv(name, raising=False)
        if name in variables:
            monkeypatch.setenv(name, variables[name])
    read = read_settings(WorkerSettings, [])
    assert (read.cpu_kv_bytes, read.quantization, read.deterministic) == (16 * 2**30, "w4a16", True)
    assert (read.memory_fraction, read.num_threads) == (0.25, None)


def test_settings_of_one_model_replace_those_of_all_workers() -> None:
    values = {
        "worker": {"settings": {"QUIRE_QUANTIZATION": "w4a16", "QUIRE_DRAFTER": "ngram"}},
        "models": [
            {"servedModelName": ["a"], "settings": {"QUIRE_QUANTIZATION": "none", "QUIRE_DRAFTER": None}},
            {"servedModelName": ["b"]},
        ],
    }
    found = environments(values)
    ours = {
        name: {variable: value for variable, value in found[name].items() if variable in offered("worker")}
        for name in ("worker-a", "worker-b")
    }
    assert ours == {
        "worker-a": {"QUIRE_QUANTIZATION": "none"},
        "worker-b": {"QUIRE_QUANTIZATION": "w4a16", "QUIRE_DRAFTER": "ngram"},
    }


@pytest.mark.parametrize(
    "values",
    [
        {"worker": {"settings": {"QUIRE_QUANTISATION": "w4a16"}}},
        {"worker": {"settings": {"QUIRE_QUANTIZATION": "w3"}}},
        {"worker": {"settings": {"QUIRE_NUM_BLOCKS": 9}}},  # budgets.numBlocks
        {"models": [{"settings": {"QUIRE_MAX_DRAFT_TOKENS": 0}}]},
        {"scheduler": {"settings": {"QUIRE_DETACH_GRACE": "long"}}},
        {"gateway": {"settings": {"QUIRE_UDS": "/tmp/http"}}},
    ],
    ids=json.dumps,
)
def test_wrong_settings_are_rejected(values: Object) -> None:
    assert helm("template", "test", str(CHART), values=values).returncode != 0


@services
@pytest.mark.parametrize("names", [["QUIRE_HOST"], ["QUIRE_LOG_LEVEL"], ["A", "A"]], ids=str)
def test_a_further_variable_does_not_repeat_another_one(service: str, names: list[str]) -> None:
    extra = [{"name": name, "value": "debug"} for name in names]
    done = helm("template", "test", str(CHART), values={service: {"extraEnv": extra}})
    assert f"{service}.extraEnv has {names[0]}, which another value of the chart sets" in done.stderr


@services
def test_further_variables_follow_those_of_the_chart(service: str) -> None:
    """So that they may refer to them, as in $(NAME)."""
    values = {service: {"extraEnv": [{"name": "A", "value": "$(QUIRE_HOST)"}]}}
    assert list(environments(values)[service].items())[-1] == ("A", "$(QUIRE_HOST)")
