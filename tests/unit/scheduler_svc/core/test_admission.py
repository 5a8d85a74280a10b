"""Which requests may wait, and why others are rejected."""

from itertools import count
from typing import Any

import pytest

from scheduler_svc.core.account_limits import NO_LIMITS, AccountLimits
from scheduler_svc.core.admission import Admission, AdmissionLimits, AdmissionRefusal, Rates, Sharing
from scheduler_svc.core.events import Failure
from scheduler_svc.core.output_lengths import OutputLengths
from scheduler_svc.core.request import Request

CONTEXT = 1000
RATES = Rates(tokens_per_second=100.0, prefill_seconds_per_token=0.001, decode_seconds_per_token=0.05)
UNKNOWN = Rates(0.0, 0.0, 0.0)


def request(key: str, num_prompt: int = 50, max_tokens: int = 50, n: int = 1, **fields: Any) -> Request:
    return Request(key, [1] * num_prompt, n, max_tokens, **fields)


def admission(sharing: Sharing = Sharing.BY_TENANT, /, **limits: int) -> Admission:
    return Admission(AdmissionLimits(**limits), sharing)


def refusal(
    queue: Admission, asked: Request, rates: Rates = RATES, now: float = 0.0, slot_seconds: float = 0.0
) -> AdmissionRefusal:
    refused = queue.check(asked, now, CONTEXT, rates, lambda _: slot_seconds)
    assert refused is not None
    return refused


def may_wait(
    queue: Admission, asked: Request, rates: Rates = RATES, now: float = 0.0, slot_seconds: float = 0.0
) -> bool:
    return queue.check(asked, now, CONTEXT, rates, lambda _: slot_seconds) is None


@pytest.mark.parametrize("sharing", Sharing)
@pytest.mark.parametrize("limits", [{"max_requests": 3}, {"max_tokens": 300}])
def test_full_queue_is_unavailable_until_one_leaves(sharing: Sharing, limits: dict[str, int]) -> None:
    queue = admission(sharing, **limits)
    waiting = [request(str(number), tenant=str(number)) for number in range(3)]
    for each in waiting:
        assert may_wait(queue, each)
        queue.enter(each)
    refused = refusal(queue, request("more"))
    assert refused.failure is Failure.UNAVAILABLE
    assert refused.retry_after == pytest.approx(1.0), "100 tokens at 100 a second"
    queue.leave(waiting[1])
    assert may_wait(queue, request("more"))


@pytest.mark.parametrize("sharing", Sharing)
def test_an_account_has_as_many_requests_in_the_queue_as_its_key_allows(sharing: Sharing) -> None:
    queue = admission(sharing)
    two, other = AccountLimits("a/", max_queued=2), AccountLimits("a/other", max_queued=2)
    for number in range(2):
        assert may_wait(queue, request(str(number), tenant="a", limits=two))
        queue.enter(request(str(number), tenant="a", limits=two))
    refused = refusal(queue, request("more", tenant="a", limits=two))
    assert refused.failure is Failure.TENANT_OVER_QUOTA
    assert refused.message == "2 requests of this account wait, and max_queued of its API keys is 2"
    assert refused.retry_after == pytest.approx(1.0), "100 tokens at 100 a second"
    for allowed in (other, AccountLimits("a/", max_queued=3), AccountLimits("a/"), NO_LIMITS):
        assert may_wait(queue, request("more", tenant="a", limits=allowed))
    queue.enter(request("0", tenant="a", limits=two))  # it waits already
    queue.leave(request("0", tenant="a", limits=two))
    assert may_wait(queue, request("more", tenant="a", limits=two))
    assert refusal(admission(), request("none", limits=AccountLimits("a/", max_queued=0))).retry_after == 1.0


@pytest.mark.parametrize("limits", [{"max_tenant_requests": 2}, {"max_tenant_tokens": 200}])
def test_tenant_over_its_quota_leaves_room_to_others(limits: dict[str, int]) -> None:
    queue = admission(**limits)
    for number in range(2):
        queue.enter(request(str(number), tenant="greedy"))
    assert refusal(queue, request("more", tenant="greedy")).failure is Failure.TENANT_OVER_QUOTA
    assert may_wait(queue, request("more", tenant="modest"))


@pytest.mark.parametrize("limits", [{"max_requests": 90}, {"max_tokens": 9000}])
def test_flood_leaves_room_to_tenants_that_have_little_waiting(limits: dict[str, int]) -> None:
    """Without any limit by tenant: each may wait with 8 times what is free."""
    queue = admission(**limits)
    numbers = count()
    for tenant, most in (("first", 80), ("second", 9), ("third", 1)):
        num_waiting = 0
        while may_wait(queue, asked := request(f"{next(numbers)}", tenant=tenant)):
            queue.enter(asked)
            num_waiting += 1
        assert num_waiting == most
        refused = refusal(queue, request("more", tenant=tenant))
        assert refused.failure is (Failure.TENANT_OVER_QUOTA if tenant != "third" else Failure.UNAVAILABLE)


def test_first_come_first_served_fills_the_queue_with_one_tenant() -> None:
    queue = admission(Sharing.BY_ARRIVAL, max_requests=90)
    for number in range(90):
        assert may_wait(queue, request(f"{number}"))
        queue.enter(request(f"{number}"))
    assert refusal(queue, request("more")).failure is Failure.UNAVAILABLE


def test_retry_of_a_tenant_over_its_quota_is_when_its_share_has_made_room() -> None:
    queue = admission(max_tenant_tokens=1000)
    for number in range(10):
        queue.enter(request(f"a{number}", tenant="a"))
        queue.enter(request(f"b{number}", tenant="b"))
    refused = refusal(queue, request("more", 250, 250, tenant="a"))
    assert refused.retry_after == pytest.approx(10.0), "500 tokens must go, at half of 100 a second"


def test_tokens_count_the_prompt_and_outputs_of_each_sequence() -> None:
    queue = admission()
    queue.enter(request("a", 10, 20, n=3))
    assert (queue.num_requests, queue.num_tokens) == (1, 90)


def test_request_beyond_the_context_is_rejected_for_good() -> None:
    refused = refusal(admission(), request("long", 900, 101))
    assert (refused.failure, refused.retry_after) == (Failure.CONTEXT_LENGTH_EXCEEDED, None)
    assert may_wait(admission(), request("fits", 900, 100))


def test_unknown_context_rejects_nothing() -> None:
    assert admission().check(request("long", 900, 101), 0.0, 0, UNKNOWN, lambda _: 0.0) is None


@pytest.mark.parametrize("limits", [{"max_tokens": 399}, {"max_tenant_tokens": 399}])
def test_request_larger_than_the_whole_queue_is_rejected_for_good(limits: dict[str, int]) -> None:
    refused = refusal(admission(**limits), request("large", n=4))
    assert (refused.failure, refused.retry_after) == (Failure.TOO_MANY_TOKENS, None)


def test_deadline_that_the_queue_makes_infeasible_may_be_retried() -> None:
    queue = admission(Sharing.BY_ARRIVAL)
    for number in range(10):
        queue.enter(request(str(number)))
    refused = refusal(queue, request("late", deadline=108.0), now=100.0)
    assert refused.failure is Failure.DEADLINE_INFEASIBLE
    assert "predicted to wait 10.0 s and to run at least 2.5 s" in refused.message
    assert refused.retry_after == pytest.approx(10 + 2.55 - 8)
    assert may_wait(queue, request("in time", deadline=112.6), now=100.0)


def test_deadline_shorter_than_the_request_itself_is_rejected_for_good() -> None:
    refused = refusal(admission(), request("hasty", deadline=2.5))
    assert (refused.failure, refused.retry_after) == (Failure.DEADLINE_INFEASIBLE, None)


def test_no_deadline_is_rejected_before_rates_are_known() -> None:
    assert may_wait(admission(), request("hasty", deadline=0.1), rates=UNKNOWN)
    assert admission().predicted_wait(request("a"), UNKNOWN) is None


def test_rejection_has_a_retry_time_even_before_rates_are_known() -> None:
    queue = admission(max_requests=1)
    queue.enter(request("a"))
    assert refusal(queue, request("b"), rates=UNKNOWN).retry_after == 1.0


def test_by_arrival_all_queued_requests_are_ahead() -> None:
    queue = admission(Sharing.BY_ARRIVAL)
    for number in range(8):
        queue.enter(request(str(number), tenant="greedy"))
    assert queue.predicted_wait(request("more", tenant="modest"), RATES) == pytest.approx(8.0)


def test_by_tenant_a_fair_share_is_ahead() -> None:
    queue = admission()
    for number in range(8):
        queue.enter(request(str(number), tenant="greedy"))
    assert queue.predicted_wait(request("more", tenant="modest"), RATES) == pytest.approx(1.0)
    assert queue.predicted_wait(request("more", tenant="greedy"), RATES) == pytest.approx(8.0)
    heavier = request("more", tenant="heavier", weight=2.0)
    assert queue.predicted_wait(heavier, RATES) == pytest.approx(0.5)


@pytest.mark.parametrize("sharing", Sharing)
def test_request_that_waits_does_not_wait_for_itself(sharing: Sharing) -> None:
    queue = admission(sharing)
    queue.enter(request("a"))
    assert queue.predicted_wait(request("a"), RATES) == 0.0


def test_short_outputs_shorten_the_predicted_wait() -> None:
    queue = admission(Sharing.BY_ARRIVAL)
    for _ in range(2000):
        queue.observe_end(request("past", max_tokens=100), 10)
    queue.enter(request("a", 50, 500, stop_token_ids=frozenset([1])))
    assert queue.predicted_wait(request("b"), RATES) == pytest.approx(0.6), "50 of the prompt and 10, at 100 a second"
    assert queue.num_tokens == 550, "bounds count what may come to be"


def test_deadline_is_checked_against_what_the_request_must_do_at_least() -> None:
    """A request without max_tokens may use the rest of the context, and rarely does."""
    queue = admission()
    stop: dict[str, Any] = {"stop_token_ids": frozenset([1])}
    assert may_wait(queue, request("a", 50, 900, deadline=10.0, **stop))
    assert may_wait(queue, request("b", 50, 900, deadline=10.0, has_stop_strings=True))
    assert refusal(queue, request("c", 50, 900, deadline=10.0, min_tokens=300, **stop)).retry_after is None
    assert refusal(queue, request("never stops", 50, 900, deadline=10.0)).retry_after is None


def test_deadline_that_ends_before_a_slot_is_free_is_rejected() -> None:
    stop: dict[str, Any] = {"stop_token_ids": frozenset([1])}
    refused = refusal(admission(), request("a", deadline=4.0, **stop), slot_seconds=5.0)
    assert refused.failure is Failure.DEADLINE_INFEASIBLE
    assert refused.retry_after == pytest.approx(5.0 + 0.1 - 4.0)
    assert may_wait(admission(), request("a", deadline=5.2, **stop), slot_seconds=5.0)


def test_usual_lengths_are_learned_by_kind_of_request() -> None:
    def asking(max_tokens: int, **fields: Any) -> Request:
        return request("a", 50, max_tokens, **({"stop_token_ids": frozenset([1])} | fields))

    lengths = OutputLengths()
    assert lengths.expected(asking(8)) == 8
    assert lengths.expected(asking(8000)) == 256
    for _ in range(500):
        lengths.observe(asking(8000), 30)
        lengths.observe(asking(100), 90)
    assert lengths.expected(asking(7000)) == pytest.approx(30)
    assert lengths.expected(asking(100)) == pytest.approx(90)
    assert 30 < lengths.expected(asking(500)) < 90, "none of this kind has ended"
    assert lengths.expected(asking(7000, min_tokens=40)) == 40
    assert lengths.expected(asking(7000, stop_token_ids=frozenset())) == 7000, "nothing else ends it"
    for _ in range(2000):
        lengths.observe(asking(8000), 60)
    assert lengths.expected(asking(7000)) == pytest.approx(60, rel=0.01)


def test_counts_are_right_however_often_a_request_enters_and_leaves() -> None:
    queue = admission()
    twice = request("twice")
    queue.enter(twice)
    queue.observe_end(twice, 1)
    queue.enter(twice)
    assert queue.num_requests == 1
    queue.leave(twice)
    queue.leave(twice)
    assert (queue.num_requests, queue.num_tokens) == (0, 0)
    assert queue.predicted_wait(request("next"), RATES) == 0.0


@pytest.mark.parametrize("name", ["max_requests", "max_tokens", "max_tenant_requests", "max_tenant_tokens"])
def test_limit_below_one_is_an_error_that_names_it(name: str) -> None:
    with pytest.raises(ValueError, match=name):
        AdmissionLimits(**{name: 0})
