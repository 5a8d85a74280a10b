"""Schemas are found in grammars wherever the compiler reads them, and nowhere else."""

import pytest

from gateway_svc.lark_schemas import replace_schemas


@pytest.mark.parametrize(
    ("grammar", "expected"),
    [
        ('start: %json {"a": {"b": [1]}} "x"', 'start: %json <{"a": {"b": [1]}}> "x"'),
        (
            'start: "x" %json{"a":1}|%json true\nb: %json\n {}',
            'start: "x" %json<{"a":1}>|%json <true>\nb: %json\n <{}>',
        ),
        ('start: %json {\n"a":\n1}\nb: "c"', 'start: %json <{\n"a":\n1}>\n\n\nb: "c"'),
        ('start: %json {"a": "%json {}"}', 'start: %json <{"a": "%json {}"}>'),
    ],
)
def test_each_schema_is_replaced_on_as_many_lines(grammar: str, expected: str) -> None:
    assert replace_schemas(grammar, lambda schema: f"<{schema}>") == expected


@pytest.mark.parametrize(
    "grammar",
    [
        'start: "%json {}"',
        'start: "\\"%json {}"',
        "start: /%json {}/",
        "start: /\\/%json {}/",
        'start: "a" // %json {}',
        'start: "a" # "%json {}\n',
        "start: %json {'a': 1}",
        "start: %json",
        "start: %jsonb {}",
    ],
)
def test_what_is_no_schema_stays(grammar: str) -> None:
    assert replace_schemas(grammar, lambda _: "<schema>") == grammar


def test_a_schema_after_a_comment_with_a_quote_is_replaced() -> None:
    assert replace_schemas('# "\n// "\nstart: %json {}', lambda _: "<schema>") == '# "\n// "\nstart: %json <schema>'
