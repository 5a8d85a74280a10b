"""The version of a model on which a request runs, and when a version is removed."""

import asyncio

import pytest
from google.protobuf.timestamp_pb2 import Timestamp

from quire.worker.v1 import worker_pb2 as worker_v1
from scheduler_svc.core.limits import SchedulerLimits
from scheduler_svc.core.replica import Replica
from scheduler_svc.core.scheduler import Scheduler
from scheduler_svc.model_versions import ModelVersion, ModelVersions
from scheduler_svc.step_wire import shape_from_proto

TIMEOUT = 60


@pytest.fixture
def models() -> ModelVersions:
    return ModelVersions(lambda: Scheduler(SchedulerLimits()), TIMEOUT)


def join(
    models: ModelVersions,
    name: str,
    fingerprint: bytes,
    address: str = "",
    *,
    tokenizer: bytes = b"tokens",
    started_at: int = 0,
) -> tuple[ModelVersion, Replica]:
    description = worker_v1.DescribeResponse(
        model=name,
        fingerprint=fingerprint,
        tokenizer_fingerprint=tokenizer,
        context_length=100,
        block_size=4,
        num_blocks=32,
        max_step_tokens=8,
        started_at=Timestamp(seconds=started_at),
    )
    model, replica = models.for_worker(description, address, 0.0), Replica(shape_from_proto(description), address)
    model.add_worker(replica, asyncio.Event(), description)
    model.core.add_replica(replica)
    return model, replica


def test_models_are_listed_in_the_order_in_which_their_workers_came(models: ModelVersions) -> None:
    waiting = models.for_request("never served", b"", b"", 0.0)
    first, second = join(models, "b", b"1")[0], join(models, "a", b"2")[0]
    assert models.listed == [first, second]
    assert list(models) == [waiting, first, second]


def test_a_model_keeps_its_place_when_its_version_is_replaced(models: ModelVersions) -> None:
    old, replica = join(models, "b", b"1")
    second = join(models, "a", b"2")[0]
    new = join(models, "b", b"3")[0]
    old.remove_worker(replica, 0.0)
    models.discard(old)
    assert models.listed == [new, second]


def test_a_request_without_tokens_goes_to_the_version_with_most_workers(models: ModelVersions) -> None:
    old = [join(models, "m", b"old")[0] for _ in range(2)]
    new = join(models, "m", b"new")[0]
    assert old[0] is old[1] is models.for_request("m", b"", b"", 0.0)
    join(models, "m", b"new")
    assert models.for_request("m", b"", b"", 0.0) is new
    assert models.listed == [new]


@pytest.mark.parametrize("order", [(0, 1), (1, 0)], ids=["old first", "new first"])
def test_of_equally_many_workers_those_that_started_later_are_preferred_by_each_leader(
    models: ModelVersions, order: tuple[int, int]
) -> None:
    fingerprints = (b"old", b"new")
    for number in order:
        join(models, "m", fingerprints[number], started_at=100 + number)
    preferred = models.serving("m")
    assert preferred is not None
    assert preferred.fingerprint == b"new"


def test_a_worker_that_restarts_does_not_make_its_version_the_newer_one(models: ModelVersions) -> None:
    old, replica = join(models, "m", b"old", "here", started_at=100)
    new, _ = join(models, "m", b"new", "there", started_at=200)
    old.remove_worker(replica, 0.0)
    join(models, "m", b"old", "here", started_at=300)
    assert models.serving("m") is new


def test_a_request_runs_on_a_version_with_its_tokenizer(models: ModelVersions) -> None:
    old, replica = join(models, "m", b"old", tokenizer=b"old ids")
    _, (new, _) = (join(models, "m", b"new", tokenizer=b"new ids") for _ in range(2))
    assert models.for_request("m", b"old ids", b"", 0.0) is old
    assert models.for_request("m", b"new ids", b"", 0.0) is models.for_request("m", b"", b"", 0.0) is new
    assert models.listed == [old, new], "the preferred one is the last"
    assert models.first is new
    old.core.retire(replica)
    assert models.listed == [new], "gateways with the old tokenizer submit nothing more"
    assert models.is_superseded(old)
    assert models.replacement(old, b"old ids") is None
    assert models.replacement(old, b"new ids") is new


def test_a_request_waits_for_a_version_with_its_tokenizer_until_none_is_expected(models: ModelVersions) -> None:
    join(models, "m", b"new", tokenizer=b"new ids")
    waiting = models.for_request("m", b"old ids", b"", 100.0)
    assert waiting.description is None
    assert not models.is_gone(waiting, 99.0 + TIMEOUT)
    assert models.is_gone(waiting, 100.0 + TIMEOUT)
    models.all_connected = True
    assert models.is_gone(waiting, 100.0)


def test_workers_that_take_nothing_more_do_not_count(models: ModelVersions) -> None:
    leaving = [join(models, "m", b"old") for _ in range(2)]
    old, new = leaving[0][0], join(models, "m", b"new")[0]
    assert models.serving("m") is old
    assert not models.is_superseded(old)
    for _, replica in leaving:
        old.core.retire(replica)
    assert models.serving("m") is new
    assert models.is_superseded(old)
    assert models.replacement(old, b"") is new
    assert not models.is_superseded(new)


def test_a_request_with_tokens_goes_to_the_version_that_computed_them(models: ModelVersions) -> None:
    old, _ = join(models, "m", b"old")
    for _ in range(2):
        join(models, "m", b"new")
    assert models.for_request("m", b"", b"old", 0.0) is old


def test_the_empty_name_is_that_of_the_model_that_came_first(models: ModelVersions) -> None:
    waiting = models.for_request("", b"", b"", 0.0)
    first, _ = join(models, "a", b"1")
    join(models, "b", b"2")
    assert models.replacement(waiting, b"") is first
    assert models.for_request("", b"", b"", 0.0) is first


def test_requests_that_wait_for_any_version_move_to_the_first_that_comes(models: ModelVersions) -> None:
    waiting = models.for_request("m", b"", b"", 0.0)
    with_tokens = models.for_request("m", b"", b"1", 0.0)
    assert waiting is not with_tokens
    join(models, "other", b"1")
    assert models.replacement(waiting, b"") is None
    came, _ = join(models, "m", b"2")
    assert models.replacement(waiting, b"") is came
    assert models.replacement(with_tokens, b"") is came


def test_a_version_whose_worker_was_lost_is_expected_back_for_a_while(models: ModelVersions) -> None:
    old, replica = join(models, "m", b"old", "here")
    join(models, "m", b"new", "there")
    models.all_connected = True
    assert not models.is_gone(old, 1e9)
    old.remove_worker(replica, 100.0)
    assert not models.is_gone(old, 99.0 + TIMEOUT)
    assert models.is_gone(old, 100.0 + TIMEOUT)


def test_a_version_is_gone_once_another_one_is_at_its_address(models: ModelVersions) -> None:
    old, replica = join(models, "m", b"old", "here")
    old.remove_worker(replica, 100.0)
    join(models, "m", b"new", "there")
    assert not models.is_gone(old, 100.0)
    join(models, "m", b"new", "here")
    assert models.is_gone(old, 100.0)


def test_a_version_is_gone_once_its_workers_have_ended(models: ModelVersions) -> None:
    old, replica = join(models, "m", b"old", "here")
    join(models, "m", b"new", "there")
    old.core.retire(replica)
    old.remove_worker(replica, 100.0)
    assert models.is_gone(old, 100.0)


def test_a_version_of_records_is_gone_once_all_workers_are_connected(models: ModelVersions) -> None:
    recorded = models.for_request("m", b"", b"old", 100.0)
    join(models, "m", b"new")
    assert not models.is_gone(recorded, 100.0)
    models.all_connected = True
    assert models.is_gone(recorded, 100.0)


def test_the_only_version_of_a_model_is_expected_back_for_ever(models: ModelVersions) -> None:
    only, replica = join(models, "m", b"only")
    join(models, "other", b"1")
    only.remove_worker(replica, 0.0)
    models.all_connected = True
    assert not models.is_gone(only, 1e9)


def test_a_name_that_no_worker_has_is_given_up_once_all_are_connected(models: ModelVersions) -> None:
    unknown = models.for_request("renamed", b"", b"1", 100.0)
    join(models, "m", b"1")
    assert not models.is_gone(unknown, 1e9)
    models.all_connected = True
    assert not models.is_gone(unknown, 99.0 + TIMEOUT)
    assert models.is_gone(unknown, 100.0 + TIMEOUT)


def test_a_model_is_listed_for_a_while_after_its_last_worker_left(models: ModelVersions) -> None:
    model, replica = join(models, "m", b"1")
    model.remove_worker(replica, 100.0)
    assert not models.expire(99.0 + TIMEOUT)
    assert models.listed == [model]
    assert models.expire(100.0 + TIMEOUT)
    assert models.listed == []
    assert not models.expire(200.0 + TIMEOUT)
    assert join(models, "m", b"1")[0] is model
    assert models.listed == [model]


def test_what_a_discarded_version_counted_stays(models: ModelVersions) -> None:
    for _ in range(2):
        version, replica = join(models, "m", b"1")
        version.core.totals.generation_tokens += 5
        version.remove_worker(replica, 0.0)
        models.discard(version)
    assert models.discarded_totals("m").generation_tokens == 10
    assert models.discarded_totals("other").generation_tokens == 0
