"""Models in the chart: each is prepared on the pods that read it, and has its own workers."""

import json
import tempfile
from pathlib import Path

import yaml

from gateway_svc.generation_config import load_generation_defaults
from helm_chart import (
    CHART,
    CHAT_TEMPLATE,
    VALUES,
    Object,
    StrictLoader,
    container,
    environment,
    everywhere,
    helm,
    of_service,
    pod_specs,
    render,
    workloads,
)
from svc_common.model_settings import ModelSettings, read_models_file

CACHES = {"QUIRE_CACHE_DIR", "HF_HOME"}
NAMING = {"QUIRE_MODEL", "QUIRE_REVISION", "QUIRE_TOKENIZER", "QUIRE_TOKENIZER_REVISION", "QUIRE_SERVED_MODEL_NAME"}
"""The variables that name a model."""


def init_containers(values: str, name: str) -> list[Object]:
    containers = list(pod_specs(values)[name]["initContainers"])
    assert len({item["name"] for item in containers}) == len(containers)
    return containers


def named_by(item: Object) -> dict[str, str]:
    """Variables of a container that name models or where they are."""
    names = CACHES | NAMING | {"QUIRE_MODELS"}
    return {variable["name"]: variable["value"] for variable in item["env"] if variable["name"] in names}


def read_by(values: str, name: str) -> dict[str, str]:
    return named_by(container(values, name))


@everywhere
def test_every_model_is_prepared_where_it_is_read(values: str) -> None:
    for name in of_service(values, "worker"):
        (item,) = init_containers(values, name)
        assert item["image"] == container(values, name)["image"]
        assert item["command"] == ["python", "-m", "worker_svc.prepare"]
        assert named_by(item) == read_by(values, name)


@everywhere
def test_gateways_prepare_no_weights(values: str) -> None:
    *conversions, item = init_containers(values, "gateway")
    assert item["image"] == container(values, "gateway")["image"]
    assert item["command"] == ["python", "-m", "gateway_svc.prepare"]
    assert named_by(item) == read_by(values, "gateway")
    mounts = {mount["name"] for mount in item["volumeMounts"]}
    assert mounts >= {"models", "tmp"} | ({"models-file"} if values == "models" else set())
    # Only the worker's image converts GGUF files.
    converted = [name for name in of_service(values, "worker") if ".gguf" in str(read_by(values, name))]
    assert [named_by(one) for one in conversions] == [read_by(values, name) for name in converted]
    assert {one["image"] for one in conversions} <= {container(values, of_service(values, "worker")[0])["image"]}
    assert bool(conversions) == (values in ("gguf", "models"))


@everywhere
def test_what_is_prepared_can_be_written(values: str) -> None:
    for name in ("gateway", *of_service(values, "worker")):
        for item in init_containers(values, name):
            mounts = {mount["mountPath"]: mount for mount in item["volumeMounts"]}
            assert not mounts["/models"].get("readOnly")
            assert {"/models/quire", "/models/huggingface"} <= set(named_by(item).values())


def test_what_prepares_gets_its_variables_from_the_values() -> None:
    values = VALUES["everything"]["prepare"]
    items = [one for name in ("gateway", "worker") for one in init_containers("everything", name)]
    assert len(items) == 2
    for item in items:
        variables = {variable["name"]: variable for variable in item["env"]}
        assert len(variables) == len(item["env"])
        assert [variables[one["name"]] for one in values["env"]] == values["env"]
        assert item["envFrom"] == values["envFrom"]
        assert variables["HF_TOKEN"]["valueFrom"]["secretKeyRef"] == {"name": "hub", "key": "token"}
        bundle = {variables[name]["value"] for name in ("SSL_CERT_FILE", "PIP_CERT")}
        (mount,) = [one for one in item["volumeMounts"] if one["name"] == "ca-bundle"]
        assert bundle == {f"{mount['mountPath']}/{values['caBundle']['key']}"}
    for name in ("gateway", "worker"):
        (volume,) = [one for one in pod_specs("everything")[name]["volumes"] if one["name"] == "ca-bundle"]
        assert volume["configMap"] == {"name": values["caBundle"]["existingConfigMap"]}
        # The services themselves download nothing.
        assert not {"HF_TOKEN", "HTTPS_PROXY", "SSL_CERT_FILE"} & environment("everything", name).keys()
    assert all("envFrom" not in one for one in init_containers("default", "gateway"))


@everywhere
def test_the_model_is_named_by_the_values(values: str) -> None:
    first, *_ = (read_by(values, name) for name in of_service(values, "worker"))
    has_several = "models" in VALUES[values]
    named = {"everything": NAMING, "gguf": {"QUIRE_MODEL"}}.get(values, set())
    named = {"QUIRE_SERVED_MODEL_NAME"} if has_several else named
    assert first.keys() == CACHES | named
    if has_several:
        # With several models, gateways get them from the file.
        first = {key: value for key, value in first.items() if key in CACHES}
        first["QUIRE_MODELS"] = "/etc/quire/models/models.toml"
    assert read_by(values, "gateway") == first


def models_file() -> list[ModelSettings]:
    """The models that gateways read."""
    (config_map,) = [thing for thing in render("models") if thing["kind"] == "ConfigMap"]
    (volume,) = [item for item in pod_specs("models")["gateway"]["volumes"] if item["name"] == "models-file"]
    assert volume["configMap"]["name"] == config_map["metadata"]["name"]
    (mount,) = [item for item in container("models", "gateway")["volumeMounts"] if item["name"] == "models-file"]
    ((name, text),) = config_map["data"].items()
    assert environment("models", "gateway")["QUIRE_MODELS"] == f"{mount['mountPath']}/{name}"
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory) / name
        # A path below /models exists only inside a pod.
        path.write_text(text.replace('"/models/small.gguf"', '"org/small"'))
        return read_models_file(path)


def test_gateways_serve_what_workers_have() -> None:
    chat, large, small = models_file()
    assert (chat.model, chat.served_names) == (None, ("chat", "default"))
    assert (large.model, large.revision) == ("org/Model_7B", "v1.2")
    assert (large.tokenizer, large.tokenizer_revision) == ("org/tokenizer", "1234567")
    assert (large.chat_template, large.generation_config) == (CHAT_TEMPLATE, "auto")
    assert (chat.chat_roles, large.chat_roles) == ((), ("ipython", "critic"))
    assert (chat.tool_format, chat.reasoning_format) == ("auto", "auto")
    assert (large.tool_format, large.reasoning_format, large.task) == ("hermes", "none", "generate")
    config = VALUES["models"]["models"][1]["overrideGenerationConfig"]
    assert json.loads(large.override_generation_config or "") == config
    assert load_generation_defaults("quire", large.override_generation_config, Path()).max_tokens == 4_000_000
    variables = VALUES["models"]["models"][1]["chatTemplateKwargs"]
    assert json.loads(large.chat_template_kwargs or "") == variables
    assert small.names == ("small",)
    for model, worker in zip((chat, large), of_service("models", "worker"), strict=False):
        assert model.environment.items() <= environment("models", worker).items()


def test_each_model_has_workers_of_its_own() -> None:
    workers = {name: workloads("models")[name] for name in of_service("models", "worker")}
    assert list(workers) == ["worker-chat", "worker-org-model-7b", "worker-small"]
    assert [worker["spec"]["replicas"] for worker in workers.values()] == [1, 2, 0]
    variables = [environment("models", name) for name in workers]
    assert [one["QUIRE_DTYPE"] for one in variables] == ["bfloat16", "float16", "bfloat16"]
    assert [one.get("QUIRE_MAX_MODEL_LEN") for one in variables] == [None, "131072", None]
    limits = [container("models", name)["resources"]["limits"] for name in workers]
    assert [limit["memory"] for limit in limits] == ["16Gi", "64Gi", "16Gi"]
    assert [limit.get("nvidia.com/gpu") for limit in limits] == [1, 4, None]
    for worker in workers.values():
        # The label of a revision, which is the set's name and a hash of 10 characters, has 63 at most.
        assert len(worker["metadata"]["name"]) <= 52


def test_gateways_start_anew_where_their_models_change() -> None:
    def checksum(values: Object) -> str:
        done = helm("template", "test", str(CHART), "--show-only", "templates/gateway.yaml", values=values)
        assert done.returncode == 0, done.stderr
        (gateway,) = [one for one in yaml.load_all(done.stdout, StrictLoader) if one and one["kind"] == "Deployment"]
        annotations = gateway["spec"]["template"]["metadata"]["annotations"]
        assert annotations["a"] == "b"
        return str(annotations["checksum/models"])

    values = VALUES["models"]
    more = values | {"models": [*values["models"], {"name": "org/other"}]}
    assert checksum(values) == checksum(values) != checksum(more)
    assert "annotations" not in workloads("default")["gateway"]["spec"]["template"]["metadata"]
