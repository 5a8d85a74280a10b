"""Negotiation of a protocol version."""

import pytest

from svc_common.protocols import ProtocolRange

_OURS = ProtocolRange(2, 4)


@pytest.mark.parametrize(
    ("oldest", "newest", "agreed"), [(1, 2, 2), (2, 3, 3), (4, 4, 4), (1, 9, 4), (3, 9, 4), (5, 9, None), (1, 1, None)]
)
def test_both_sides_use_the_newest_version_that_they_have_in_common(
    oldest: int, newest: int, agreed: int | None
) -> None:
    assert _OURS.newest_common(oldest, newest) == agreed
    assert ProtocolRange(oldest, newest).newest_common(_OURS.oldest, _OURS.newest) == agreed


def test_a_side_without_versions_is_of_version_1() -> None:
    assert ProtocolRange(1, 2).newest_common(0, 0) == 1
    assert _OURS.newest_common(0, 0) is None


def test_a_range_contains_the_versions_that_it_accepts() -> None:
    assert [version for version in range(6) if version in _OURS] == [2, 3, 4]
    assert "3" not in _OURS
    assert str(_OURS) == "2 to 4"
