"""Tokenizers of encoders, made of the vocabularies of GGUF files: WordPiece.

Source: llama.cpp's `conversion/bert.py`, which writes words with a space before them and continuations without, and
`src/llama-vocab.cpp`.
"""

import re
from typing import Any

from worker_svc.gguf.metadata import GgufMetadata

CONTROL, USER_DEFINED = 3, 4
"""Values of `tokenizer.ggml.token_type`: tokens that texts do not have, and words that are added to the vocabulary."""
_SPACE = "▁"
_CONTINUES = "##"
# Earlier files have all of these without a space, also those that are of no type of their own.
_BRACKETED = re.compile(r"\[.+\]")
# Special tokens by transformers' names: their fields, of which the first one counts, and llama.cpp's defaults.
_SPECIAL = {
    "cls_token": (("bos", "cls"), 101),
    "sep_token": (("seperator", "separator"), 102),
    "unk_token": (("unknown",), 100),
    "pad_token": (("padding",), 0),
    "mask_token": (("mask",), 103),
}


def make_wordpiece(metadata: GgufMetadata) -> tuple[Any, dict[str, str]]:
    """The tokenizer, and its special tokens by transformers' names. Raises PreparationFailed if tokens are missing."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

    types = metadata.general("tokenizer.ggml.token_type") or []
    stored = metadata.general("tokenizer.ggml.tokens")
    if stored is None:
        raise metadata.refusal("it has no metadata tokenizer.ggml.tokens")
    types = types if len(types) == len(stored) else [1] * len(stored)
    words = [_word(text, kind) for text, kind in zip(stored, types, strict=True)]
    ids = {name: _special(metadata, *fields, len(words)) for name, fields in _SPECIAL.items()}
    special = {name: words[number] for name, number in ids.items() if number is not None}
    missing = [name for name in ("cls_token", "sep_token", "unk_token") if name not in special]
    if missing:
        raise metadata.refusal(f"its tokenizer has no {', '.join(missing)}")
    made = Tokenizer(
        models.WordPiece({word: number for number, word in enumerate(words)}, unk_token=special["unk_token"])
    )
    lowercase = metadata.general("tokenizer.ggml.normalizer.lowercase") is not False
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


def _word(text: str, kind: int) -> str:
    """A token as WordPiece has it."""
    if kind == CONTROL or _BRACKETED.fullmatch(text) is not None:
        return text
    return text.removeprefix(_SPACE) if text.startswith(_SPACE) and text != _SPACE else f"{_CONTINUES}{text}"


def _special(metadata: GgufMetadata, fields: tuple[str, ...], default: int, size: int) -> int | None:
    named = (metadata.general(f"tokenizer.ggml.{name}_token_id") for name in fields)
    number = next((int(each) for each in named if each is not None), default)
    return number if number < size else None
