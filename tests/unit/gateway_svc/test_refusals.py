"""Which errors count as refusals."""

import pytest

from gateway_svc.call_limits import BODY_BYTES, CALLS, SLOW_MESSAGES
from gateway_svc.refusals import Refusal, refusal_of
from gateway_svc.tenant_shares import NoShare, TenantShares
from svc_common.errors import QuireError, Reason


@pytest.mark.parametrize("unit", [CALLS, BODY_BYTES, SLOW_MESSAGES])
@pytest.mark.parametrize("who", ["alice", "bob"])
def test_what_a_gateway_or_a_tenant_has_no_room_for_is_counted_by_its_unit(unit: str, who: str) -> None:
    shares = TenantShares(4, unit, most_per_tenant=3)
    shares.share("alice").add(3)
    with pytest.raises(NoShare) as refused:
        shares.share(who).add(2)
    expected = {CALLS: Refusal.CALLS, BODY_BYTES: Refusal.BODY_BYTES, SLOW_MESSAGES: Refusal.SLOW_MESSAGES}
    assert refusal_of(refused.value) is expected[unit]


@pytest.mark.parametrize("reason", [Reason.TENANT_QUOTA_EXCEEDED, Reason.CAPACITY_EXHAUSTED, Reason.INVALID_FIELD])
def test_a_refusal_of_a_request_is_another_thing(reason: Reason) -> None:
    assert refusal_of(QuireError(reason, "of the scheduler, or of a field")) is None
