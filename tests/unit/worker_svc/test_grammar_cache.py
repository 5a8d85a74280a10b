"""The grammars used last are kept, as many as fit."""

from concurrent.futures import Future

import pytest

from worker_svc import grammar_cache
from worker_svc.grammar_cache import CompiledGrammar, GrammarCache, most_bytes
from worker_svc.slow_masks import MaskPace

SMALL, LARGE = 'start: "a"', "start: /" + "a" * 100_000 + "/"


def _made() -> CompiledGrammar:
    return CompiledGrammar(Future(), MaskPace())


def _kept(cache: GrammarCache) -> list[bytes]:
    """Digests, least recently used first."""
    return list(cache._grammars)


def test_what_was_used_last_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grammar_cache, "CACHE_BYTES", 3 * most_bytes(SMALL))
    cache, compiled = GrammarCache(), [_made() for _ in range(4)]
    for place in range(3):
        cache.put(b"%d" % place, SMALL, compiled[place])
    assert cache.get(b"0") is compiled[0]
    cache.put(b"3", SMALL, compiled[3])
    assert _kept(cache) == [b"2", b"0", b"3"]
    assert cache.get(b"1") is None


def test_large_grammars_take_more_room(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grammar_cache, "CACHE_BYTES", 3 * most_bytes(SMALL))
    cache = GrammarCache()
    for digest, grammar in ((b"0", SMALL), (b"1", LARGE), (b"2", SMALL)):
        cache.put(digest, grammar, _made())
    assert _kept(cache) == [b"1", b"2"]
    cache.drop(b"1")
    cache.drop(b"1")
    cache.put(b"3", SMALL, _made())
    cache.put(b"4", SMALL, _made())
    assert _kept(cache) == [b"2", b"3", b"4"]


def test_one_that_is_too_large_is_not_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grammar_cache, "CACHE_BYTES", most_bytes(SMALL))
    cache = GrammarCache()
    cache.put(b"0", LARGE, _made())
    assert _kept(cache) == []
