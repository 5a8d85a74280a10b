"""Bad words: sequences of tokens that the output of a sequence does not contain.

As in vLLM, the last token of a word is suppressed where the output ends with the tokens before it. The prompt does not
count.
"""

from collections import defaultdict
from collections.abc import Sequence
from typing import NamedTuple
from weakref import WeakValueDictionary


class Completion(NamedTuple):
    """A token that completes a word; if `last` is not None, only after an output whose last token is that."""

    token: int
    last: int | None


class BadWords:
    """The words of one sequence, by the tokens before the last one."""

    def __init__(self, words: Sequence[Sequence[int]]) -> None:
        """Each word has at least one token."""
        self._completing: defaultdict[tuple[int, ...], list[int]] = defaultdict(list)
        # The same without the last token of the key, which may not be known yet.
        self._unconfirmed: defaultdict[tuple[int, ...], list[Completion]] = defaultdict(list)
        for word in dict.fromkeys(map(tuple, words)):
            *before, last = word
            self._completing[tuple(before)].append(last)
            if before:
                self._unconfirmed[tuple(before[:-1])].append(Completion(last, before[-1]))
        self._lengths = sorted({len(before) for before in self._completing})

    @property
    def num_needed(self) -> int:
        """How many of the last output tokens `completing` reads."""
        return self._lengths[-1] if self._lengths else 0

    def completing(self, output: Sequence[int]) -> list[int]:
        """The tokens that complete a word after these output tokens."""
        found: list[int] = []
        for length in self._lengths:
            if length <= len(output):
                found += self._completing.get(tuple(output[len(output) - length :]), ())
        return found

    def candidates(self, output: Sequence[int]) -> list[Completion]:
        """As `completing`, where the last output token may be a placeholder, which is negative."""
        if not output or output[-1] >= 0:
            return [Completion(token, None) for token in self.completing(output)]
        known = output[:-1]
        found = [Completion(token, None) for token in self._completing.get((), ())]
        for length in self._lengths:
            if 1 <= length <= len(output):
                found += self._unconfirmed.get(tuple(known[len(known) - length + 1 :]), ())
        return found


_in_use: WeakValueDictionary[tuple[tuple[int, ...], ...], BadWords] = WeakValueDictionary()


def bad_words_of(words: tuple[tuple[int, ...], ...]) -> BadWords:
    """The same value for all sequences of a request, which do not change it. It is kept while a sequence has it."""
    found = _in_use.get(words)
    if found is None:
        found = _in_use[words] = BadWords(words)
    return found
