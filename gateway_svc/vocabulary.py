"""The bytes that each token of a vocabulary contributes to a text, for detokenizing and for logprobs."""

import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any

from tokenizers import Tokenizer

from gateway_svc.validated_request import SpecialTokens

# Tokens for single bytes, which spell characters that a vocabulary lacks.
_BYTE_TOKEN = re.compile(r"<0x([89A-F][0-9A-F])>")


class Vocabulary:
    """Token ids to bytes. Ids that the tokenizer does not have, as of padded embeddings, contribute nothing."""

    def __init__(self, tokenizer: Tokenizer, decoder: Mapping[str, Any] | None) -> None:
        """`decoder` is the object of that name in tokenizer.json, which defines how tokens spell bytes."""
        self._tokenizer = tokenizer
        kinds = _kinds(decoder)
        self._byte_level = "ByteLevel" in kinds
        self._byte_fallback = "ByteFallback" in kinds
        added = tokenizer.get_added_tokens_decoder()
        self.special_ids = frozenset(token_id for token_id, token in added.items() if token.special)
        self.added = {token.content: token_id for token_id, token in added.items()}
        """Ids of added tokens, by literal."""
        self.added_texts = {token_id: content for content, token_id in self.added.items()}
        # A text before the token, since a decoder may treat the first token of a text differently.
        self._anchor = tokenizer.encode("a", add_special_tokens=False).ids
        self._anchor_text = self._decode(self._anchor)
        self.longest_token = max(map(len, tokenizer.get_vocab()), default=1)
        """The characters of the longest token as the vocabulary spells it."""
        self._pieces: dict[int, bytes] = {}
        self._whole_texts: dict[int, str | None] = {}

    def hidden_ids(self, special: SpecialTokens) -> frozenset[int]:
        """Tokens that contribute no text."""
        return self.special_ids if special is SpecialTokens.HIDDEN else frozenset()

    def piece(self, token_id: int) -> bytes:
        """Bytes of a token that follows others, also of a special token."""
        piece = self._pieces.get(token_id)
        if piece is None:
            piece = self._spelled(token_id)
            if piece is None:
                text = self._decode([*self._anchor, token_id])
                piece = text.removeprefix(self._anchor_text).encode()
            self._pieces[token_id] = piece
        return piece

    def whole_text(self, token_id: int) -> str | None:
        """Its piece as text; None where that begins or ends within a character."""
        try:
            return self._whole_texts[token_id]
        except KeyError:
            text: str | None = None
            with suppress(UnicodeDecodeError):
                text = self.piece(token_id).decode()
            self._whole_texts[token_id] = text
            return text

    def first_piece(self, token_id: int) -> bytes:
        """Bytes of a token that begins a text: some tokenizers leave out its space."""
        piece = self._spelled(token_id)
        return self._decode([token_id]).encode() if piece is None else piece

    def token_text(self, token_id: int) -> str:
        """A single token as text; a part of a character becomes U+FFFD."""
        return self.piece(token_id).decode("utf-8", "replace")

    def text(self, token_ids: Sequence[int]) -> str:
        """Tokens that follow others as text, also special ones; parts of characters become U+FFFD."""
        return b"".join(map(self.piece, token_ids)).decode("utf-8", "replace")

    def _spelled(self, token_id: int) -> bytes | None:
        """Bytes that the token's own name spells, or None where only the decoder knows."""
        token = self._tokenizer.id_to_token(token_id)
        if token is None:
            return b""
        if self._byte_level:
            try:
                return bytes([_BYTE_OF[char] for char in token])
            except KeyError:  # an added token is its own text
                return token.encode()
        if self._byte_fallback and (match := _BYTE_TOKEN.fullmatch(token)):
            return bytes.fromhex(match[1])
        return None

    def _decode(self, token_ids: list[int]) -> str:
        return self._tokenizer.decode(token_ids, skip_special_tokens=False)


def _kinds(decoder: Mapping[str, Any] | None) -> set[str]:
    if decoder is None:
        return set()
    parts = decoder.get("decoders", [])
    return {str(decoder["type"])}.union(*map(_kinds, parts))


def _byte_alphabet() -> dict[str, int]:
    """GPT-2's printable character for each byte, which byte-level tokenizers spell their tokens with."""
    printable = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + i): byte for i, byte in enumerate(others)}


_BYTE_OF = _byte_alphabet()
