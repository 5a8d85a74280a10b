"""Bodies as pydantic models: what the models of every protocol share, and the errors of values that do not fit.

A model checks types and required fields. The ranges that it describes are for the API's document: the one validator
behind all protocols checks them.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Annotated, Any, ClassVar, Self, TypeVar, get_args

from pydantic import (
    AllowInfNan,
    BaseModel,
    ConfigDict,
    Discriminator,
    Field,
    GetCoreSchemaHandler,
    GetJsonSchemaHandler,
    Tag,
    ValidationError,
    WithJsonSchema,
    model_validator,
)
from pydantic.json_schema import JsonSchemaValue
from pydantic_core import CoreSchema, ErrorDetails, PydanticCustomError, core_schema

from gateway_svc.http_api.json_body import JsonBody
from svc_common.errors import QuireError, Reason

T = TypeVar("T")

Neutral = Mapping[str, Sequence[Any]]
"""Fields that are not served, with the values that turn them off: those are accepted."""


class _StopsAtFirstError:
    """Annotates a list. pydantic's own annotation is not hashable, as a part of a union must be."""

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        return {**handler(source), "fail_fast": True}


Notes = Mapping[str, str]
"""Fields that are accepted without an effect on the answer, each with a description."""

Number = Annotated[float, AllowInfNan(False)]
Items = Annotated[list[T], _StopsAtFirstError()]
"""A list. Its first item that does not fit is the only error: one body may have a million of them."""
JsonObject = Annotated[dict[Any, Any], WithJsonSchema({"type": "object"})]
"""An object with any fields."""

_NOT_SERVED = "not_served"
_MISFIT = "misfit"
_TAG = "~"

_MESSAGES = {
    "missing": "must be given",
    "string_type": "must be a string",
    "string_unicode": "is not valid Unicode",
    "int_type": "must be an integer",
    "float_type": "must be a number",
    "finite_number": "must be a finite number",
    "bool_type": "must be true or false",
    "list_type": "must be a list",
    "dict_type": "must be an object",
    "model_type": "must be an object",
}
"""Messages by pydantic's types of errors."""


class BodyModel(BaseModel):
    """An object of a body. A field that is null counts as absent. Fields that the model does not have are ignored."""

    model_config = ConfigDict(strict=True, frozen=True, extra="ignore")

    unserved: ClassVar[Neutral] = {}
    without_effect: ClassVar[Notes] = {}
    elsewhere: ClassVar[tuple[type["BodyModel"], ...]] = ()
    """Bodies of other protocols. Fields that only these know are added to `unserved`, or to `without_effect` where they
    have no effect there either: else they would be ignored."""

    @classmethod
    def __pydantic_init_subclass__(cls, **_: Any) -> None:
        own = cls.served_fields() | cls.unserved.keys() | cls.without_effect.keys()
        for other in reversed(cls.elsewhere):  # the first one's values are taken
            notes = {name: text for name, text in other.without_effect.items() if name not in own}
            names = other.known_fields() - own - notes.keys()
            cls.without_effect = {**cls.without_effect, **notes}
            cls.unserved = {**cls.unserved, **{name: other._neutral(name) for name in sorted(names)}}

    @classmethod
    @cache
    def served_fields(cls) -> frozenset[str]:
        """The names of fields that have an effect."""
        return frozenset(field.alias or name for name, field in cls.model_fields.items())

    @classmethod
    @cache
    def known_fields(cls) -> frozenset[str]:
        """The names of all fields that the model knows, those that are not served included."""
        return cls.served_fields().union(cls.unserved, cls.without_effect)

    @classmethod
    @cache
    def option_objects(cls) -> Mapping[str, type["BodyModel"]]:
        """The fields that are one object of fixed fields, with its model."""
        found: dict[str, type[BodyModel]] = {}
        for name, field in cls.model_fields.items():
            for kind in get_args(field.annotation) or (field.annotation,):
                if isinstance(kind, type) and issubclass(kind, BodyModel):
                    found[field.alias or name] = kind
        return found

    @classmethod
    def read(cls, body: JsonBody) -> Self:
        """Reads a body. Raises QuireError, which names the field as the body spells it."""
        model = cls.of(body.values)
        body.reject_non_finite()
        return model

    @classmethod
    def of(cls, values: Mapping[str, Any]) -> Self:
        """Reads parsed JSON. Raises QuireError."""
        try:
            return cls.model_validate(values)
        except ValidationError as error:
            raise _error(error.errors(include_url=False)[0]) from None

    @classmethod
    def __get_pydantic_json_schema__(cls, schema: CoreSchema, handler: GetJsonSchemaHandler) -> JsonSchemaValue:
        """The schema for the API's document, with the fields that only `unserved` and `without_effect` have."""
        described = handler(schema)
        properties = handler.resolve_ref_schema(described).setdefault("properties", {})
        for name, neutral in sorted(cls.unserved.items()):
            properties[name] = {"enum": [*neutral, None], "description": "Not served."}
        for name, description in cls.without_effect.items():
            properties[name] = {"description": f"Without effect. {description}"}
        return described

    @classmethod
    def _neutral(cls, name: str) -> Sequence[Any]:
        """The values of a field that turn it off: of one that is served, a default of true, false or empty text."""
        if name in cls.unserved:
            return cls.unserved[name]
        field = next(field for key, field in cls.model_fields.items() if (field.alias or key) == name)
        extra = field.json_schema_extra
        default = extra.get("default") if isinstance(extra, dict) else None
        return (default,) if isinstance(default, bool) or default == "" else ()

    @model_validator(mode="before")
    @classmethod
    def _reject_unserved(cls, values: Any) -> Any:
        if cls.unserved and isinstance(values, dict):
            for name, value in values.items():
                if value is not None and value not in cls.unserved.get(name, (value,)):
                    raise not_served("is not served", name)
        return values


@dataclass(frozen=True, slots=True)
class ErrorMessage:
    """Annotates a type: the message of the error for a value that does not fit it."""

    message: str

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        return core_schema.custom_error_schema(handler(source), _MISFIT, custom_error_message=self.message)


def option(description: str, default: Any = None, *, alias: str | None = None, **schema: Any) -> Any:
    """An optional field. `default` and `schema`, such as its range, are for the API's document."""
    extra = schema if default is None else {"default": default, **schema}
    return Field(None, description=description, alias=alias, json_schema_extra=extra)


def type_of(value: Any) -> Any:
    """The `type` of a part of a body, or of the model that was made of it; None: it has none."""
    return value.get("type") if isinstance(value, dict) else getattr(value, "type", None)


def tag(kind: str) -> str:
    """The tag of one type of a union. Paths of errors leave tags out."""
    return _TAG + kind


OneOrMoreTexts = Annotated[
    Annotated[str, Tag(tag("text"))] | Annotated[Items[str], Tag(tag("list"))],
    Discriminator(lambda value: tag("text") if isinstance(value, str) else tag("list")),
]


def not_served(message: str, name: str | None = None) -> PydanticCustomError:
    """The error to raise in a validator about what is not served: of its value, or of a field of this name in it."""
    return PydanticCustomError(_NOT_SERVED, "{message}", {"message": message, "name": name})


def misfit(message: str) -> PydanticCustomError:
    """The error to raise in a validator about its value."""
    return PydanticCustomError(_MISFIT, "{message}", {"message": message})


def _error(error: ErrorDetails) -> QuireError:
    path = [part for part in error["loc"] if not (isinstance(part, str) and part.startswith(_TAG))]
    if error["type"] == _NOT_SERVED:
        context = error["ctx"]
        where = _path([*path, context["name"]] if context["name"] is not None else path)
        return QuireError(Reason.FEATURE_UNSUPPORTED, context["message"], field=where)
    return QuireError(Reason.INVALID_FIELD, _message(error, path), field=_path(path))


def _message(error: ErrorDetails, path: Sequence[str | int]) -> str:
    kind, value = error["type"], error["input"]
    if kind == "float_type" and type(value) is int:  # beyond the range of a float
        kind = "finite_number"
    elif value is None and isinstance(path[-1], str):  # a field that is null, not an item of a list
        kind = "missing"
    return _MESSAGES.get(kind, error["msg"])


def _path(parts: Sequence[str | int]) -> str:
    """A path as errors have it, such as messages[0].content[1].type."""
    return "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in parts).removeprefix(".")
