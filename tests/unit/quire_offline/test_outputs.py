"""Outputs of sequences: whether they have ended, and calls of tools."""

from dataclasses import replace

from gateway_svc.output import Chunk, ToolCallDelta
from gateway_values import vocabulary_of
from quire_offline import CompletionOutput, ToolCall
from tiny_model import tiny_tokenizer


def test_a_sequence_has_ended_with_a_reason() -> None:
    output = CompletionOutput(0, "a", [5])
    assert [output.finished(), replace(output, finish_reason="stop").finished()] == [False, True]


def test_a_call_has_arguments_or_the_text_that_a_custom_tool_takes() -> None:
    calls = [ToolCallDelta(0, "{}", "call_1", "f"), ToolCallDelta(1, "1+", "call_2", "run", is_custom=True)]
    output = CompletionOutput.of(Chunk(0, 0, tool_calls=calls), vocabulary_of(tiny_tokenizer()), has_logprobs=False)
    assert output.tool_calls == [ToolCall("call_1", "f", "{}"), ToolCall("call_2", "run", input="1+")]
