"""References of a JSON Schema that lead to nothing but themselves."""

from typing import Any

import pytest

from gateway_svc.json_schemas import endless_reference

NUM_REFERENCES = 30_000


def to(name: str) -> dict[str, Any]:
    return {"$ref": f"#/$defs/{name}"}


@pytest.mark.parametrize(
    ("definitions", "endless"),
    [
        ({"a": to("a")}, {"a"}),
        ({"a": to("b"), "b": to("a")}, {"a", "b"}),
        ({"a": {"allOf": [{"type": "null"}, to("a")]}}, {"a/allOf/1"}),
        ({"a": {"anyOf": [to("a"), to("a")]}}, {"a/anyOf/0", "a/anyOf/1"}),
        ({"a": {"anyOf": [to("b"), {"type": "null"}]}, "b": to("a")}, set()),
        ({"a": {"oneOf": [to("a"), True]}}, set()),
        ({"a": {"items": to("a")}}, set()),
        ({"a": {"anyOf": []}, "b": to("nowhere")}, set()),
    ],
)
def test_a_reference_that_leads_to_nothing_but_itself_is_found(definitions: Any, endless: set[str]) -> None:
    found = endless_reference({"items": to("a"), "$defs": definitions})
    assert found in ({"#/items/$ref", *(f"#/$defs/{one}/$ref" for one in endless)} if endless else {None})


@pytest.mark.parametrize("end", [{"type": "null"}, to("0")], ids=["to a type", "to the first"])
@pytest.mark.parametrize("keyword", ["$ref", "allOf", "anyOf"])
def test_long_chains_of_references_are_followed_once(keyword: str, end: dict[str, Any]) -> None:
    """Each one again for each step of the chain would take minutes."""

    def link(number: int) -> dict[str, Any]:
        return to(str(number + 1)) if keyword == "$ref" else {keyword: [to(str(number + 1))] * 2}

    definitions = {str(number): link(number) for number in range(NUM_REFERENCES)} | {str(NUM_REFERENCES): end}
    assert (endless_reference({"items": to("0"), "$defs": definitions}) is None) is ("type" in end)
