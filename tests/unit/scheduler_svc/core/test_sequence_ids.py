"""Ids of sequences ascend with their requests."""

from scheduler_svc.core.sequence_ids import SequenceIds


def test_ids_of_later_requests_are_larger_whenever_they_are_made() -> None:
    ids = SequenceIds()
    first, later = [ids.of_request(0)], [ids.of_request(1)]
    first += [ids.of_request(0) for _ in range(1_000)]
    later += [ids.of_request(1) for _ in range(1_000)]
    assert max(first) < min(later)


def test_ids_of_a_request_are_unique_and_ascend() -> None:
    ids = SequenceIds()
    made = [ids.of_request(arrival) for arrival in (7, 3, 7, 7, 3)]
    assert len(set(made)) == len(made)
    assert made[0] < made[2] < made[3]
    assert made[1] < made[4]


def test_ids_of_billions_of_requests_fit_the_contract() -> None:
    assert SequenceIds().of_request(2**32 - 1) < 2**64
