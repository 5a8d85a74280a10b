"""The body of POST /v1/responses."""

from typing import Annotated, Any, ClassVar, Literal

from pydantic import AfterValidator, Discriminator, Field, Tag

from gateway_svc.http_api.body_model import (
    BodyModel,
    ErrorMessage,
    Items,
    JsonObject,
    Neutral,
    Notes,
    Number,
    OneOrMoreTexts,
    misfit,
    not_served,
    option,
    tag,
    type_of,
)
from gateway_svc.http_api.openai import unsupported_fields
from gateway_svc.http_api.openai.chat_models import ChatBody
from gateway_svc.http_api.openai.constraint_models import StructuredOutputs
from gateway_svc.http_api.openai.generation_body import CompletionBody, LogitBias
from gateway_svc.http_api.responses.tool_models import ResponseTool, ToolChoiceField

_MAX_METADATA = 16
_MAX_METADATA_NAME = 64
_MAX_METADATA_VALUE = 512
_MAX_MARK = 1024  # characters of a name that comes back; it is kept while the response is made

INCLUDABLE = (
    "message.output_text.logprobs",
    # What these add is always there, or belongs to tools and inputs that are not served.
    "reasoning.encrypted_content",
    "file_search_call.results",
    "web_search_call.results",
    "web_search_call.action.sources",
    "message.input_image.image_url",
    "computer_call_output.output.image_url",
    "code_interpreter_call.outputs",
)


def _only_text(kind: str | None) -> str | None:
    if kind not in ("input_text", "output_text", "text"):
        raise not_served("only text is served")
    return kind


class InputTextPart(BodyModel):
    """A part of an item's content."""

    type: Annotated[str | None, AfterValidator(_only_text)] = Field(
        None, description="Only text is served.", validate_default=True, json_schema_extra={"enum": ["input_text"]}
    )
    text: str = Field(description="The text.")


def _kind_of_content(value: Any) -> str:
    return tag("text") if isinstance(value, str) else tag("parts")


_Content = Annotated[
    Annotated[str, Tag(tag("text"))] | Annotated[Items[InputTextPart], Tag(tag("parts"))],
    Discriminator(_kind_of_content),
]


class MessageItem(BodyModel):
    """A message."""

    type: Literal["message"] | None = option("message, or absent.", "message")
    id: str | None = option("The id of an item of an earlier response.")
    role: Annotated[
        Literal["user", "assistant", "system", "developer"],
        ErrorMessage("must be user, assistant, system or developer"),
    ] = Field(description="user, assistant, system or developer.")
    content: _Content = Field(description="The text, or its parts.")


class FunctionCallItem(BodyModel):
    """A call that the model made."""

    type: Literal["function_call"]
    id: str | None = option("The item's id.")
    call_id: str = Field(description="The call's id, to which its output refers.")
    name: str = Field(description="The function.")
    namespace: str | None = option("The function's namespace.")
    arguments: str = Field(description="A JSON object as text.")


class FunctionOutputItem(BodyModel):
    """The output of a call."""

    type: Literal["function_call_output"]
    id: str | None = option("The item's id.")
    call_id: str = Field(description="The call.")
    output: _Content = Field(description="The text, or its parts.")


class CustomCallItem(BodyModel):
    """A call of a custom tool that the model made."""

    type: Literal["custom_tool_call"]
    id: str | None = option("The item's id.")
    call_id: str = Field(description="The call's id, to which its output refers.")
    name: str = Field(description="The tool.")
    input: str = Field(description="The text that it took.")


class CustomOutputItem(FunctionOutputItem):
    """The output of a call of a custom tool."""

    type: Literal["custom_tool_call_output"]  # type: ignore[assignment]


class ReasoningTextPart(BodyModel):
    """A part of the reasoning."""

    text: str = Field(description="The text.")


class ReasoningItem(BodyModel):
    """Reasoning of an earlier response."""

    type: Literal["reasoning"]
    id: str | None = option("The item's id.")
    content: Items[ReasoningTextPart] | None = option("The reasoning.")
    summary: Items[ReasoningTextPart] | None = option("Its summary, which is used where there is no content.")
    encrypted_content: str | None = option("Not used; not served without content or summary.")


class UnservedItem(BodyModel):
    """Any other item."""

    @classmethod
    def refuse(cls, item: "UnservedItem") -> "UnservedItem":
        """Raises the error that such an item is not served."""
        raise not_served("is not served", "type")


_ITEMS = (
    "message",
    "function_call",
    "function_call_output",
    "custom_tool_call",
    "custom_tool_call_output",
    "reasoning",
)


def _kind_of_item(value: Any) -> str:
    kind = type_of(value)
    if kind is None:
        return tag("message")
    return tag(kind) if kind in _ITEMS else tag("other")


InputItem = Annotated[
    Annotated[MessageItem, Tag(tag("message"))]
    | Annotated[FunctionCallItem, Tag(tag("function_call"))]
    | Annotated[FunctionOutputItem, Tag(tag("function_call_output"))]
    | Annotated[CustomCallItem, Tag(tag("custom_tool_call"))]
    | Annotated[CustomOutputItem, Tag(tag("custom_tool_call_output"))]
    | Annotated[ReasoningItem, Tag(tag("reasoning"))]
    | Annotated[UnservedItem, AfterValidator(UnservedItem.refuse), Tag(tag("other"))],
    Discriminator(_kind_of_item),
]


def _kind_of_input(value: Any) -> str:
    return tag("text") if isinstance(value, str) else tag("items")


class TextFormat(BodyModel):
    """What the text must match."""

    type: Annotated[
        Literal["text", "json_object", "json_schema"], ErrorMessage('must be "text", "json_object" or "json_schema"')
    ] = Field(description="text, json_object or json_schema.")
    name: str | None = option("The schema's name.")
    description: str | None = option("What the schema is for.")
    schema_: JsonObject | None = option("The JSON Schema of the type json_schema.", alias="schema")
    strict: bool | None = option("Whether objects have no properties but those that the schema lists.", False)


class TextOptions(BodyModel):
    """Options of the text."""

    unserved: ClassVar[Neutral] = {"verbosity": ("medium",)}

    format: TextFormat | None = option("What the text must match.")


_Summary = Annotated[Literal["auto", "concise", "detailed"], ErrorMessage("must be auto, concise or detailed")]


class ReasoningOptions(BodyModel):
    """Options of the reasoning."""

    unserved: ClassVar[Neutral] = {
        "mode": ("standard",),
        "context": ("auto",),
    }

    effort: str | None = option(
        "How much the model reasons, if its template takes that.",
        examples=["none", "minimal", "low", "medium", "high", "xhigh"],
    )
    summary: _Summary | None = option("A summary: items have the reasoning itself instead.")
    generate_summary: _Summary | None = option("An earlier name of summary.")


class ResponseStreamOptions(BodyModel):
    """Options of a stream."""

    without_effect: ClassVar[Notes] = unsupported_fields.STREAM_OPTIONS


class PromptCacheOptions(BodyModel):
    """Options of the prompt cache."""

    unserved: ClassVar[Neutral] = {
        "comparison_response_id": (),
        "prewarm": (False,),
    }
    without_effect: ClassVar[Notes] = {
        "mode": "What is cached: every prefix is.",
        "ttl": "How long prefixes are cached: as long as there is memory.",
    }


def _metadata(pairs: dict[Any, Any]) -> dict[Any, Any]:
    if len(pairs) > _MAX_METADATA:
        raise misfit(f"must have at most {_MAX_METADATA} entries")
    for name, value in pairs.items():
        if len(name) > _MAX_METADATA_NAME:
            raise misfit(f"must have names of at most {_MAX_METADATA_NAME} characters")
        if not isinstance(value, str) or len(value) > _MAX_METADATA_VALUE:
            raise misfit(f"must have strings of at most {_MAX_METADATA_VALUE} characters as values")
    return pairs


def _mark(text: str) -> str:
    if len(text) > _MAX_MARK:
        raise misfit(f"must have at most {_MAX_MARK} characters")
    return text


_Mark = Annotated[str, AfterValidator(_mark)]

_Input = Annotated[
    Annotated[str, Tag(tag("text"))] | Annotated[Items[InputItem], Tag(tag("items"))],
    Discriminator(_kind_of_input),
]


class ResponsesBody(BodyModel):
    """A body of POST /v1/responses."""

    elsewhere: ClassVar = (ChatBody, CompletionBody)
    unserved: ClassVar[Neutral] = {
        "context_management": ([],),
        "conversation": (),
        "enable_response_messages": (False,),
        "image": (),
        "n": (1,),
        "previous_input_messages": ([],),
    }

    without_effect: ClassVar[Notes] = {
        "access_programs": "Of which of OpenAI's programs the caller is a part.",
        "prompt_cache_retention": "How long prefixes are cached: as long as there is memory.",
        "service_tier": "The class of service: requests differ by priority.",
    }

    model: str | None = option("Name or alias of the model; absent: the first model.")
    input: _Input = Field(description="The user's text, or the items that follow those of the previous response.")
    instructions: str | None = option("A system message before everything else; not kept for later responses.")
    previous_response_id: str | None = option("The response whose conversation this one continues.")
    background: bool | None = option("Whether the response is made while no client waits for it.", False)
    stream: bool | None = option("Whether the answer is a stream of events.", False)
    stream_options: ResponseStreamOptions | None = option("Options of the stream.")
    store: bool | None = option("Whether the response can be retrieved later.", True)
    metadata: Annotated[JsonObject, AfterValidator(_metadata)] | None = option(
        "Up to 16 strings by name, which come back with the response.", maxProperties=_MAX_METADATA
    )
    max_output_tokens: int | None = option("The most tokens of the answer, with its reasoning.", minimum=1)
    max_tool_calls: int | None = option("Limits built-in tools, which are not served.", minimum=1)
    temperature: Number | None = option("0 takes the most probable token.", minimum=0, maximum=2)
    top_p: Number | None = option("Samples from the most probable tokens with this probability together.")
    top_k: int | None = option("Samples from so many most probable tokens; 0 or -1: from all.")
    min_p: Number | None = option("The least probability of a token, relative to the most probable one.")
    typical_p: Number | None = option("Samples from the most typical tokens with this probability.")
    presence_penalty: Number | None = option("Penalty of tokens that the answer has.", minimum=-2, maximum=2)
    frequency_penalty: Number | None = option("Penalty of tokens, times their count so far.", minimum=-2, maximum=2)
    repetition_penalty: Number | None = option("Divides logits of tokens that occurred.", maximum=10)
    seed: int | None = option("Repeats the samples of another request.")
    logit_bias: LogitBias | None = option("Is added to the logits of tokens, by their ids.", maxProperties=1024)
    bad_words: Items[str] | None = option("Texts that are not generated.", maxItems=1024)
    min_tokens: int | None = option("The fewest tokens of the answer.", 0, minimum=0)
    stop: OneOrMoreTexts | None = option(
        "Texts that end the answer, which is returned without them. At most 64, of 1 to 1,024 characters."
    )
    include_stop_str_in_output: bool | None = option(
        "Whether the answer has the stop text, or the text of the token, that ends it.", False
    )
    stop_token_ids: Items[int] | None = option("Tokens that end the answer.", maxItems=64)
    ignore_eos: bool | None = option("Whether the model's end-of-text token is generated as any other.", False)
    skip_special_tokens: bool | None = option("Whether special tokens are left out of the text.", True)
    spaces_between_special_tokens: bool | None = option(
        "Whether special tokens in the text have the spaces between them that the tokenizer writes.", True
    )
    priority: int | None = option("Higher goes first.")
    cache_salt: str | None = option(
        "Only requests of the tenant with the same text share cached prefixes, as in vLLM.", minLength=1, maxLength=1024
    )
    top_logprobs: int | None = option("The number of most probable tokens to return for each.", minimum=0)
    include: Items[Annotated[str, AfterValidator(lambda one: _includable(one))]] | None = option(
        "Further output. message.output_text.logprobs adds log-probabilities.", examples=[list(INCLUDABLE[:1])]
    )
    tools: Items[ResponseTool] | None = option(
        "Tools that the model may call; functions also in namespaces.", maxItems=128
    )
    tool_choice: ToolChoiceField | None = option(
        "Whether the model calls tools, which one, or which ones it may.", "auto"
    )
    parallel_tool_calls: bool | None = option("Whether an answer may have several calls.", True)
    text: TextOptions | None = option("Options of the text.")
    structured_outputs: StructuredOutputs | None = option("A constraint, as in vLLM; not beside a text.format.")
    reasoning: ReasoningOptions | None = option("Options of the reasoning.")
    include_reasoning: bool | None = option("Whether the answer has the model's reasoning.", True)
    chat_template_kwargs: JsonObject | None = option("Variables for the chat template, at most 262,144 characters.")
    truncation: Annotated[Literal["auto", "disabled"], ErrorMessage('must be "auto" or "disabled"')] | None = option(
        "What is done with a conversation that does not fit the context: disabled refuses it, auto leaves out its "
        "oldest messages.",
        "disabled",
    )
    user: _Mark | None = option("Who asks; comes back with the response.", maxLength=_MAX_MARK)
    safety_identifier: _Mark | None = option("Who asks; comes back with the response.", maxLength=_MAX_MARK)
    prompt_cache_key: _Mark | None = option(
        "Comes back with the response; prefixes are found without it.", maxLength=_MAX_MARK
    )
    prompt_cache_options: PromptCacheOptions | None = option("Options of the prompt cache.")


def _includable(one: str) -> str:
    if one not in INCLUDABLE:
        raise misfit("is not one of the values of include")
    return one


class InputTokensBody(ResponsesBody):
    """A body of POST /v1/responses/input_tokens: that of a response, in which the input may be absent."""

    unserved: ClassVar[Neutral] = {**ResponsesBody.unserved, "personality": ()}

    input: _Input | None = option(  # type: ignore[assignment]
        "The user's text, or the items that follow those of the previous response."
    )
