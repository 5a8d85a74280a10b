"""Tokenizers of encoders with the vocabulary of XLM-RoBERTa, made of that of GGUF files: Unigram.

Source: llama.cpp's `conversion/bert.py` and `src/llama-vocab.cpp`.
"""

from typing import Any

from svc_common.tokenizer_errors import tokenizer_errors
from worker_svc.gguf.metadata import CONTROL, UNKNOWN, USER_DEFINED, GgufMetadata

_SPACE = "▁"
# Special tokens by transformers' names, and their fields, of which the first one counts.
_SPECIAL = {
    "cls_token": ("bos", "cls"),
    "sep_token": ("eos", "seperator"),
    "unk_token": ("unknown",),
    "pad_token": ("padding",),
    "mask_token": ("mask",),
}


def make_unigram(metadata: GgufMetadata) -> tuple[Any, dict[str, str]]:
    """The tokenizer, and its special tokens by transformers' names. Raises PreparationFailed if tokens are missing, or
    texts are changed in another way than for XLM-RoBERTa.
    """
    from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

    pieces, types = metadata.tokens()
    scores = metadata.general("tokenizer.ggml.scores") or []
    if len(scores) != len(pieces):
        raise metadata.refusal("its tokenizer does not have a score for each token")
    if metadata.general("tokenizer.ggml.treat_whitespace_as_suffix"):
        raise metadata.refusal("it has metadata that is not read: tokenizer.ggml.treat_whitespace_as_suffix = True")
    ids = {name: metadata.token(*fields) for name, fields in _SPECIAL.items()}
    if ids["unk_token"] is None and UNKNOWN in types:
        ids["unk_token"] = types.index(UNKNOWN)
    special = metadata.special_tokens(ids, pieces)
    made = Tokenizer(models.Unigram(list(zip(pieces, scores, strict=True)), ids["unk_token"], byte_fallback=False))
    if charsmap := metadata.general("tokenizer.ggml.precompiled_charsmap"):
        with tokenizer_errors(
            lambda error: metadata.refusal(f"its tokenizer.ggml.precompiled_charsmap cannot be used: {error}")
        ):
            made.normalizer = normalizers.Precompiled(bytes(byte & 0xFF for byte in charsmap))
            made.normalizer.normalize_str("a")  # some damaged tables fail with the first text
    scheme = "never" if metadata.general("tokenizer.ggml.add_space_prefix") is False else "always"
    steps: list[Any] = [pre_tokenizers.Metaspace(_SPACE, prepend_scheme=scheme)]
    if metadata.general("tokenizer.ggml.remove_extra_whitespaces") is not False:
        steps.insert(0, pre_tokenizers.WhitespaceSplit())
    made.pre_tokenizer = pre_tokenizers.Sequence(steps)
    made.decoder = decoders.Metaspace(_SPACE, prepend_scheme=scheme)
    first, last = (
        [] if metadata.general(f"tokenizer.ggml.add_{name}_token") is False else [special[token]]
        for name, token in (("bos", "cls_token"), ("eos", "sep_token"))
    )
    made.post_processor = processors.TemplateProcessing(
        single=[*first, "$A", *last],
        pair=[*first, "$A", *last, *last, "$B", *last],
        special_tokens=[(special[name], ids[name]) for name in ("cls_token", "sep_token")],
    )
    control = [piece for piece, kind in zip(pieces, types, strict=True) if kind == CONTROL]
    # The mask takes the space before it.
    made.add_special_tokens(
        [
            AddedToken(piece, special=True, normalized=False, lstrip=piece == special.get("mask_token"))
            for piece in dict.fromkeys((*special.values(), *control))
        ]
    )
    made.add_tokens([AddedToken(piece) for piece, kind in zip(pieces, types, strict=True) if kind == USER_DEFINED])
    return made, special
