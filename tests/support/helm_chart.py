"""The chart rendered by helm, and the contents of its objects."""

import json
import shutil
import subprocess
import sys
from functools import cache
from importlib import resources
from pathlib import Path
from typing import Any

import pytest
import yaml
from jsonschema import Draft202012Validator
from referencing import Registry, Resource

import prometheus_operator
from gateway_svc.settings import GatewaySettings
from scheduler_svc.settings import SchedulerSettings
from svc_common.settings import ServiceSettings, read_settings
from worker_svc.settings import WorkerSettings

CHART = Path(__file__).parents[2] / "deploy" / "helm" / "quire"
HELM = str(Path(sys.executable).with_name("helm"))

Object = dict[str, Any]

CHAT_TEMPLATE = """{%- for message in messages %}
  {{- "$(" + message.role + ") '" + message['content'] }}\\n
{%- endfor %}
"""

MONITORING: Object = {name: {"enabled": True} for name in ("podMonitor", "rules", "dashboard")}

VALUES: dict[str, Object] = {
    "default": {},
    "gpu": {
        "worker": {"gpus": 2, "replicas": 3, "runtimeClassName": "nvidia", "tolerations": [{"operator": "Exists"}]}
    },
    "external_redis": {
        "redis": {"enabled": False, "externalUrl": "redis://redis.example.com:6379/0", "prefix": "team-b"}
    },
    "external_redis_secret": {"redis": {"enabled": False, "externalUrlSecret": {"name": "store"}}},
    "open": {
        "networkPolicy": {"enabled": False},
        "serviceAccount": {"create": False},
        "monitoring": {"podMonitor": {"enabled": True}},
    },
    "monitoring": {"models": [{"servedModelName": ["a"]}, {"servedModelName": ["b"]}], "monitoring": MONITORING},
    "models": {
        "fullnameOverride": "a-name-that-is-too-long-for-what-is-put-behind-it",
        "model": {"dtype": "bfloat16", "volume": {"existingClaim": "models"}},
        "models": [
            {"servedModelName": ["chat", "default"]},
            {
                "name": "org/Model_7B",
                "revision": "v1.2",
                "tokenizer": "org/tokenizer",
                "tokenizerRevision": "1234567",
                "chatTemplate": CHAT_TEMPLATE,
                "chatTemplateKwargs": {"enable_thinking": False, "style of answers": "$(a short one)", "depth": 2},
                "chatRoles": ["ipython", "critic"],
                "toolFormat": "hermes",
                "reasoningFormat": "none",
                "generationConfig": "auto",
                "overrideGenerationConfig": {"temperature": 0.5, "top_k": 0, "max_new_tokens": 4_000_000},
                "task": "generate",
                "dtype": "float16",
                "maxModelLen": 131_072,
                "workers": 2,
                "gpus": 4,
                "resources": {"requests": {"cpu": 8}, "limits": {"memory": "64Gi"}},
            },
            {"name": "/models/small.gguf", "servedModelName": ["small"], "workers": 0, "gpus": 0},
        ],
        "worker": {"gpus": 1},
        "gateway": {"podAnnotations": {"a": "b"}},
    },
    "tls": {
        "insecure": False,
        "mtls": {"secrets": {"gateway": "of-gateways", "scheduler": "of-schedulers", "worker": "of-workers"}},
        "gateway": {"tls": {"existingSecret": "of-clients"}},
    },
    "gguf": {"model": {"name": "/models/model.Q4_0.gguf", "volume": {"existingClaim": "models"}}},
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
            "servedModelName": ["one", "two/three"],
            "chatTemplate": CHAT_TEMPLATE,
            "chatTemplateKwargs": {"enable_thinking": False, "style": "$(a short one)"},
            "chatRoles": ["ipython", "critic"],
            "toolFormat": "hermes",
            "reasoningFormat": "none",
            "generationConfig": "auto",
            "overrideGenerationConfig": {"temperature": 0.5, "top_k": 0, "max_new_tokens": 4_000_000},
            "task": "embed",
            "dtype": "bfloat16",
            "maxModelLen": 131_072,
            "hubToken": {"existingSecret": "hub"},
            "volume": {"existingClaim": "models"},
        },
        "prepare": {
            "env": [
                {"name": "HTTPS_PROXY", "value": "http://proxy.example.com:3128"},
                {"name": "HF_ENDPOINT", "valueFrom": {"configMapKeyRef": {"name": "hub", "key": "url"}}},
            ],
            "envFrom": [{"secretRef": {"name": "pip"}}, {"configMapRef": {"name": "proxy"}, "prefix": "A_"}],
            "caBundle": {"existingConfigMap": "ca", "key": "bundle.pem"},
        },
        "budgets": {
            "blockSize": 16,
            "numBlocks": 2_000_000,
            "maxStepTokens": 2048,
            "maxSequences": 128,
            "swapSpace": 0,
        },
        "auth": {"existingSecret": "keys"},
        "retention": {"seconds": 86_400, "named": "7200", "unnamed": "none"},
        "otel": {"endpoint": "http://collector:4317"},
        "gateway": {
            "allowedHosts": ["api.example.com", "*.internal"],
            "corsOrigins": ["https://chat.example.com"],
            "rootPath": "/llm",
            "streamUsage": True,
            "maxLogprobs": 0,
            "unknownFields": "refuse",
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
        "worker": {"affinity": {"nodeAffinity": {}}, "startupSeconds": 61, "kernelCacheSizeLimit": "3Gi"},
        "redis": {"existingSecret": "redis", "storage": {"storageClassName": "ssd"}},
        "networkPolicy": {
            "gatewayFrom": [{"namespaceSelector": {"matchLabels": {"name": "apps"}}}],
            "metricsFrom": [{"namespaceSelector": {"matchLabels": {"name": "monitoring"}}}],
        },
        "monitoring": {
            "podMonitor": {"enabled": True, "interval": "15s", "labels": {"release": "a"}},
            "rules": {"enabled": True, "labels": {"release": "b"}},
            "dashboard": {"enabled": True, "labels": {"folder": "c"}},
        },
    },
}
RELEASES = {"long_name": "release-" + 45 * "x"}
"""Releases with another name than `test`. Helm allows 53 characters."""
VALUES["long_name"] = {"worker": {"replicas": 2}, "scheduler": {"replicas": 3}}
everywhere = pytest.mark.parametrize("values", VALUES)


class StrictLoader(yaml.SafeLoader):
    """Rejects duplicate keys; other YAML readers silently use the last one."""

    def construct_mapping(self, node: Any, deep: bool = False) -> Any:
        keys = [key.value for key, _ in node.value]
        assert len(keys) == len(set(keys)), f"duplicate key in {keys}"
        return super().construct_mapping(node, deep)


def helm(*arguments: str, values: Object) -> subprocess.CompletedProcess[str]:
    """Runs helm with these values, and with `insecure` unless they have it."""
    complete = json.dumps({"insecure": True} | values)
    return subprocess.run(
        [HELM, *arguments, "--values", "-"], input=complete, capture_output=True, text=True, check=False
    )


@cache
def render(values: str) -> tuple[Object, ...]:
    return tuple(render_release(RELEASES.get(values, "test"), VALUES[values]))


def render_release(release: str, values: Object, chart: Path = CHART, *flags: str) -> list[Object]:
    """The objects of a release with these values. Raises AssertionError with helm's text where it refuses them."""
    done = helm("template", release, str(chart), *flags, values=values)
    assert done.returncode == 0, done.stderr
    return [document for document in yaml.load_all(done.stdout, StrictLoader) if document]


def render_notes(values: str, directory: Path) -> str:
    """The text that helm prints after an installation. `directory` is empty."""
    # helm shows notes of what it installs only: they are rendered here as a template like others.
    chart = shutil.copytree(CHART, directory / "quire")
    (chart / "templates" / "NOTES.txt").rename(chart / "notes")
    (chart / "templates" / "notes.yaml").write_text('{{ dict "notes" (tpl (.Files.Get "notes") .) | toYaml }}\n')
    release = RELEASES.get(values, "test")
    (rendered,) = render_release(release, VALUES[values], chart, "--show-only", "templates/notes.yaml")
    return str(rendered["notes"])


def validate(thing: Object, version: str) -> None:
    """Raises jsonschema.ValidationError unless an object is valid, with no unknown field, for a Kubernetes version."""
    if thing["apiVersion"] == "monitoring.coreos.com/v1":
        Draft202012Validator(prometheus_operator.SCHEMAS[thing["kind"]]).validate(thing)
        return
    group, _, api = str(thing["apiVersion"]).rpartition("/")
    prefix = f"{group.split('.')[0]}-" if group else ""
    _validator(f"{str(thing['kind']).lower()}-{prefix}{api}.json", version).validate(thing)


@cache
def _validator(schema: str, version: str) -> Draft202012Validator:
    return Draft202012Validator(_schema(schema, version), registry=_definitions(version))


@cache
def _definitions(version: str) -> Registry[Any]:
    """The definitions that schemas refer to, a megabyte. `kubernetes_validate.validate` reads them for each object."""
    registry: Registry[Any] = Resource.from_contents(_schema("_definitions.json", version)) @ Registry()
    return registry.crawl()


def _schema(name: str, version: str) -> Any:
    directory = resources.files("kubernetes_validate") / "kubernetes-json-schema" / f"v{version}-local-strict"
    return json.loads((directory / name).read_text())


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


def of_service(values: str, service: str) -> list[str]:
    """Components of a service: one, except for workers, which have one for each model."""
    return [name for name in workloads(values) if name == service or name.startswith(f"{service}-")]


def environment(values: str, name: str) -> dict[str, str]:
    return {item["name"]: item.get("value", "") for item in container(values, name)["env"]}


SETTINGS: dict[str, type[ServiceSettings]] = {
    "gateway": GatewaySettings,
    "scheduler": SchedulerSettings,
    "worker": WorkerSettings,
}


def settings_of(values: str, service: str, monkeypatch: pytest.MonkeyPatch) -> ServiceSettings:
    """The settings that a service reads from its variables."""
    for name, value in environment(values, service).items():
        if name.startswith("QUIRE_") and value:
            monkeypatch.setenv(name, value)
    return read_settings(SETTINGS[service], [])
