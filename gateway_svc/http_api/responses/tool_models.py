"""Tools in the body of POST /v1/responses, and the choice among them."""

from typing import Annotated, Any, ClassVar, Literal

from pydantic import AfterValidator, Discriminator, Field, Tag

from gateway_svc.http_api.body_model import (
    BodyModel,
    ErrorMessage,
    Items,
    JsonObject,
    Neutral,
    not_served,
    option,
    tag,
    type_of,
)
from gateway_svc.http_api.openai.chat_models import ToolGrammar


def _only_function(kind: str) -> str:
    if kind != "function":
        raise not_served("only function is served")
    return kind


def _only_served_tools(kind: str) -> str:
    if kind != "function":
        raise not_served("only function, custom and namespace are served")
    return kind


def _only_served_choices(kind: str) -> str:
    if kind not in ("function", "custom"):
        raise not_served("only function, custom and allowed_tools are served")
    return kind


class FunctionTool(BodyModel):
    """A function that the model may call."""

    unserved: ClassVar[Neutral] = {
        "allowed_callers": (["direct"],),
        "async": (False,),
        "defer_loading": (False,),
        "output_schema": (),
    }

    type: Annotated[str, AfterValidator(_only_function)] = Field(description="Only function is served.")
    name: str = Field(description="1 to 64 letters, digits, _ and -.")
    description: str | None = option("What it does.")
    parameters: JsonObject | None = option("A JSON Schema of its arguments.")
    strict: bool | None = option("Whether arguments are always valid for the schema.", False)


class TopLevelTool(FunctionTool):
    """A function in no namespace."""

    type: Annotated[str, AfterValidator(_only_served_tools)] = Field(description="function.")


def _kind_of_format(value: Any) -> str:
    return tag("grammar") if type_of(value) == "grammar" else tag("text")


class TextFormatOfInput(BodyModel):
    """Any text."""

    type: Annotated[Literal["text"], ErrorMessage('must be "text" or "grammar"')] = Field(description="text.")


class GrammarOfInput(ToolGrammar):
    """A text that matches a grammar."""

    type: Literal["grammar"] = Field(description="grammar.")


class CustomTool(BodyModel):
    """A tool that the model may call and that takes a text."""

    unserved: ClassVar[Neutral] = {
        "allowed_callers": (["direct"],),
        "async": (False,),
        "defer_loading": (False,),
    }

    type: Literal["custom"] = Field(description="custom.")
    name: str = Field(description="1 to 64 letters, digits, _ and -.")
    description: str | None = option("What it does.")
    format: (
        Annotated[
            Annotated[TextFormatOfInput, Tag(tag("text"))] | Annotated[GrammarOfInput, Tag(tag("grammar"))],
            Discriminator(_kind_of_format),
        ]
        | None
    ) = option("What the text must match; absent: it is any text.")


class NamespaceTool(BodyModel):
    """Functions that belong together. Two namespaces may have functions of the same name."""

    type: Literal["namespace"]
    name: str = Field(description="Letters, digits, _ and -; with __ and a function's name at most 64 characters.")
    description: str | None = option("What the functions are for; each function's description begins with it.")
    tools: Items[FunctionTool] = Field(description="The functions.")


def _kind_of_tool(value: Any) -> str:
    kind = type_of(value)
    return tag(kind) if kind in ("namespace", "custom") else tag("function")


ResponseTool = Annotated[
    Annotated[TopLevelTool, Tag(tag("function"))]
    | Annotated[CustomTool, Tag(tag("custom"))]
    | Annotated[NamespaceTool, Tag(tag("namespace"))],
    Discriminator(_kind_of_tool),
]


class ChosenTool(BodyModel):
    """A tool by its name."""

    type: Annotated[str, AfterValidator(_only_served_choices)] = Field(description="function or custom.")
    name: str = Field(description="The tool.")
    namespace: str | None = option("The function's namespace.")


class AllowedResponseTools(BodyModel):
    """Tools of which alone the model may call some."""

    type: Literal["allowed_tools"] = Field(description="allowed_tools.")
    mode: Annotated[Literal["auto", "required"], ErrorMessage("must be auto or required")] = Field(
        description="Whether the model decides whether it calls one, or must."
    )
    tools: Items[ChosenTool] = Field(
        description="The tools, each by its name.", json_schema_extra={"minItems": 1, "maxItems": 128}
    )


def _kind_of_choice(value: Any) -> str:
    if isinstance(value, str):
        return tag("mode")
    return tag("allowed_tools") if type_of(value) == "allowed_tools" else tag("name")


ToolChoiceField = Annotated[
    Annotated[
        Literal["auto", "none", "required"],
        ErrorMessage("must be auto, none, required, or an object that names tools"),
        Tag(tag("mode")),
    ]
    | Annotated[ChosenTool, Tag(tag("name"))]
    | Annotated[AllowedResponseTools, Tag(tag("allowed_tools"))],
    Discriminator(_kind_of_choice),
]
