"""Grammars of answers that have calls or text: either can be written, or the constraint is refused."""

import pytest
from llguidance import LLTokenizer

from gateway_svc.constraints import ConstraintError, UnvalidatedConstraint
from gateway_svc.field_paths import Field
from gateway_svc.message_formats.grammar import CallRule, ReasoningRule
from gateway_svc.turn_constraints import CheckedTool, TurnConstraint, checked_turn_grammar
from svc_common.grammars import compile_grammar, load_grammar_tokenizer
from tiny_model import EOS, tiny_tokenizer

TOKENIZER: LLTokenizer = load_grammar_tokenizer(tiny_tokenizer().to_str(), [EOS])
BARE = ("json", "llama3_json", "pythonic", "xlam")
CHOICES = {"pythonic": "[get_time]", "xlam": '[{"a": 1}]'}


def grammar_of(name: str, answer: UnvalidatedConstraint, reasoning: ReasoningRule = ReasoningRule.NONE) -> str:
    tools = (CheckedTool("get_weather", None), CheckedTool("get_time", None))
    turn = TurnConstraint(answer.field, name, "think", tools, CallRule.AUTO, reasoning, True, {}, answer)
    return checked_turn_grammar(turn, TOKENIZER)


def begins(grammar: str, text: str) -> bool:
    tokens = TOKENIZER.tokenize_str(text)
    return compile_grammar(TOKENIZER, grammar).validate_tokens(tokens) == len(tokens)


@pytest.mark.parametrize("whitespace", [None, "", "[ \n]?"])
@pytest.mark.parametrize("name", BARE)
def test_a_schema_admits_answers_and_calls(name: str, whitespace: str | None) -> None:
    for answer in (
        UnvalidatedConstraint(Field.JSON_SCHEMA, '{"type": ["object", "array"]}', whitespace=whitespace),
        UnvalidatedConstraint(Field.JSON_OBJECT, whitespace=whitespace),
    ):
        grammar = grammar_of(name, answer)
        assert begins(grammar, '{"name":"Ann"}')
        assert begins(grammar, '{"a":1}')
        opening = {"pythonic": "[get_time(", "xlam": '[{"name":"get_time"'}.get(name, '{"name":"get_time"')
        assert begins(grammar, opening)


@pytest.mark.parametrize("reasoning", ReasoningRule)
@pytest.mark.parametrize("name", BARE)
def test_text_that_hides_calls_is_refused(name: str, reasoning: ReasoningRule) -> None:
    choice = CHOICES.get(name, '{"a": 1}')
    with pytest.raises(ConstraintError, match="is not supported beside tools") as error:
        grammar_of(name, UnvalidatedConstraint(Field.CHOICE, choices=(choice, "no")), reasoning)
    assert error.value.field is Field.CHOICE
    assert begins(grammar_of("hermes", UnvalidatedConstraint(Field.CHOICE, choices=(choice,))), choice)
    assert begins(grammar_of(name, UnvalidatedConstraint(Field.CHOICE, choices=("yes", "no"))), "no")
