"""Fields that bodies of completions and of embeddings have: prompts, the truncation side, the retention of records."""

from typing import Annotated, Any, Literal

from pydantic import Discriminator, Field, Tag

from gateway_svc.http_api.body_model import ErrorMessage, Items, tag
from gateway_svc.http_api.json_body import invalid
from gateway_svc.retention import NONE, UNTIL_END, Retention
from gateway_svc.unvalidated_request import TextPrompt, TokenPrompt


def _kind_of_prompt(value: Any) -> str | None:
    match value:
        case str():
            return tag("text")
        case [str() | list(), *_]:
            return tag("prompts")
        case list():
            return tag("tokens")
    return None


def _kind_of_item(value: Any) -> str:
    return tag("text") if isinstance(value, str) else tag("tokens")


_Text = Annotated[str, Tag(tag("text"))]
_Tokens = Annotated[Items[int], Tag(tag("tokens"))]
_Prompts = Annotated[Items[Annotated[_Text | _Tokens, Discriminator(_kind_of_item)]], Tag(tag("prompts"))]

PromptField = Annotated[
    _Text | _Tokens | _Prompts,
    Discriminator(
        _kind_of_prompt,
        custom_error_type="misfit",
        custom_error_message="must be a string, a list of strings, token ids, or a list of those",
    ),
]
"""A text, token ids, or a list of either."""

SideField = Annotated[Literal["left", "right"], ErrorMessage('must be "left" or "right"')]

RetentionField = Annotated[
    Literal["none", "until_end"] | Annotated[int, Field(ge=1)],
    ErrorMessage('must be "none", "until_end" or an integer of seconds, at least 1'),
]


def read_prompts(
    field: str,
    value: str | list[int] | list[str] | list[str | list[int]] | None,
    most: int,
    *,
    add_special_tokens: bool,
) -> list[tuple[TextPrompt | TokenPrompt | None, str]]:
    """The prompts of a field, with the name of each: at most `most` in a list. Raises QuireError."""

    def prompt(one: Any) -> TextPrompt | TokenPrompt:
        return TextPrompt(one, add_special_tokens) if isinstance(one, str) else TokenPrompt(one)

    match value:
        case None:
            return [(None, field)]
        case [str() | list(), *_]:
            if len(value) > most:
                raise invalid(field, f"must hold at most {most} prompts")
            return [(prompt(one), f"{field}[{item_index}]") for item_index, one in enumerate(value)]
    return [(prompt(value), field)]


def read_retention(value: str | int | None) -> Retention | None:
    """How long records are kept."""
    match value:
        case None:
            return None
        case "none":
            return NONE
        case int():
            return Retention(is_recorded=True, seconds=value)
    return UNTIL_END
