"""Tokenizers of encoders, made of the vocabularies of GGUF files: WordPiece.

Source: llama.cpp's `conversion/bert.py`, which writes words with a space before them and continuations without, and
`src/llama-vocab.cpp`.
"""

import re
from typing import Any

from worker_svc.gguf.metadata import CONTROL, UNKNOWN, USER_DEFINED, GgufMetadata

_LOWERCASE = "tokenizer.ggml.normalizer.lowercase"
_CAPITAL = re.compile("[A-Z]")
_SPACE = "▁"
_CONTINUES = "##"
# Earlier files have all of these without a space, also those that are of no type of their own.
_BRACKETED = re.compile(r"\[.+\]")
# Special tokens by transformers' names: their fields, of which the first one counts, and llama.cpp's defaults.
_SPECIAL = {
    "cls_token": (("bos", "cls"), 101),
    "sep_token": (("seperator",), 102),
    "unk_token": (("unknown",), 100),
    "pad_token": (("padding",), 0),
    "mask_token": (("mask",), 103),
}


def make_wordpiece(metadata: GgufMetadata) -> tuple[Any, dict[str, str]]:
    """The tokenizer, and its special tokens by transformers' names. Raises PreparationFailed if tokens are missing."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

    stored, types = metadata.tokens()
    words = [_word(text, kind) for text, kind in zip(stored, types, strict=True)]
    named = {name: (metadata.token(*fields), default) for name, (fields, default) in _SPECIAL.items()}
    ids = {name: default if token is None else token for name, (token, default) in named.items()}
    special = metadata.special_tokens(ids, words)
    made = Tokenizer(
        models.WordPiece({word: number for number, word in enumerate(words)}, unk_token=special["unk_token"])
    )
    lowercase = metadata.general(_LOWERCASE) is not False
    strips = metadata.general("tokenizer.ggml.normalizer.strip_accents")
    made.normalizer = normalizers.BertNormalizer(
        lowercase=lowercase, strip_accents=lowercase if strips is None else bool(strips)
    )
    made.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    first, last = special["cls_token"], special["sep_token"]
    made.post_processor = processors.TemplateProcessing(
        single=f"{first}:0 $A:0 {last}:0",
        pair=f"{first}:0 $A:0 {last}:0 $B:1 {last}:1",
        special_tokens=[(first, ids["cls_token"]), (last, ids["sep_token"])],
    )
    made.decoder = decoders.WordPiece(prefix=_CONTINUES)
    control = [word for word, kind in zip(words, types, strict=True) if kind == CONTROL]
    made.add_special_tokens([AddedToken(word, special=True) for word in dict.fromkeys((*special.values(), *control))])
    added = [word for word, kind in zip(words, types, strict=True) if kind == USER_DEFINED]
    made.add_tokens([AddedToken(word) for word in added])
    return made, special


def has_lost_capitals(metadata: GgufMetadata) -> bool:
    """Whether the vocabulary has words with capitals that no text has, since the file does not say that texts keep
    theirs: earlier converters did not write it.
    """
    if metadata.general(_LOWERCASE) is not None:
        return False
    others = (CONTROL, UNKNOWN, USER_DEFINED)  # which are found in texts before these are put in lower case
    return any(
        _CAPITAL.search(text) is not None and kind not in others and _BRACKETED.fullmatch(text) is None
        for text, kind in zip(*metadata.tokens(), strict=True)
    )


def _word(text: str, kind: int) -> str:
    """A token as WordPiece has it."""
    if kind == CONTROL or _BRACKETED.fullmatch(text) is not None:
        return text
    return text.removeprefix(_SPACE) if text.startswith(_SPACE) and text != _SPACE else f"{_CONTINUES}{text}"
