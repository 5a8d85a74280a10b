"""Bodies and answers of the routes of the tokenizer, as vLLM has them."""

from typing import ClassVar

from pydantic import ConfigDict, Field

from gateway_svc.http_api.answer_model import AnswerModel
from gateway_svc.http_api.body_model import BodyModel, Items, Notes, option
from gateway_svc.http_api.openai import unsupported_fields
from gateway_svc.http_api.openai.chat_models import ChatBody


class TokenizeBody(ChatBody):
    """A body of /tokenize: a text, or a chat. It may be one of /v1/chat/completions: fields that do not make the prompt
    have no effect."""

    prompt: str | None = option("A text; in place of messages.")
    add_special_tokens: bool | None = option(
        "Whether the tokenizer adds its special tokens: by default to a text, and not to a chat, whose template "
        "writes them."
    )
    return_token_strs: bool | None = option("Whether the answer has the tokens as the vocabulary spells them.", False)


class DetokenizeBody(BodyModel):
    """A body of /detokenize."""

    without_effect: ClassVar[Notes] = unsupported_fields.WITHOUT_EFFECT

    model: str | None = option("Name or alias of the model; absent: the first model.")
    tokens: Items[int] | None = option("Token ids.")


class TokenizeAnswer(AnswerModel):
    """Tokens."""

    count: int
    max_model_len: int = Field(description="The length of the context, in tokens.")
    tokens: list[int]
    token_strs: list[str] | None = Field(description="The tokens as the vocabulary spells them, if requested.")


class DetokenizeAnswer(AnswerModel):
    """A text."""

    prompt: str


class TokenizerInfoAnswer(AnswerModel):
    """The contents of tokenizer_config.json."""

    model_config = ConfigDict(extra="allow")

    tokenizer_class: str
    chat_template: str | None = Field(None, description="The template in use.")
