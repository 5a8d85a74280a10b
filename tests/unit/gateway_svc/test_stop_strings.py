"""The search for stop strings."""

from hypothesis import given
from hypothesis import strategies as st

from gateway_svc.stop_strings import StopMatch, StopSearch, StopString

# So few letters that strings often overlap with themselves and each other.
texts = st.text("ab", max_size=30)
stop_lists = st.lists(st.text("ab", min_size=1, max_size=5), min_size=1, max_size=4, unique=True)


def search_for(*stops: str) -> StopSearch:
    return StopSearch([StopString.compile(stop) for stop in stops])


def test_a_string_is_found_across_pieces() -> None:
    search = search_for("END")
    assert search.feed("the E") is None
    assert search.num_pending == 1
    assert search.feed("N") is None
    assert search.num_pending == 2
    assert search.feed("D.") == StopMatch("END", 0, 3)


def test_text_that_cannot_become_a_stop_string_is_not_held_back() -> None:
    search = search_for("END")
    search.feed("EN")
    search.feed("T")
    assert search.num_pending == 0


def test_a_beginning_within_a_failed_match_is_kept() -> None:
    search = search_for("aab")
    search.feed("aaa")
    assert search.num_pending == 2
    assert search.feed("b") == StopMatch("aab", 0, 3)


def test_the_match_that_begins_first_counts() -> None:
    assert search_for("b", "abc").feed("xabc") == StopMatch("abc", 1, 4)


def test_of_matches_that_begin_together_the_shortest_counts() -> None:
    assert search_for("abc", "ab").feed("abc") == StopMatch("ab", 0, 2)


def test_skipped_text_holds_no_match_but_may_begin_one() -> None:
    search = search_for("aa")
    search.skip("aaa")
    assert search.num_pending == 1
    assert search.feed("a") == StopMatch("aa", 0, 2)


@given(stop_lists, texts)
def test_the_longest_ending_that_begins_a_stop_string_is_held_back(stops: list[str], text: str) -> None:
    search = search_for(*stops)
    search.skip(text)
    beginnings = {stop[:length] for stop in stops for length in range(len(stop))}
    endings = (text[start:] for start in range(len(text) + 1))
    assert search.num_pending == len(next(ending for ending in endings if ending in beginnings))


@given(stop_lists, texts, st.data())
def test_pieces_find_what_a_look_at_the_whole_text_finds(stops: list[str], text: str, data: st.DataObject) -> None:
    search = search_for(*stops)
    start = 0
    while start < len(text):
        end = data.draw(st.integers(start + 1, len(text)))
        num_pending = search.num_pending
        match = search.feed(text[start:end])
        found = [(text.find(stop), len(stop), stop) for stop in stops if stop in text[:end]]
        if match is None:
            assert not found
        else:
            first, _, stop = min(found)
            assert (match.stop, match.start + start - num_pending) == (stop, first)
            return
        start = end
