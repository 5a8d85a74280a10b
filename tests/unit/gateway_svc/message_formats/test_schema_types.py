"""The types that a tool's schema allows for its parameters."""

from typing import Any

import pytest

from gateway_svc.message_formats.schema_types import ALL_TYPES, parameter_types


class CountedSchema(dict[str, Any]):
    """A schema that counts how often it is looked at."""

    num_looks = 0

    def get(self, key: str, default: Any = None) -> Any:
        self.num_looks += key == "type"
        return super().get(key, default)


@pytest.mark.parametrize(
    ("schema", "types"),
    [
        ({"type": ["string", "null"], "anyOf": [{"type": "string"}, {"type": "integer"}]}, {"string"}),
        ({"anyOf": [{"const": 1}, {"enum": ["a", None]}]}, {"integer", "number", "string", "null"}),
        ({"allOf": [{"type": ["array", "object"]}, {"$ref": "#/$defs/list"}]}, {"array"}),
        ({"enum": [0.5, 2, "x"]}, {"integer", "number", "string"}),
        ({"type": "integer", "enum": [2.0, 0.5]}, {"integer"}),
        ({"anyOf": [{"const": "a"}] * 1_000, "type": ["string", "boolean"]}, {"string"}),
        (True, ALL_TYPES),
    ],
)
def test_a_parameter_has_the_types_that_all_its_keywords_allow(schema: Any, types: set[str]) -> None:
    parameters = {"properties": {"a": schema}, "$defs": {"list": {"type": "array"}}}
    assert parameter_types(parameters, "a") == types


@pytest.mark.parametrize("keyword", ["anyOf", "oneOf", "allOf"])
def test_a_schema_whose_parts_all_refer_to_it_is_not_looked_at_without_end(keyword: str) -> None:
    schema = CountedSchema({keyword: [{"$ref": "#/properties/a"}] * 4, "type": ["string", "integer"]})
    assert parameter_types({"properties": {"a": schema}}, "a") == {"string", "integer"}
    assert schema.num_looks <= 1_024
