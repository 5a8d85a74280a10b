"""The text of a sequence, token by token. T(k), the text that is due after k tokens, depends on those k tokens and the
request alone, so that any gateway can continue at any token."""

import codecs
from collections import deque
from collections.abc import Sequence

from gateway_svc.rendering import Rendering
from gateway_svc.stop_strings import StopSearch
from gateway_svc.validated_request import SpecialTokens, StopText
from gateway_svc.vocabulary import Vocabulary

_BROKEN = "\ufffd"


class Detokenizer:
    """Tokens to text, one at a time. Bytes of an incomplete character are held back.

    The pieces joined equal the tokenizer's own decoding of prompt and output, less that of the prompt. A character that
    the prompt begins is a part of them if the output completes it.
    """

    __slots__ = ("_at_start", "_follows_added", "_follows_part", "_hidden_ids", "_joins", "_pending", "_vocabulary")

    def __init__(
        self, vocabulary: Vocabulary, prompt_tail: Sequence[int], hidden_ids: frozenset[int], *, joins: bool = False
    ) -> None:
        """`prompt_tail` holds the last tokens of the prompt that are text. With `joins`, an added token after another
        is its own text, without the space that the tokenizer may write before it.
        """
        self._vocabulary = vocabulary
        self._joins = joins
        self._follows_added = False
        self._hidden_ids = hidden_ids
        self._pending = b""
        self._at_start = not prompt_tail
        for token_id in prompt_tail:
            self._decode(vocabulary.piece(token_id))
        self._follows_part = bool(self._pending)

    def push(self, token_id: int) -> str:
        """The characters that this token completes."""
        if token_id in self._hidden_ids:
            return ""
        if self._at_start:
            self._at_start = False
            self._follows_added = token_id in self._vocabulary.added_texts
            return self._decode(self._vocabulary.first_piece(token_id))
        if self._joins:
            text = self._vocabulary.added_texts.get(token_id)
            follows, self._follows_added = self._follows_added, text is not None
            if follows and text is not None:
                return self._decode(text.encode())
        if not self._pending and (whole := self._vocabulary.whole_text(token_id)) is not None:
            return whole
        text = self._decode(self._vocabulary.piece(token_id))
        if self._follows_part:
            self._follows_part = False
            return text.removeprefix(_BROKEN)
        return text

    def flush(self) -> str:
        """U+FFFD where the tokens end within a character."""
        return "" if self._follows_part else self._decode(b"", final=True)

    def _decode(self, piece: bytes, *, final: bool = False) -> str:
        data = self._pending + piece
        text, num_decoded = codecs.utf_8_decode(data, "replace", final)
        self._pending = data[num_decoded:]
        return text


class SequenceText:
    """T(k) of one sequence, as differences: what is due, less stop strings and what may become one."""

    def __init__(self, vocabulary: Vocabulary, rendering: Rendering, *, keeps_places: bool = False) -> None:
        """With `keeps_places`, pieces of the text can be asked for their tokens."""
        self._hidden_ids = hidden_ids = vocabulary.hidden_ids(rendering.special_tokens)
        joins = rendering.special_tokens is SpecialTokens.JOINED
        self._detokenizer = Detokenizer(vocabulary, rendering.prompt_tail, hidden_ids, joins=joins)
        self._search = StopSearch(rendering.stops) if rendering.stops else None
        self._min_tokens = rendering.min_tokens
        self._stop_text = rendering.stop_text
        self._pending = ""
        self.num_tokens = 0
        self.num_chars = 0
        """The number of characters that the tokens so far complete, sent or held back."""
        self.keeps_places = keeps_places
        self._places = deque[tuple[int, int, int]]()
        """Tokens that may be asked for: which one, and where its text begins and ends."""
        self.matched: str | None = None
        """The stop string that was found. Tokens after it do not count."""

    def push(self, token_id: int) -> str:
        """T(k) - T(k - 1): the text that becomes due with this token."""
        self.num_tokens += 1
        text = self._detokenizer.push(token_id)
        if self.keeps_places and token_id not in self._hidden_ids:
            self._places.append((self.num_tokens - 1, self.num_chars, self.num_chars + len(text)))
        self.num_chars += len(text)
        if self._search is None or not text:
            return text
        pending = self._pending + text
        if self.num_tokens <= self._min_tokens:
            self._search.skip(text)
        elif (match := self._search.feed(text)) is not None:
            self.matched = match.stop
            self._pending = ""
            return pending[: match.end if self._stop_text is StopText.INCLUDED else match.start]
        num_due = len(pending) - self._search.num_pending
        self._pending = pending[num_due:]
        return pending[:num_due]

    def tokens_between(self, begin: int, end: int) -> tuple[int, ...]:
        """The tokens of a piece of the text, by their places in the sequence; without those of pieces before it, and of
        earlier calls."""
        found: list[int] = []
        while self._places and self._places[0][1] < end:
            token, token_begin, token_end = self._places.popleft()
            if token_end > begin or token_begin >= begin:  # one that has no whole character counts as the next one does
                found.append(token)
        return tuple(found)

    def flush(self) -> str:
        """The text that was held back, when no more tokens follow; empty after a stop string."""
        if self.matched is not None:
            return ""
        text = self._pending + self._detokenizer.flush()
        self._pending = ""
        return text
