"""Units that tenants share."""

import pytest

from gateway_svc.tenant_shares import Share, TenantShares
from svc_common.errors import QuireError, Reason


def taken(shares: TenantShares, tenant: str) -> list[Share]:
    """The shares of a tenant that takes one unit after the other until it is refused."""
    held: list[Share] = []
    while True:
        share = shares.share(tenant)
        try:
            share.add(1)
        except QuireError:
            return held
        held.append(share)


@pytest.mark.parametrize(("total", "counts"), [(4096, [2048, 1024, 512]), (8, [4, 2, 1, 1]), (2, [1, 1]), (1, [1])])
def test_no_tenant_takes_more_than_it_leaves_free(total: int, counts: list[int]) -> None:
    shares = TenantShares(total, "calls")
    assert [len(taken(shares, str(number))) for number in range(len(counts))] == counts


def test_several_units_count_among_those_that_are_not_free() -> None:
    shares = TenantShares(32, "bytes")
    first = shares.share("alice")
    first.add(12)
    with pytest.raises(QuireError, match="the tenant has 12 bytes at this gateway, and may have 16 at most"):
        first.add(5)
    first.add(4)
    assert first.count == 16


def test_a_tenant_that_has_nothing_may_take_one_message() -> None:
    shares = TenantShares(32, "bytes")
    shares.share("alice").add(16)
    late = shares.share("bob")
    late.add(12)
    with pytest.raises(QuireError, match="may have 12 at most"):
        late.add(1)


def test_the_error_tells_a_full_gateway_from_a_tenant_with_too_much() -> None:
    shares = TenantShares(4, "calls")
    taken(shares, "alice")
    with pytest.raises(QuireError, match="the tenant has 2 calls at this gateway, and may have 2 at most") as raised:
        shares.share("alice").add(1)
    assert (raised.value.reason, raised.value.subject) == (Reason.TENANT_QUOTA_EXCEEDED, "tenant:alice")
    assert raised.value.retry_after is not None
    with pytest.raises(QuireError, match="this gateway has 2 of at most 4 calls") as raised:
        shares.share("bob").add(3)
    assert (raised.value.reason, raised.value.subject) == (Reason.CAPACITY_EXHAUSTED, None)


def test_a_tenant_has_so_many_at_most() -> None:
    assert len(taken(TenantShares(100, "calls", most_per_tenant=3), "alice")) == 3


def test_one_tenant_may_take_all() -> None:
    assert len(taken(TenantShares(100, "calls", has_tenants=False), "alice")) == 100


def test_what_is_released_is_free_once() -> None:
    shares = TenantShares(10, "bytes")
    share = shares.share("alice")
    share.add(5)
    share.resize(2)
    assert share.count == 2
    for _ in range(2):
        share.release()
    share.resize(5)
    with pytest.raises(QuireError):
        share.add(1)
    assert share.count == 5


def test_nothing_more_is_never_too_much() -> None:
    shares = TenantShares(10, "bytes")
    first, second = shares.share("alice"), shares.share("bob")
    first.add(5)
    second.add(2)
    first.add(0)
    assert first.count == 5
