"""Names and labels of the chart's objects: valid for every name of a release, and different for different releases."""

import re
from collections.abc import Iterator
from functools import cache

import kubernetes_validate
import pytest

from helm_chart import CHART, Object, helm, render_release, validate

LONGEST = 53
"""Characters of a release's name that Helm allows."""
RELEASES = [
    "quire",
    "a-release-that-has-37-characters-in-it",
    LONGEST * "x",
    f"{(LONGEST - 6) * 'x'}-quire",
    f"{32 * 'x'}-cut-at-a-dash",
    "with.dots.in-it",
    "1234",
    "1e5",
    "null",
]
MODELS: dict[str, Object] = {
    "one": {"monitoring": {"podMonitor": {"enabled": True}, "dashboard": {"enabled": True}}},
    "several": {
        "models": [
            {"servedModelName": ["organisation/a-model-with-a-long-name"], "workers": 3},
            {"servedModelName": ["small"], "workers": 2},
            {"servedModelName": ["_"]},
        ]
    },
}
some_models = pytest.mark.parametrize("models", MODELS)

_LABEL_VALUE = re.compile(r"[A-Za-z0-9]([-A-Za-z0-9_.]{0,61}[A-Za-z0-9])?")
_SERVICE_NAME = re.compile(r"[a-z]([-a-z0-9]{0,61}[a-z0-9])?")
_STATEFUL_SET_CHARACTERS = 52
"""The label controller-revision-hash of its pods is its name, a dash and a hash of up to 10 characters: 63 in all."""


@cache
def render_models(release: str, models: str) -> list[Object]:
    return render_release(release, MODELS[models])


@some_models
@pytest.mark.parametrize("release", RELEASES)
def test_objects_of_any_release_are_valid(release: str, models: str) -> None:
    _check_objects(render_models(release, models))


def _check_objects(objects: list[Object]) -> None:
    for thing in objects:
        validate(thing, kubernetes_validate.latest_version())
        name = thing["metadata"]["name"]
        # Services have the strictest names; other objects are called like them.
        assert _SERVICE_NAME.fullmatch(name), name
        if thing["kind"] == "StatefulSet":
            assert len(name) <= _STATEFUL_SET_CHARACTERS
        for labels in _labels(thing):
            for value in labels.values():
                assert _LABEL_VALUE.fullmatch(value), value
        for item in _containers(thing):
            assert _SERVICE_NAME.fullmatch(item["name"])
    names = [(thing["kind"], thing["metadata"]["name"]) for thing in objects]
    assert len(names) == len(set(names))


@some_models
@pytest.mark.parametrize("release", RELEASES)
def test_objects_of_any_release_find_each_other(release: str, models: str) -> None:
    objects = render_models(release, models)
    names = {kind: {one["metadata"]["name"] for one in objects if one["kind"] == kind} for kind in _kinds(objects)}
    for thing in objects:
        if thing["kind"] == "StatefulSet":
            assert thing["spec"]["serviceName"] in names["Service"]
        for used in re.findall(r"'secretKeyRef': {'name': '([^']*)'", str(thing)):
            assert used in names["Secret"]
        for used in re.findall(r"'serviceAccountName': '([^']*)'", str(thing)):
            assert used in names["ServiceAccount"]
        for item in _containers(thing):
            addresses = {one["name"]: one.get("value", "") for one in item.get("env", [])}
            for address in addresses.get("QUIRE_WORKERS_AT", "").split(",") if "QUIRE_WORKERS_AT" in addresses else []:
                assert address.removesuffix(":50053") in names["Service"]
            if "QUIRE_SCHEDULERS_AT" in addresses:
                for index, address in enumerate(addresses["QUIRE_SCHEDULERS_AT"].split(",")):
                    pod, service = address.removesuffix(":50052").split(".")
                    assert service in names["Service"]
                    assert pod == f"{service}-{index}"
            if "QUIRE_REDIS_URL" in addresses:
                (host,) = re.findall(r"@([^:]+):6379", addresses["QUIRE_REDIS_URL"])
                assert host in names["Service"]


@some_models
@pytest.mark.parametrize(
    ("one", "other"), [(52 * "x" + "1", 52 * "x" + "2"), ("a.b", "a-b"), ("1a", "n1a"), (45 * "x", f"{45 * 'x'}-y")]
)
def test_releases_have_no_name_in_common(one: str, other: str, models: str) -> None:
    first, second = ({thing["metadata"]["name"] for thing in render_models(name, models)} for name in (one, other))
    assert first & second == set()


def test_names_that_fit_are_not_changed() -> None:
    names = {thing["metadata"]["name"] for thing in render_models("quire", "one")}
    parts = ("gateway", "scheduler", "worker", "redis", "test", "metrics", "dashboard")
    assert names == {"quire", *(f"quire-{part}" for part in parts)}
    fits = 36 * "x"
    names = {thing["metadata"]["name"] for thing in render_models(fits, "one")}
    assert f"{fits}-quire-scheduler" in names


def test_models_with_like_names_have_workers_of_their_own() -> None:
    names = ["Qwen/Qwen3-Embedding-0.6B", "Qwen/Qwen3-Embedding-4B", "a.b", "a-b"]
    objects = render_release("quire", {"models": [{"name": name} for name in names]})
    _check_objects(objects)
    deployments = [thing["metadata"]["name"] for thing in objects if thing["kind"] == "Deployment"]
    # The first of a label keeps it: its workers are not renamed where another model is added.
    labels = ("qwen-qwen3-embedding", "qwen-qwen3-bffb3c7d", "a-b", "a-b-d44362d6")
    assert [name for name in deployments if "-worker-" in name] == [f"quire-worker-{label}" for label in labels]


def test_common_labels_replace_those_of_the_chart_but_the_selectors() -> None:
    common = {"app.kubernetes.io/part-of": "shop", "app.kubernetes.io/version": "1.10"}
    objects = render_release("test", {"commonLabels": common})  # refuses duplicate keys
    _check_objects(objects)
    for thing in objects:
        assert thing["metadata"]["labels"].items() >= common.items()
    for name in ("name", "instance", "component"):
        label = f"app.kubernetes.io/{name}"
        done = helm("template", "test", str(CHART), values={"commonLabels": {label: "a"}})
        assert done.returncode != 0
        assert "commonLabels" in done.stderr


@pytest.mark.parametrize("override", ["fullnameOverride", "nameOverride"])
def test_overridden_names_become_valid(override: str) -> None:
    for name in ("Upper.Case", f"{49 * 'y'}._y"):
        _check_objects(render_release("test", {override: name}))
    assert helm("template", "test", str(CHART), values={override: "a_"}).returncode != 0


def _kinds(objects: list[Object]) -> set[str]:
    return {thing["kind"] for thing in objects}


def _labels(thing: object) -> Iterator[dict[str, str]]:
    """All labels and selectors in an object."""
    if isinstance(thing, dict):
        for key, value in thing.items():
            if key in ("labels", "matchLabels") or (key == "selector" and "matchLabels" not in value):
                yield value
            else:
                yield from _labels(value)
    elif isinstance(thing, list):
        for item in thing:
            yield from _labels(item)


def _containers(thing: Object) -> list[Object]:
    spec = thing["spec"] if thing["kind"] == "Pod" else thing.get("spec", {}).get("template", {}).get("spec", {})
    return [*spec.get("containers", []), *spec.get("initContainers", [])]
