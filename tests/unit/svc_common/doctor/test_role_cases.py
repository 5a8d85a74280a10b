"""The environments of roles under `make run`."""

from pathlib import Path

import pytest

from svc_common.doctor.role_cases import role_cases


def test_workers_of_each_model_are_a_case(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    models = tmp_path / "models.toml"
    models.write_text('[[models]]\nmodel = "a/one"\nworkers = 2\n[[models]]\nmodel = "b/two"\n')
    monkeypatch.setenv("QUIRE_MODELS", str(models))
    monkeypatch.setenv("QUIRE_GATEWAYS", "2")
    one, two = role_cases("worker")
    assert (one.label, one.num_processes, one.environment["QUIRE_MODEL"]) == ("worker of a/one", 2, "a/one")
    assert (two.label, two.num_processes) == ("worker of b/two", 1)
    (gateways,) = role_cases("gateway")
    assert (gateways.label, gateways.num_processes) == ("gateway", 2)


def test_an_embedded_redis_is_no_subject_of_the_scheduler(monkeypatch: pytest.MonkeyPatch) -> None:
    (embedded,) = role_cases("scheduler")
    monkeypatch.setenv("QUIRE_REDIS_URL", "redis://:word@127.0.0.1:7000/0")
    (own,) = role_cases("scheduler")
    assert embedded.skipped - own.skipped == {"redis"}
    assert own.environment["QUIRE_REDIS_URL"] == "redis://:word@127.0.0.1:7000/0"


def test_with_a_model_that_is_not_there_the_other_checks_are_left(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("QUIRE_MODELS", "/no/such/file.toml")
    (case,) = role_cases("worker")
    assert {"model", "memory"} <= case.skipped
    assert case.environment == {}
