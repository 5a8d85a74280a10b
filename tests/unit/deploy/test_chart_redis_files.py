"""The chart's scheduler finds the files for TLS to a Redis of the operator's, and for the encryption of records."""

from typing import Any

import pytest

from helm_chart import component, render_release

EXTERNAL = {"enabled": False, "externalUrl": "rediss+sentinel://a:26379,b:26379/records/0"}


def scheduler_of(**values: dict[str, str]) -> tuple[dict[str, str], dict[str, Any], dict[str, Any]]:
    """Variables, mounts and volumes of a scheduler."""
    objects = render_release("test", {"redis": {**EXTERNAL, **values}})
    (workload,) = [one for one in objects if one["kind"] == "StatefulSet" and component(one) == "scheduler"]
    spec = workload["spec"]["template"]["spec"]
    (container,) = spec["containers"]
    variables = {item["name"]: item.get("value", "") for item in container["env"]}
    mounts = {item["name"]: item for item in container["volumeMounts"]}
    return variables, mounts, {item["name"]: item for item in spec["volumes"]}


@pytest.mark.parametrize(
    ("tls", "files"),
    [
        ({"existingSecret": "store"}, {"CA": "ca.crt"}),
        (
            {"existingSecret": "store", "caKey": "ca.pem", "certKey": "tls.crt", "privateKeyKey": "tls.key"},
            {"CA": "ca.pem", "CERT": "tls.crt", "KEY": "tls.key"},
        ),
        ({"existingSecret": "store", "caKey": "", "certKey": "both.pem"}, {"CERT": "both.pem"}),
    ],
    ids=["CA", "CA and certificate", "certificate"],
)
def test_files_of_a_secret_are_mounted_and_named(tls: dict[str, str], files: dict[str, str]) -> None:
    variables, mounts, volumes = scheduler_of(tls=tls)
    directory = mounts["redis-tls"]["mountPath"]
    assert mounts["redis-tls"]["readOnly"]
    assert volumes["redis-tls"]["secret"] == {"secretName": "store"}
    named = {name: value for name, value in variables.items() if name.startswith("QUIRE_REDIS_") and "FILE" in name}
    assert named == {f"QUIRE_REDIS_{name}_FILE": f"{directory}/{key}" for name, key in files.items()}
    assert variables["QUIRE_REDIS_URL"] == EXTERNAL["externalUrl"]


def test_without_a_secret_there_are_no_files() -> None:
    variables, mounts, volumes = scheduler_of()
    assert not [name for name in variables if "_FILE" in name]
    assert not {"redis-tls", "record-keys"} & (mounts.keys() | volumes.keys())


def test_the_keys_of_records_are_mounted_and_named() -> None:
    variables, mounts, volumes = scheduler_of(recordKeys={"existingSecret": "keys", "key": "of-records.toml"})
    assert variables["QUIRE_RECORD_KEYS_FILE"] == f"{mounts['record-keys']['mountPath']}/of-records.toml"
    assert mounts["record-keys"]["readOnly"]
    assert volumes["record-keys"]["secret"] == {"secretName": "keys"}
