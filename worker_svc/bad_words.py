"""Bad words: sequences of tokens that the output of a sequence does not contain.

As in vLLM, the last token of a word is suppressed where the output ends with the tokens before it. The prompt does not
count.
"""

from collections import defaultdict
from collections.abc import Sequence
from weakref import WeakValueDictionary

import numpy as np
from numpy.typing import NDArray

NOT_NEEDED = -1
"""In place of the token before one that completes a word after any output."""
_NONE: NDArray[np.int64] = np.empty((0, 2), np.int64)


class BadWords:
    """The words of one sequence, by the tokens before the last one.

    A request may have thousands of words, and `n` sequences that look for them in each step: what follows the same
    tokens is one array.
    """

    def __init__(self, words: Sequence[Sequence[int]]) -> None:
        """Each word has at least one token."""
        completing: defaultdict[tuple[int, ...], list[tuple[int, int]]] = defaultdict(list)
        # The same without the last token of the key, which may not be known yet.
        unconfirmed: defaultdict[tuple[int, ...], list[tuple[int, int]]] = defaultdict(list)
        for word in dict.fromkeys(map(tuple, words)):
            *before, last = word
            completing[tuple(before)].append((last, NOT_NEEDED))
            if before:
                unconfirmed[tuple(before[:-1])].append((last, before[-1]))
        self._completing = {key: np.array(found, np.int64) for key, found in completing.items()}
        self._unconfirmed = {key: np.array(found, np.int64) for key, found in unconfirmed.items()}
        self._lengths = sorted({len(before) for before in completing})

    @property
    def num_needed(self) -> int:
        """How many of the last output tokens `completing` reads."""
        return self._lengths[-1] if self._lengths else 0

    def completing(self, output: Sequence[int]) -> NDArray[np.int64]:
        """The tokens that complete a word after these output tokens."""
        return self._after(output)[:, 0]

    def candidates(self, output: Sequence[int]) -> NDArray[np.int64]:
        """As `completing`, where the last output token may be a placeholder, which is negative: [tokens, 2], each with
        the last output token that it completes a word after, or NOT_NEEDED.
        """
        if not output or output[-1] >= 0:
            return self._after(output)
        known = output[:-1]
        keys = (tuple(known[len(output) - length :]) for length in self._lengths if 1 <= length <= len(output))
        found = [self._unconfirmed[key] for key in keys if key in self._unconfirmed]
        return _joined([*found, self._completing[()]] if () in self._completing else found)

    def _after(self, output: Sequence[int]) -> NDArray[np.int64]:
        keys = (tuple(output[len(output) - length :]) for length in self._lengths if length <= len(output))
        return _joined([self._completing[key] for key in keys if key in self._completing])


def _joined(found: list[NDArray[np.int64]]) -> NDArray[np.int64]:
    return found[0] if len(found) == 1 else np.concatenate([_NONE, *found])


_in_use: WeakValueDictionary[tuple[tuple[int, ...], ...], BadWords] = WeakValueDictionary()


def bad_words_of(words: tuple[tuple[int, ...], ...]) -> BadWords:
    """The same value for all sequences of a request, which do not change it. It is kept while a sequence has it."""
    found = _in_use.get(words)
    if found is None:
        found = _in_use[words] = BadWords(words)
    return found
