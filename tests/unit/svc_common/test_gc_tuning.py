"""How rare collections are while somebody wants them rare, and afterwards."""

import gc
from collections.abc import Iterator

import pytest

from svc_common.gc_tuning import rare_collections


@pytest.fixture(autouse=True)
def restored() -> Iterator[None]:
    """The thresholds of the tests' own process."""
    before = gc.get_threshold()
    yield
    gc.set_threshold(*before)


def test_collections_are_rare_until_the_last_user_ends() -> None:
    gc.set_threshold(700, 10, 11)
    first, second = rare_collections(), rare_collections()
    first.__enter__()
    second.__enter__()
    first.__exit__(None, None, None)
    assert gc.get_threshold() == (50_000, 20, 100)
    second.__exit__(None, None, None)
    assert gc.get_threshold() == (700, 10, 11)


def test_they_are_as_before_after_an_error() -> None:
    gc.set_threshold(700, 10, 11)
    with pytest.raises(ZeroDivisionError), rare_collections():
        raise ZeroDivisionError
    assert gc.get_threshold() == (700, 10, 11)


@pytest.mark.parametrize("usual", [(0, 10, 10), (100_000, 30, 200)])
def test_what_the_process_has_made_rarer_stays(usual: tuple[int, int, int]) -> None:
    gc.set_threshold(*usual)
    with rare_collections():
        assert gc.get_threshold() == usual
