"""The fields of bodies that constrain the output: those of OpenAI, vLLM, SGLang and llama.cpp."""

from typing import Annotated, Any, ClassVar

from pydantic import AfterValidator, WithJsonSchema

from gateway_svc.http_api.body_model import BodyModel, Items, Neutral, misfit, option
from gateway_svc.http_api.openai import unsupported_fields


def _check_schema(value: Any) -> Any:
    if not isinstance(value, dict | bool):
        raise misfit("must be a JSON Schema: an object, true or false")
    return value


def _check_schema_or_text(value: Any) -> Any:
    return value if isinstance(value, str) else _check_schema(value)


JsonSchema = Annotated[Any, AfterValidator(_check_schema), WithJsonSchema({"type": ["object", "boolean"]})]
JsonSchemaOrText = Annotated[
    Any, AfterValidator(_check_schema_or_text), WithJsonSchema({"type": ["object", "boolean", "string"]})
]


class NamedSchema(BodyModel):
    """A JSON Schema with its name."""

    name: str | None = option("Its name.")
    description: str | None = option("What it is for: without effect.")
    schema_: JsonSchema | None = option("The schema.", alias="schema")
    strict: bool | None = option("Whether objects that list properties have no others.", False)


class ResponseFormat(NamedSchema):
    """The format of the answer. A schema beside the type is llama.cpp's form."""

    type: str | None = option("The format.", enum=["text", "json_object", "json_schema"])
    json_schema: NamedSchema | None = option("The schema of the type json_schema.")


class StructuredOutputs(BodyModel):
    """One constraint, as in vLLM, and options of those to JSON."""

    unserved: ClassVar[Neutral] = unsupported_fields.STRUCTURED_OUTPUTS

    json_: JsonSchemaOrText | None = option("A JSON Schema, or its text.", alias="json")
    json_object: bool | None = option("Any JSON object.", False)
    regex: str | None = option("A regular expression that the whole text matches.")
    choice: Items[str] | None = option("One of these texts.")
    grammar: str | None = option("A grammar: GBNF if a rule has ::=, else Lark.")
    whitespace_pattern: str | None = option("A regular expression for what may stand between tokens of JSON.")
    disable_any_whitespace: bool | None = option("Whether JSON has no whitespace.", False)
    disable_additional_properties: bool | None = option("Whether objects have only properties of the schema.", False)


class ConstraintBody(BodyModel):
    """The fields of a body that constrain its output. A request has one constraint."""

    response_format: ResponseFormat | None = option("The format of the answer, as in OpenAI's API.")
    structured_outputs: StructuredOutputs | None = option("A constraint, as in vLLM.")
    guided_json: JsonSchemaOrText | None = option("A JSON Schema, as in vLLM before structured_outputs.")
    guided_json_object: bool | None = option("Any JSON object, as in vLLM before structured_outputs.", False)
    guided_regex: str | None = option("A regular expression, as in vLLM before structured_outputs.")
    guided_choice: Items[str] | None = option("One of these texts, as in vLLM before structured_outputs.")
    guided_grammar: str | None = option("A grammar, as in vLLM before structured_outputs.")
    guided_whitespace_pattern: str | None = option("As structured_outputs.whitespace_pattern.")
    json_schema: JsonSchemaOrText | None = option("A JSON Schema, as in SGLang and llama.cpp.")
    regex: str | None = option("A regular expression, as in SGLang.")
    grammar: str | None = option("A grammar, as in llama.cpp.")
    ebnf: str | None = option("A grammar, as in SGLang.")
