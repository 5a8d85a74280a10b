"""Keys and salts."""

from hypothesis import given
from hypothesis import strategies as st

from svc_common.keys import cache_salt, request_key

names = st.text(max_size=4)


def test_a_key_is_a_sha256_in_hex() -> None:
    assert len(bytes.fromhex(request_key("tenant", "id"))) == 32


@given(names, names, st.integers(0, 12), names, names, st.integers(0, 12))
def test_requests_share_a_key_only_if_they_are_the_same(
    tenant: str, request_id: str, prompt: int, other_tenant: str, other_id: str, other_prompt: int
) -> None:
    same = (tenant, request_id, prompt) == (other_tenant, other_id, other_prompt)
    assert (request_key(tenant, request_id, prompt) == request_key(other_tenant, other_id, other_prompt)) == same


def test_neighbours_do_not_run_together() -> None:
    assert request_key("ab", "c") != request_key("a", "bc")


def test_a_salt_is_a_tenants_own() -> None:
    assert len(cache_salt("a")) == 32
    assert cache_salt("a") == cache_salt("a")
    assert len({cache_salt("a"), cache_salt("b"), cache_salt("a", "b"), cache_salt("b", "a"), cache_salt("ab")}) == 5
