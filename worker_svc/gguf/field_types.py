"""What fields of a GGUF file's metadata may hold, by their names without that of the architecture."""

import re
from collections.abc import Callable
from typing import Any


def _is_whole(value: Any) -> bool:
    return type(value) is int and value >= 0


def _is_number(value: Any) -> bool:
    return type(value) in (int, float)


def _is_text(value: Any) -> bool:
    return isinstance(value, str)


def _is_list(fits: Callable[[Any], bool]) -> Callable[[Any], bool]:
    return lambda value: isinstance(value, list) and all(map(fits, value))


def _is_of_layers(fits: Callable[[Any], bool]) -> Callable[[Any], bool]:
    return lambda value: all(map(fits, value)) if isinstance(value, list) and value else fits(value)


# Names, what the value must be, and whether it is that.
_TYPES: tuple[tuple[re.Pattern[str], str, Callable[[Any], bool]], ...] = (
    (re.compile(r"general\.architecture|tokenizer\.ggml\.(model|pre)|rope\.scaling\.type"), "a text", _is_text),
    (re.compile(r"tokenizer\.ggml\.(tokens|merges)"), "a list of texts", _is_list(_is_text)),
    (re.compile(r"tokenizer\.ggml\.scores"), "a list of numbers", _is_list(_is_number)),
    (re.compile(r"tokenizer\.ggml\.token_type"), "a list of whole numbers", _is_list(_is_whole)),
    (
        re.compile(
            r"tokenizer\.ggml\.\w+_token_id|split\.count|block_count|context_length|embedding_length|"
            r"rope\.dimension_count(_swa)?"
        ),
        "a whole number",
        _is_whole,
    ),
    (
        re.compile(r"rope\.(freq_base(_swa)?|scale_linear|scaling\.\w*(factor|beta_fast|beta_slow))"),
        "a number",
        _is_number,
    ),
    (
        re.compile(
            r".*_(count|length)(_\w+)?|.*_lora_rank|attention\.(sliding_window|shared_kv_layers)|nextn_predict_layers"
        ),
        "a whole number, or a list with one for each layer",
        _is_of_layers(_is_whole),
    ),
    (
        re.compile(r".*_(epsilon|softcapping|scale|multiplier)|attention\.scale"),
        "a number, or a list with one for each layer",
        _is_of_layers(_is_number),
    ),
)


def wrong_type(name: str, value: Any) -> str | None:
    """What a field must be whose value is of another type, or negative where it counts; None: it is that, or is read as
    whatever it is.
    """
    return next((must_be for names, must_be, fits in _TYPES if names.fullmatch(name) and not fits(value)), None)
