"""Bodies of completions and chats with one bad field: status, code and the field's name as the body spells it."""

from collections.abc import Iterator
from typing import Any

import pytest

from bad_fields import (
    INVALID,
    NO_GRAMMAR,
    NOT_A,
    TOO_COMPLEX,
    TOO_LONG,
    TOOL,
    UNKNOWN,
    UNSUPPORTED,
    Case,
    check_refused,
    name_of,
)
from gateway_harness import Harness
from tiny_model import CONTEXT_LENGTH

pytestmark = pytest.mark.asyncio(loop_scope="module")

BASES: dict[str, dict[str, Any]] = {
    "completions": {"prompt": "hello"},
    "chat/completions": {"messages": [{"role": "user", "content": "hello"}]},
}
KINDS: dict[str, list[str]] = {
    "number": [
        "temperature", "top_p", "min_p", "typical_p", "presence_penalty", "frequency_penalty", "repetition_penalty",
        "length_penalty",
    ],
    "integer": ["top_k", "seed", "max_tokens", "min_tokens", "n", "best_of", "priority"],
    "flag": [
        "stream", "ignore_eos", "include_stop_str_in_output", "skip_special_tokens", "use_beam_search",
    ],
    "string": ["model"],
    "object": ["stream_options", "logit_bias"],
    "integers": ["stop_token_ids"],
}  # fmt: skip


def types() -> Iterator[Case]:
    """Values of a wrong type. A body with `stream_options` streams."""
    for kind, names in KINDS.items():
        for name in names:
            for value in NOT_A[kind]:
                extra = {"stream": True} if name == "stream_options" else {}
                yield "completions", {name: value, **extra}, INVALID, name


def ranges() -> Iterator[Case]:
    """Values outside a field's range."""
    rows: dict[str, list[Any]] = {
        "temperature": [-0.1, 2.1, 1e308, -1e308],
        "top_p": [0, -1, 1.01],
        "top_k": [-2, 2**63, -(2**63)],
        "min_p": [-0.01, 1.01],
        "typical_p": [0, 1.5],
        "presence_penalty": [-2.1, 2.1],
        "frequency_penalty": [-2.1, 2.1],
        "repetition_penalty": [0, -1, 10.5],
        "seed": [2**63, -(2**63) - 1, 10**40],
        "max_tokens": [0, -1, -(10**30)],
        "min_tokens": [-1, 17],
        "n": [0, -1, 129, 2**31, 10**30],
        "best_of": [0, -1, 129],
        "priority": [2**31, -(2**31) - 1],
        "logprobs": [-1, 21, 2**40],
        "logit_bias": [{"-1": 1}, {"a": 1}, {"1.0": 1}, {"": 1}, {"999999": 1}, {"5": 101}, {"5": "1"}, {"5": None},
                       {"٣": 1}, {str(token): 1 for token in range(1_025)}],
        "stop": [1, {}, True, ["a"] * 65],
        "stop_token_ids": [[1] * 65],
        "early_stopping": ["always", 1.5, [], "True"],
        "retention": ["always", 0, -1, True, [], {}, 1.5],
        "prompt": [1, True, {}, "", [], [[]], [[], "a"], ["a"] * 1_025],
    }  # fmt: skip
    named = {"prompt": {2: "prompt", 5: "prompt[0]", 6: "prompt[0]"}}
    for name, values in rows.items():
        for index, value in enumerate(values):
            yield "completions", {name: value}, INVALID, named.get(name, {}).get(index, name)


def items() -> Iterator[Case]:
    """Bad items of lists, by their index."""
    far, half = 10**6, "\ud800"
    for prompt, field in [
        ([5, -1], "prompt[1]"), ([5, far], "prompt[1]"), ([2**70], "prompt[0]"), ([5, "a"], "prompt[1]"),
        ([5, None], "prompt[1]"), ([5, True], "prompt[1]"), ([5, 1.0], "prompt[1]"), ([5, [5]], "prompt[1]"),
        (["a", 5], "prompt[1]"), (["a", None], "prompt[1]"), (["a", ""], "prompt[1]"), ([[5], [far]], "prompt[1][0]"),
        ([[5], ["a"]], "prompt[1][0]"), ([[5], [[5]]], "prompt[1][0]"), (["a", half], "prompt[1]"), (half, "prompt"),
    ]:  # fmt: skip
        yield "completions", {"prompt": prompt}, INVALID, field
    for stop, field in [
        ([""], "stop[0]"), (["a", ""], "stop[1]"), (["a", 1], "stop[1]"), ([None], "stop[0]"),
        (["a" * 1_025], "stop[0]"),
        ("", "stop"), ("a" * 1_025, "stop"), ([half], "stop[0]"), (half, "stop"), ([["a"]], "stop[0]"),
    ]:  # fmt: skip
        yield "completions", {"stop": stop}, INVALID, field
    for ids, index in [([5, far], 1), ([-1], 0), (["5"], 0), ([5, None], 1), ([True], 0), ([5.0], 0)]:
        yield "completions", {"stop_token_ids": ids}, INVALID, f"stop_token_ids[{index}]"
    user = {"role": "user", "content": "a"}
    text = {"type": "text", "text": "a"}
    bad: list[tuple[Any, str, str]] = [
        ("a", INVALID, ""), (None, INVALID, ""), ([], INVALID, ""),
        ({"content": "a"}, INVALID, ".role"), ({"role": None, "content": "a"}, INVALID, ".role"),
        ({"role": 1, "content": "a"}, INVALID, ".role"), ({"role": "root", "content": "a"}, INVALID, ".role"),
        ({"role": "", "content": "a"}, INVALID, ".role"), ({"role": "User", "content": "a"}, INVALID, ".role"),
        ({"role": "<|im_start|>", "content": "a"}, INVALID, ".role"),
        ({"role": "user"}, INVALID, ".content"), ({"role": "user", "content": None}, INVALID, ".content"),
        ({"role": "user", "content": 1}, INVALID, ".content"), ({"role": "user", "content": {}}, INVALID, ".content"),
        ({"role": "user", "content": []}, INVALID, ".content"),
        ({"role": "user", "content": half}, INVALID, ".content"),
        ({"role": "user", "content": ["a"]}, INVALID, ".content[0]"),
        ({"role": "user", "content": [text, None]}, INVALID, ".content[1]"),
        ({"role": "user", "content": [{"type": "text"}]}, INVALID, ".content[0].text"),
        ({"role": "user", "content": [{"type": "text", "text": 1}]}, INVALID, ".content[0].text"),
        ({"role": "user", "content": [{"type": 1, "text": "a"}]}, INVALID, ".content[0].type"),
        ({"role": "user", "content": [{"text": "a"}]}, UNSUPPORTED, ".content[0].type"),
        ({"role": "user", "content": [text, {"type": "image_url", "image_url": {"url": "file:///etc/passwd"}}]},
         UNSUPPORTED, ".content[1].type"),
        ({"role": "user", "content": [{"type": "input_audio"}]}, UNSUPPORTED, ".content[0].type"),
        ({**user, "name": 1}, INVALID, ".name"), ({**user, "name": ""}, INVALID, ".name"),
        ({**user, "name": "a" * 257}, INVALID, ".name"), ({**user, "name": half}, INVALID, ".name"),
        ({**user, "tool_call_id": 1}, INVALID, ".tool_call_id"),
        ({**user, "tool_call_id": ""}, INVALID, ".tool_call_id"),
        ({**user, "reasoning_content": 1}, INVALID, ".reasoning_content"),
        ({**user, "audio": {"id": "a"}}, UNSUPPORTED, ".audio"), ({**user, "refusal": "a"}, UNSUPPORTED, ".refusal"),
        ({**user, "tool_calls": 1}, INVALID, ".tool_calls"), ({**user, "tool_calls": [1]}, INVALID, ".tool_calls[0]"),
        ({**user, "tool_calls": [{}]}, INVALID, ".tool_calls[0].function"),
        ({**user, "tool_calls": [{"type": "web"}]}, UNSUPPORTED, ".tool_calls[0].type"),
        ({**user, "tool_calls": [{"type": "custom"}]}, INVALID, ".tool_calls[0].custom"),
        ({**user, "tool_calls": [{"type": "custom", "custom": {"name": "a"}}]}, INVALID,
         ".tool_calls[0].custom.input"),
        ({**user, "role": "assistant", "tool_calls": [{"type": "custom", "custom": {"name": "a", "input": half}}]},
         INVALID, ".tool_calls[0].custom.input"),
        ({**user, "role": "assistant", "tool_calls": [{"type": "custom", "custom": {"name": "", "input": "a"}}]},
         INVALID, ".tool_calls[0].custom.name"),
        ({**user, "tool_calls": [{"function": {}}]}, INVALID, ".tool_calls[0].function.name"),
        ({**user, "tool_calls": [{"function": {"name": "a", "arguments": {}}}]}, INVALID,
         ".tool_calls[0].function.arguments"),
        ({**user, "tool_calls": [{"function": {"name": "a"}}]}, INVALID, ".tool_calls"),
        ({**user, "function_call": 1}, INVALID, ".function_call"),
        ({**user, "function_call": {}}, INVALID, ".function_call.name"),
        ({**user, "function_call": {"name": "a"}, "tool_calls": [{"function": {"name": "a"}}]}, INVALID,
         ".function_call"),
        ({"role": "assistant", "tool_calls": [{"function": {"name": "a", "arguments": "[]"}}]}, INVALID,
         ".tool_calls[0].function.arguments"),
        ({"role": "assistant", "function_call": {"name": "a", "arguments": "[]"}}, INVALID, ".function_call.arguments"),
    ]  # fmt: skip
    for message, code, field in bad:
        yield "chat/completions", {"messages": [user, message]}, code, f"messages[1]{field}"
    lists: list[Any] = ["a", 1, {}, True, [], None]
    for messages in lists:
        yield "chat/completions", {"messages": messages}, INVALID, "messages"


NAMED_TOOL: dict[str, Any] = {"type": "function", "function": {"name": "a"}}


def combinations() -> Iterator[Case]:
    """Fields that do not go together."""
    chat = "chat/completions"
    bad_choices: list[tuple[Any, str]] = [
        (None, ".allowed_tools"), ({"tools": []}, ".allowed_tools.mode"),
        ({"mode": "none", "tools": [NAMED_TOOL]}, ".allowed_tools.mode"), ({"mode": "auto"}, ".allowed_tools.tools"),
        ({"mode": "auto", "tools": []}, ".allowed_tools.tools"),
        ({"mode": "auto", "tools": [{}]}, ".allowed_tools.tools[0].function"),
        ({"mode": "auto", "tools": [{"function": {"name": "b"}}]}, ""),
        ({"mode": "auto", "tools": [NAMED_TOOL] * 129}, ""),
    ]  # fmt: skip
    rows: list[Case] = [
        ("completions", {"stream_options": {}}, INVALID, "stream_options"),
        ("completions", {"stream": True, "stream_options": {"include_usage": 1}}, INVALID,
         "stream_options.include_usage"),
        ("completions", {"n": 2, "best_of": 1}, INVALID, "best_of"),
        ("completions", {"n": 1, "best_of": 2, "stream": True}, INVALID, "best_of"),
        ("completions", {"length_penalty": 2}, INVALID, "length_penalty"),
        ("completions", {"early_stopping": True}, INVALID, "early_stopping"),
        ("completions", {"use_beam_search": True}, INVALID, "n"),
        ("completions", {"use_beam_search": True, "best_of": 65}, INVALID, "best_of"),
        ("completions", {"use_beam_search": True, "best_of": 2, "n": 3}, INVALID, "n"),
        ("completions", {"use_beam_search": True, "best_of": 2, "stream": True}, INVALID, "use_beam_search"),
        ("completions", {"use_beam_search": True, "best_of": 2, "stop": "a"}, UNSUPPORTED, "stop"),
        ("completions", {"use_beam_search": True, "best_of": 2, "top_p": 0.5}, UNSUPPORTED, "top_p"),
        ("completions", {"use_beam_search": True, "best_of": 2, "length_penalty": 11}, INVALID, "length_penalty"),
        ("completions", {"use_beam_search": True, "best_of": 2, "echo": True, "logprobs": 0}, UNSUPPORTED, "echo"),
        ("completions", {"max_tokens": CONTEXT_LENGTH + 1}, TOO_LONG, "max_tokens"),
        ("completions", {"max_tokens": 10**30}, TOO_LONG, "max_tokens"),
        ("completions", {"max_tokens": 4, "min_tokens": 5}, INVALID, "min_tokens"),
        ("completions", {"prompt": "a" * CONTEXT_LENGTH}, TOO_LONG, "prompt"),
        ("completions", {"prompt": [5] * CONTEXT_LENGTH}, TOO_LONG, "prompt"),
        ("completions", {"prompt": ["a", "a" * CONTEXT_LENGTH]}, TOO_LONG, "prompt[1]"),
        ("completions", {"prompt": [[5], [5] * CONTEXT_LENGTH]}, TOO_LONG, "prompt[1]"),
        ("completions", {"model": ""}, UNKNOWN, "model"), ("completions", {"model": "../tiny"}, UNKNOWN, "model"),
        ("completions", {"model": "TINY"}, UNKNOWN, "model"), ("completions", {"model": "a" * 10**5}, UNKNOWN, "model"),
        (chat, {"model": "other"}, UNKNOWN, "model"),
        (chat, {"top_logprobs": 1}, INVALID, "top_logprobs"), (chat, {"logprobs": 1}, INVALID, "logprobs"),
        (chat, {"logprobs": True, "top_logprobs": 21}, INVALID, "top_logprobs"),
        (chat, {"logprobs": True, "top_logprobs": -1}, INVALID, "top_logprobs"),
        (chat, {"logprobs": True, "top_logprobs": "1"}, INVALID, "top_logprobs"),
        (chat, {"max_completion_tokens": 0}, INVALID, "max_completion_tokens"),
        (chat, {"max_completion_tokens": "1"}, INVALID, "max_completion_tokens"),
        (chat, {"max_completion_tokens": 10**9}, TOO_LONG, "max_completion_tokens"),
        (chat, {"messages": [{"role": "user", "content": "a" * CONTEXT_LENGTH}]}, TOO_LONG, "messages"),
        (chat, {"messages": [{"role": "user", "content": ""}] * CONTEXT_LENGTH}, TOO_LONG, "messages"),
        *((chat, {name: value}, UNSUPPORTED, name) for name, value in {
            "documents": [{}],
            "chat_template": "{{ 1 }}", "structural_tag": {}, "audio": {}, "guided_decoding_backend": "outlines",
            "modalities": ["audio"], "store": True,
            "n_predict": 5, "stop_sequences": ["a"], "return_hidden_states": True,
            "vllm_xargs": {"a": 1},
            "logits_processors": ["os.system"], "request_id": "a",
        }.items()),
        *((chat, {name: value}, INVALID, name) for name, value in {
            "truncate_prompt_tokens": 0, "prompt_logprobs": 21, "bad_words": "a", "allowed_token_ids": [],
            "truncation_side": "top", "logprob_token_ids": [0] * 129, "spaces_between_special_tokens": 1,
        }.items()),
        (chat, {"bad_words": ["a", " "]}, INVALID, "bad_words[1]"),
        (chat, {"allowed_token_ids": [0, -1]}, INVALID, "allowed_token_ids[1]"),
        (chat, {"logprob_token_ids": [2**31]}, INVALID, "logprob_token_ids[0]"),
        (chat, {"prompt_logprobs": 1, "stream": True}, INVALID, "prompt_logprobs"),
        *((chat, {name: value}, INVALID, name) for name, value in {
            "tools": {}, "tool_choice": "any", "functions": 1, "function_call": "required", "parallel_tool_calls": 1,
            "chat_template_kwargs": 1, "continue_final_message": True, "add_generation_prompt": 1,
            "reasoning_effort": "much", "include_reasoning": 1, "echo": "yes", "thinking_token_budget": -2,
            "temprature": 1, "max_token": 1, "respons_format": {},
        }.items()),
        (chat, {"thinking": {"type": "on"}}, INVALID, "thinking.type"),
        (chat, {"thinking": {"type": "enabled", "budget_tokens": -1}}, INVALID, "thinking.budget_tokens"),
        (chat, {"thinking": {"type": "enabled"}, "reasoning_effort": "none"}, INVALID, "thinking.type"),
        (chat, {"thinking": {"type": "enabled", "budget_tokens": 1}, "thinking_token_budget": 1}, INVALID,
         "thinking.budget_tokens"),
        *((chat, {"chat_template_kwargs": {name: 1}}, INVALID, "chat_template_kwargs")
          for name in ("messages", "tools", "documents", "add_generation_prompt", "range", "a" * 2**18)),
        (chat, {"continue_final_message": True, "add_generation_prompt": False}, INVALID, "continue_final_message"),
        *((chat, {"tools": [{**TOOL, "function": {"name": "a", field: value}}]}, INVALID, f"tools[0].function.{field}")
          for value, field in [
              ("", "name"), ("a b", "name"), ("a" * 65, "name"), (1, "name"), (1, "description"),
              ("\ud800", "description"), (1, "parameters"), ({"a": "\ud800"}, "parameters"), (1, "strict"),
          ]),
        (chat, {"tools": [{"type": "function"}]}, INVALID, "tools[0].function"),
        (chat, {"tools": [{"type": "web_search"}]}, UNSUPPORTED, "tools[0].type"),
        (chat, {"tools": [1]}, INVALID, "tools[0]"), (chat, {"tools": [TOOL] * 129}, INVALID, "tools"),
        (chat, {"tools": [TOOL, TOOL]}, INVALID, "tools[1].function.name"),
        (chat, {"functions": [TOOL["function"]] * 2}, INVALID, "functions[1].name"),
        (chat, {"tools": [{**TOOL, "function": {"name": "a", "description": "b" * 2**18}}]}, INVALID, "tools"),
        (chat, {"tools": [TOOL], "functions": [TOOL["function"]]}, INVALID, "functions"),
        (chat, {"tools": [TOOL], "tool_choice": "auto", "function_call": "auto"}, INVALID, "function_call"),
        (chat, {"tool_choice": "required"}, INVALID, "tool_choice"),
        (chat, {"tool_choice": TOOL}, INVALID, "tool_choice"), (chat, {"tool_choice": 1}, INVALID, "tool_choice"),
        (chat, {"function_call": {"name": "a"}}, INVALID, "function_call"),
        (chat, {"tool_choice": {"type": "function"}}, INVALID, "tool_choice.function"),
        (chat, {"tool_choice": {"type": "mcp"}}, UNSUPPORTED, "tool_choice.type"),
        (chat, {"tool_choice": {"type": "custom"}}, INVALID, "tool_choice.custom"),
        (chat, {"tools": [{"type": "custom"}]}, INVALID, "tools[0].custom"),
        *((chat, {"tools": [{"type": "custom", "custom": custom}]}, reason, f"tools[0].custom{field}")
          for custom, reason, field in [
              ({}, INVALID, ".name"), ({"name": "a b"}, INVALID, ".name"),
              ({"name": "a", "description": 1}, INVALID, ".description"),
              ({"name": "a", "format": 1}, INVALID, ".format"),
              ({"name": "a", "format": {"type": "json"}}, INVALID, ".format.type"),
              ({"name": "a", "format": {"type": "grammar"}}, INVALID, ".format.grammar"),
              ({"name": "a", "format": {"type": "grammar", "grammar": {"syntax": "ebnf", "definition": "a"}}},
               INVALID, ".format.grammar.syntax"),
              ({"name": "a", "format": {"type": "grammar", "grammar": {"syntax": "lark"}}}, INVALID,
               ".format.grammar.definition"),
          ]),
        *((chat, {"tools": [TOOL], "tool_choice": {"type": "allowed_tools", "allowed_tools": choice}}, INVALID,
           f"tool_choice{field}") for choice, field in bad_choices),
        (chat, {"tool_choice": {"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": [NAMED_TOOL]}}},
         INVALID, "tool_choice"),
        (chat, {"tools": [TOOL], "tool_choice": {"type": "function", "function": {"name": "b"}}}, INVALID,
         "tool_choice"),
        ("completions", {"suffix": "a"}, UNSUPPORTED, "suffix"),
        ("completions", {"prompt_embeds": "a"}, UNSUPPORTED, "prompt_embeds"),
        *((path, {"add_special_tokens": "yes"}, INVALID, "add_special_tokens") for path in ("completions", chat)),
    ]  # fmt: skip
    yield from rows


def constraints() -> Iterator[Case]:
    """Constraints on the output, and what they may not stand beside."""
    schema = "response_format.json_schema.schema"
    no_schemas: list[Any] = ["{}", 1, [], None]
    bad_schemas: list[Any] = [
        {"type": "x"}, {"not": {}}, {"pattern": "("}, {"format": "x"}, {"$ref": "#/a"}, False,
    ]  # fmt: skip
    no_texts: list[Any] = [1, [], 1.5]
    no_choices: list[Any] = ["a", 1, {}, True, [], [""]]
    no_objects: list[Any] = [*NOT_A["object"], {}]
    rows: list[tuple[dict[str, Any], str, str]] = [
        *(({"response_format": value}, INVALID, "response_format") for value in NOT_A["object"]),
        ({"response_format": {"type": 1}}, INVALID, "response_format.type"),
        ({"response_format": {"type": "xml"}}, INVALID, "response_format.type"),
        ({"response_format": {"type": "structural_tag"}}, UNSUPPORTED, "response_format.type"),
        ({"response_format": {"type": "json_schema", "json_schema": 1}}, INVALID, "response_format.json_schema"),
        *(({"response_format": {"type": "json_schema", "json_schema": {"schema": value}}}, INVALID, schema)
          for value in no_schemas),
        *(({"response_format": {"type": "json_schema", "json_schema": {"schema": value}}}, NO_GRAMMAR, schema)
          for value in bad_schemas),
        *(({"structured_outputs": value}, INVALID, "structured_outputs") for value in no_objects),
        ({"structured_outputs": {"json": {}, "choice": ["a"]}}, INVALID, "structured_outputs.choice"),
        ({"structured_outputs": {"structural_tag": {}}}, UNSUPPORTED, "structured_outputs.structural_tag"),
        *(({name: value}, INVALID, name)
          for name in ("guided_regex", "guided_grammar", "regex", "ebnf", "grammar") for value in NOT_A["string"]),
        *(({name: value}, INVALID, name) for name in ("guided_json", "json_schema") for value in no_texts),
        *(({"guided_json_object": value}, INVALID, "guided_json_object") for value in NOT_A["flag"]),
        *(({"guided_choice": value}, INVALID, "guided_choice") for value in no_choices),
        ({"guided_choice": ["a", 1]}, INVALID, "guided_choice[1]"),
        ({"guided_regex": "\ud800"}, INVALID, "guided_regex"),
        ({"guided_regex": "(a"}, NO_GRAMMAR, "guided_regex"), ({"regex": ""}, NO_GRAMMAR, "regex"),
        ({"ebnf": "root ::= a"}, NO_GRAMMAR, "ebnf"), ({"grammar": "start: a"}, NO_GRAMMAR, "grammar"),
        ({"json_schema": "{"}, NO_GRAMMAR, "json_schema"),
        ({"regex": "a" * 2**20}, TOO_COMPLEX, "regex"), ({"json_schema": "[" * 10**5}, TOO_COMPLEX, "json_schema"),
        ({"regex": "a", "guided_regex": "a"}, INVALID, "regex"),
        ({"regex": "a", "ignore_eos": True}, UNSUPPORTED, "ignore_eos"),
        ({"regex": "a", "min_tokens": 1}, UNSUPPORTED, "min_tokens"),
        ({"regex": "a", "use_beam_search": True, "best_of": 2}, UNSUPPORTED, "use_beam_search"),
        ({"guided_json": {}, "guided_whitespace_pattern": " *"}, NO_GRAMMAR, "guided_whitespace_pattern"),
        ({"guided_regex": "a", "guided_whitespace_pattern": " "}, INVALID, "guided_whitespace_pattern"),
    ]  # fmt: skip
    for path in BASES:
        for fields, code, where in rows:
            yield path, fields, code, where


CASES = [*types(), *ranges(), *items(), *combinations(), *constraints()]


async def test_there_are_many() -> None:
    assert len(CASES) >= 300


@pytest.mark.parametrize("case", CASES, ids=name_of)
async def test_a_bad_field_is_named(case: Case, gateway: Harness) -> None:
    await check_refused(case, BASES, gateway)
