"""How texts are split before merges, by the names that llama.cpp has for it (`tokenizer.ggml.pre`).

Source: llama.cpp's `src/llama-vocab.cpp`, and the expressions of the models' own tokenizers that it names.
"""

from typing import Any

from svc_common.preparation import Report

# Names that transformers does not know: each digit is alone, and then it is as GPT-2; as GPT-2 (SmolLM's digits are
# alone, too, but no token of its has two); and as another name, which transformers knows.
_DIGITS_ALONE = ("starcoder", "refact", "command-r", "codeshell", "exaone", "minerva-7b", "mellum2")
_AS_GPT2 = (
    *("gpt-2", "smollm", "phi-2", "mpt", "olmo", "jais", "trillion", "granite-docling", "exaone4", "gigachat"),
    *("a.x-4.0", "mellum", "modern-bert"),
)
_LIKE = {
    "stablelm2": "qwen2", "hunyuan": "qwen2", "solar-open": "qwen2", "glm4": "llama-bpe", "glm5": "llama-bpe",
    "chatglm-bpe": "llama-bpe", "granite-embed-multi-97m": "gpt-4o",
}  # fmt: skip
# Letters of Latin, Greek, Cyrillic, Armenian, Georgian and Cherokee, with the widths and styles of Unicode.
_LETTERS = (
    "A-Za-z"
    "\u00b5\u00c0-\u00d6\u00d8-\u00f6\u00f8-\u01ba\u01bc-\u01bf\u01c4-\u0293\u0295-\u02af\u0370-\u0373\u0376"
    "\u0377\u037b-\u037d\u037f\u0386\u0388-\u038a\u038c\u038e-\u03a1\u03a3-\u03f5\u03f7-\u0481\u048a-\u052f"
    "\u0531-\u0556\u10a0-\u10c5\u13a0-\u13f5\u13f8-\u13fd\u1c90-\u1cba\u1cbd-\u1cbf\u1d00-\u1d2b\u1d6b-\u1d77"
    "\u1d79-\u1d9a\u1e00-\u1f15\u1f18-\u1f1d\u1f20-\u1f45\u1f48-\u1f4d\u1f50-\u1f57\u1f59\u1f5b\u1f5d"
    "\u1f5f-\u1f7d\u1f80-\u1fb4\u1fb6-\u1fbc\u1fbe\u1fc2-\u1fc4\u1fc6-\u1fcc\u1fd0-\u1fd3\u1fd6-\u1fdb"
    "\u1fe0-\u1fec\u1ff2-\u1ff4\u1ff6-\u1ffc\u2102\u2107\u210a-\u2113\u2115\u2119-\u211d\u2124\u2126\u2128"
    "\u212a-\u212d\u212f-\u2134\u2139\u213c-\u213f\u2145-\u2149\u214e\u2183\u2184\u2c00-\u2c7b\u2c7e-\u2ce4"
    "\u2ceb-\u2cee\u2cf2\u2cf3\ua640-\ua66d\ua680-\ua69b\ua722-\ua76f\ua771-\ua787\ua78b-\ua78e\uab70-\uabbf"
    "\ufb00-\ufb06\ufb13-\ufb17\uff21-\uff3a\uff41-\uff5a\U00010400-\U0001044f\U000104b0-\U000104d3"
    "\U000104d8-\U000104fb\U00010c80-\U00010cb2\U00010cc0-\U00010cf2\U000118a0-\U000118df"
    "\U0001e900-\U0001e943"
)
_HAN_AND_KANA = "\u4e00-\u9fa5\u3040-\u309f\u30a0-\u30ff"
_HAN_AND_HANGUL = "\u4e00-\u9fa5\u0800-\u4e00\uac00-\ud7ff"
_NOT_HAN = r"&&[^\p{Han}]"
_SHORT_FORMS = "(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_UPPER, _LOWER = r"\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}", r"\p{Ll}\p{Lm}\p{Lo}\p{M}"
_SPACES = r"\s*[\r\n]+|\s+(?!\S)|\s+"


def _cased_words(but: str = "") -> str:
    """Words, which begin anew where a capital follows a small letter; `but` leaves letters out."""
    upper, lower = f"[{_UPPER}{but}]", f"[{_LOWER}{but}]"
    first = r"[^\r\n\p{L}\p{N}]?"
    return f"{first}{upper}*{lower}+{_SHORT_FORMS}?|{first}{upper}+{lower}*{_SHORT_FORMS}?"


# Each splits the pieces that the one before has made, into its matches and what is between them.
_DEEPSEEK3 = (
    r"\p{N}{1,3}",
    f"[{_HAN_AND_KANA}]+",
    r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"
    rf"| ?[\p{{P}}\p{{S}}]+[\r\n]*|{_SPACES}",
)
_EXPRESSIONS: dict[str, tuple[str, ...]] = {
    "deepseek-llm": (
        r"[\r\n]",
        rf"\s?[{_LETTERS}]+",
        "\\s?[!-/:-~\uff01-\uff0f\uff1a-\uff5e\u2018-\u201f\u3000-\u3002]+",
        r"\s+$",
        f"[{_HAN_AND_HANGUL}]+",
        r"\p{N}+",
    ),
    "deepseek-coder": (r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", f"[{_HAN_AND_HANGUL}]+", r"\p{N}"),
    **dict.fromkeys(("deepseek-v3", "hunyuan-dense", "joyai-llm"), _DEEPSEEK3),
    "exaone-moe": (
        rf"{_SHORT_FORMS}|[^\r\n\p{{L}}\p{{N}}]?(?:\p{{L}}\p{{M}}*(?: \p{{L}}\p{{M}}*)*)+|\p{{N}}"
        r"| ?[^\s\p{L}\p{N}]+[\r\n/]?|\s*[\r\n]|\s+(?!\S)|\s+",
    ),
    "jais-2": (
        rf"{_SHORT_FORMS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}{{1,3}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|\s*[\r\n]+|"
        + "|".join(rf"\s{{{count}}}(?!\S)" for count in (512, 256, 128, 64, 32, 16, 8, 4, "1,2"))
        + r"|\s",
    ),
    "kimi-k2": (rf"\p{{Han}}+|{_cased_words(_NOT_HAN)}|\p{{N}}{{1,3}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|{_SPACES}",),
    "seed-coder": (rf"{_SHORT_FORMS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}| ?[^\s\p{{L}}\p{{N}}\r\n]+|{_SPACES}",),
    **dict.fromkeys(
        ("tiny_aya", "cohere2moe"),
        (
            r"\d{1,3}(?=(?:\d{3})*\b)",
            rf"{_cased_words()}|\p{{N}}{{1,3}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|{_SPACES}",
        ),
    ),
    "youtu": (
        "[\uac00-\ud7a3\u3131-\u318e]+"
        "|[\uff01\u2026\u201c\u201d\u2018\u2019\u2014\uff1a\uff1b\uff0c\u3001-\u303f\ufe30-\ufe4f]+"
        f"|[\u3105-\u312f]+|[{_HAN_AND_KANA}]+",
        rf"{_cased_words()}|\p{{N}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|{_SPACES}",
    ),
}
# With these, a word that is a token is that token, whatever merges make of it.
_WORDS_FIRST = (
    *("llama3", "llama-v3", "llama-bpe", "falcon3", "falcon-h1", "pixtral", "midm-2.0", "lfm2", "jina-v5-nano"),
    *("glm4", "glm5", "tekken", "youtu", "granite-embed-multi-97m"),
)


def split_texts(backend: Any, name: str | None, report: Report) -> None:
    """Has the tokenizer of a vocabulary of bytes split texts as a file names it. transformers splits them as GPT-2 does
    where it does not know the name. Reports a name that is not known here either.
    """
    from tokenizers import Regex, pre_tokenizers
    from transformers.integrations.gguf.gguf_tokenizer_mapping import GGUF_PRE_TOKENIZER_SPLITS

    backend.model.ignore_merges = name in _WORDS_FIRST
    splits: dict[str, str] = GGUF_PRE_TOKENIZER_SPLITS
    if name in splits or name in _AS_GPT2:
        return
    if name in _DIGITS_ALONE:
        steps = [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    elif name in _LIKE or name in _EXPRESSIONS:
        expressions = _EXPRESSIONS.get(name) or (splits[_LIKE[name]],)
        steps = [pre_tokenizers.Split(Regex(each), behavior="isolated") for each in expressions]
        steps.append(pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False))
    else:
        says = "does not say how it splits texts" if name is None else f"splits texts as {name!r}, which is not known"
        report(
            f"the tokenizer of the GGUF file {says} (tokenizer.ggml.pre): they are split as GPT-2's tokenizer does, "
            "and some get other tokens than in training. QUIRE_TOKENIZER names the tokenizer to use instead"
        )
        return
    backend.pre_tokenizer = pre_tokenizers.Sequence(steps)
