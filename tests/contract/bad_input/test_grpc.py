"""Messages over gRPC with one bad field: code, reason and the field's path in the contract."""

import json
from collections.abc import Iterator
from typing import Any

import grpc
import pytest

from gateway_calls import raw_call, refused
from gateway_harness import Harness, reason_of
from quire.inference.v1 import inference_pb2 as api
from tiny_model import CONTEXT_LENGTH

pytestmark = pytest.mark.asyncio(loop_scope="module")

# Method, message, reason, field.
Case = tuple[str, Any, str, str]
INVALID, UNSUPPORTED, TOO_LONG, UNKNOWN, MALFORMED, NO_GRAMMAR, TOO_COMPLEX = (
    "INVALID_FIELD",
    "FEATURE_UNSUPPORTED",
    "CONTEXT_LENGTH_EXCEEDED",
    "MODEL_NOT_FOUND",
    "MALFORMED_MESSAGE",
    "GRAMMAR_INVALID",
    "GRAMMAR_TOO_COMPLEX",
)
NAN, INFINITY = float("nan"), float("inf")
MANY = CONTEXT_LENGTH + 1
HALF = b"\xed\xa0\x80"  # half a surrogate pair, which is no UTF-8
NUMBERS: dict[str, list[float]] = {
    "temperature": [-0.1, 2.1], "top_p": [0, -1, 1.1], "min_p": [-0.1, 1.1], "typical_p": [0, 1.1],
    "presence_penalty": [-2.1, 2.1], "frequency_penalty": [-2.1, 2.1], "repetition_penalty": [0, -1, 11],
}  # fmt: skip


# Fields of a chat beside its messages.
CHATS: list[tuple[dict[str, Any], str, str]] = [
    ({"tools": [{}]}, INVALID, "tools[0].name"), ({"tools": [{"name": "a b"}]}, INVALID, "tools[0].name"),
    ({"tools": [{"name": "a"}, {"name": "a"}]}, INVALID, "tools[1].name"),
    ({"tools": [{"name": "a", "parameters": "{"}]}, INVALID, "tools[0].parameters"),
    ({"tools": [{"name": "a", "parameters": "[]"}]}, INVALID, "tools[0].parameters"),
    ({"tools": [{"name": "a", "parameters": '{"a": NaN}'}]}, INVALID, "tools[0].parameters"),
    ({"tools": [{"name": "a", "parameters": '{"a":' * 101 + "1" + "}" * 101}]}, INVALID, "tools[0].parameters"),
    ({"tools": [{"name": "a", "parameters": "[" * 10_000}]}, INVALID, "tools[0].parameters"),
    ({"tools": [{"name": "a"}] * 129}, INVALID, "tools"),
    ({"tools": [{"name": "a"}], "tool_name": "b"}, INVALID, "tool_choice"),
    ({"tool_name": "b"}, INVALID, "tool_choice"), ({"tool_mode": 3}, INVALID, "tool_choice"),
    ({"tools": [{"name": "a b", "custom": {}}]}, INVALID, "tools[0].name"),
    ({"tools": [{"name": "a", "custom": {}, "parameters": "{}"}]}, INVALID, "tools[0].parameters"),
    ({"tools": [{"name": "a", "custom": {}, "strict": True}]}, INVALID, "tools[0].strict"),
    ({"tools": [{"name": "a", "custom": {"grammar": "b" * 2**18}}]}, INVALID, "tools"),
    ({"tools": [{"name": "a"}], "allowed_tools": {}}, INVALID, "allowed_tools.names"),
    ({"tools": [{"name": "a"}], "allowed_tools": {"mode": 2, "names": ["a"]}}, INVALID, "allowed_tools.mode"),
    ({"tools": [{"name": "a"}], "allowed_tools": {"mode": 4, "names": ["a"]}}, INVALID, "allowed_tools.mode"),
    ({"tools": [{"name": "a"}], "allowed_tools": {"names": ["a", "b"]}}, INVALID, "tool_choice"),
    ({"tools": [{"name": "a"}], "allowed_tools": {"names": ["a"] * 129}}, INVALID, "tool_choice"),
    ({"allowed_tools": {"names": ["a"]}}, INVALID, "tool_choice"),
    ({"tool_mode": 4}, INVALID, "tool_mode"), ({"prompt_end": 4}, INVALID, "prompt_end"),
    ({"prompt_end": 3}, INVALID, "prompt_end"), ({"template_kwargs": "{"}, INVALID, "template_kwargs"),
    ({"template_kwargs": '{"messages": 1}'}, INVALID, "template_kwargs"),
    ({"reasoning_effort": "much"}, INVALID, "reasoning_effort"),
    ({"max_reasoning_tokens": 2**31}, INVALID, "max_reasoning_tokens"),
]  # fmt: skip


def generations() -> Iterator[tuple[dict[str, Any], str, str]]:
    """Fields of a Generation, reason, and the bad field's path in it."""
    for name, values in NUMBERS.items():
        for value in (*values, NAN, INFINITY, -INFINITY):
            yield {"sampling": {name: value}}, INVALID, f"sampling.{name}"
    yield {"sampling": {"top_k": -2}}, INVALID, "sampling.top_k"
    for bias in ({10**6: 1}, {5: 101}, {5: -101}, {5: NAN}, {5: INFINITY}, dict.fromkeys(range(1_025), 1)):
        yield {"sampling": {"logit_bias": bias}}, INVALID, "sampling.logit_bias"
    rows: list[tuple[dict[str, Any], str, str]] = [
        ({"n": 0}, INVALID, "n"), ({"n": 129}, INVALID, "n"), ({"n": 2**32 - 1}, INVALID, "n"),
        ({"best_of": 0}, INVALID, "best_of"), ({"best_of": 129}, INVALID, "best_of"),
        ({"n": 2, "best_of": 1}, INVALID, "best_of"),
        ({"logprobs": 21}, INVALID, "logprobs"), ({"logprobs": 2**32 - 1}, INVALID, "logprobs"),
        ({"model": ""}, UNKNOWN, "model"), ({"model": "other"}, UNKNOWN, "model"),
        ({"model": "é" * 999}, UNKNOWN, "model"),
        *(({"request_id": name}, INVALID, "request_id")
          for name in ("", " ", "a b", "a/b", "é", "a" * 129, "a\n", "\0")),
        ({"stopping": {"max_tokens": 0}}, INVALID, "stopping.max_tokens"),
        ({"stopping": {"max_tokens": CONTEXT_LENGTH + 1}}, TOO_LONG, "stopping.max_tokens"),
        ({"stopping": {"max_tokens": 2**32 - 1}}, TOO_LONG, "stopping.max_tokens"),
        ({"stopping": {"max_tokens": 1, "min_tokens": 2}}, INVALID, "stopping.min_tokens"),
        ({"stopping": {"min_tokens": 2**32 - 1}}, INVALID, "stopping.min_tokens"),
        ({"stopping": {"stop": [""]}}, INVALID, "stopping.stop[0]"),
        ({"stopping": {"stop": ["a", ""]}}, INVALID, "stopping.stop[1]"),
        ({"stopping": {"stop": ["a" * 1_025]}}, INVALID, "stopping.stop[0]"),
        ({"stopping": {"stop": ["a"] * 65}}, INVALID, "stopping.stop"),
        ({"stopping": {"stop_token_ids": [5, 10**6]}}, INVALID, "stopping.stop_token_ids[1]"),
        ({"stopping": {"stop_token_ids": [5] * 65}}, INVALID, "stopping.stop_token_ids"),
        ({"retention": {"seconds": 0}}, INVALID, "retention"),
        ({"constraint": {}}, INVALID, "constraint"),
        ({"constraint": {"json_schema": ""}}, NO_GRAMMAR, "constraint.json_schema"),
        ({"constraint": {"json_schema": '{"not": {}}'}}, NO_GRAMMAR, "constraint.json_schema"),
        ({"constraint": {"json_schema": "[" * 10**5}}, TOO_COMPLEX, "constraint.json_schema"),
        ({"constraint": {"regex": ""}}, NO_GRAMMAR, "constraint.regex"),
        ({"constraint": {"regex": "("}}, NO_GRAMMAR, "constraint.regex"),
        ({"constraint": {"regex": "a" * 2**20}}, TOO_COMPLEX, "constraint.regex"),
        ({"constraint": {"grammar": ""}}, NO_GRAMMAR, "constraint.grammar"),
        ({"constraint": {"grammar": "root ::= a"}}, NO_GRAMMAR, "constraint.grammar"),
        ({"constraint": {"gbnf": 'start: "a"'}}, NO_GRAMMAR, "constraint.gbnf"),
        ({"constraint": {"choice": {}}}, INVALID, "constraint.choice.choices"),
        ({"constraint": {"choice": {"choices": ["a", ""]}}}, INVALID, "constraint.choice.choices"),
        ({"constraint": {"regex": "a"}, "stopping": {"ignore_eos": True}}, UNSUPPORTED, "stopping.ignore_eos"),
        ({"constraint": {"regex": "a"}, "stopping": {"min_tokens": 1}}, UNSUPPORTED, "stopping.min_tokens"),
        ({"constraint": {"regex": "a"}, "beam_search": {"width": 2}}, UNSUPPORTED, "beam_search"),
        ({"beam_search": {}}, INVALID, "beam_search.width"),
        ({"beam_search": {"width": 1}}, INVALID, "beam_search.width"),
        ({"beam_search": {"width": 65}}, INVALID, "beam_search.width"),
        ({"beam_search": {"width": 2}, "n": 3}, INVALID, "n"),
        ({"beam_search": {"width": 2, "length_penalty": 11}}, INVALID, "beam_search.length_penalty"),
        ({"beam_search": {"width": 2, "length_penalty": NAN}}, INVALID, "beam_search.length_penalty"),
        ({"beam_search": {"width": 2}, "best_of": 2}, UNSUPPORTED, "best_of"),
        ({"beam_search": {"width": 2}, "stopping": {"stop": ["a"]}}, UNSUPPORTED, "stopping.stop"),
        ({"beam_search": {"width": 2}, "sampling": {"top_k": 5}}, UNSUPPORTED, "sampling.top_k"),
        ({"beam_search": {"width": 2}, "sampling": {"logit_bias": {5: 1}}}, UNSUPPORTED, "sampling.logit_bias"),
        ({"text": ""}, INVALID, "text"), ({"text": "a" * CONTEXT_LENGTH}, TOO_LONG, "text"),
        ({"text": "a" * 10**6}, TOO_LONG, "text"),
        ({"token_ids": {}}, INVALID, "token_ids.ids"), ({"token_ids": {"ids": [10**6]}}, INVALID, "token_ids.ids[0]"),
        ({"token_ids": {"ids": [5, 2**32 - 1]}}, INVALID, "token_ids.ids[1]"),
        ({"token_ids": {"ids": [5] * CONTEXT_LENGTH}}, TOO_LONG, "token_ids.ids"),
        ({"chat": {}}, INVALID, "chat.messages"),
        ({"chat": {"messages": [{}]}}, INVALID, "chat.messages[0].role"),
        *(({"chat": {"messages": [{"role": "user"}, {"role": role}]}}, INVALID, "chat.messages[1].role")
          for role in ("root", "USER", "user ", "<|im_start|>", "é", "a" * 10_000)),
        ({"chat": {"messages": [{"role": "user"}] * CONTEXT_LENGTH}}, TOO_LONG, "chat.messages"),
        ({"chat": {"messages": [{"role": "user", "content": "a" * 300}]}}, TOO_LONG, "chat.messages"),
        *(({"chat": {"messages": [{"role": "user"}]} | fields}, reason, f"chat.{field}")
          for fields, reason, field in CHATS),
        ({"chat": {"messages": [{"role": "user", "name": ""}]}}, INVALID, "chat.messages[0].name"),
        ({"chat": {"messages": [{"role": "user", "tool_call_id": "a" * 257}]}}, INVALID,
         "chat.messages[0].tool_call_id"),
        ({"chat": {"messages": [{"role": "user", "tool_calls": [{"name": "a"}]}]}}, INVALID,
         "chat.messages[0].tool_calls"),
        ({"chat": {"messages": [{"role": "assistant", "tool_calls": [{"name": "a", "arguments": "[]"}]}]}}, INVALID,
         "chat.messages[0].tool_calls[0].arguments"),
        *(({"chat": {"messages": [{"role": "assistant", "tool_calls": [call]}]}}, INVALID,
           f"chat.messages[0].tool_calls[0].{field}") for call, field in [
              ({"name": "a", "arguments": "{}", "input": "b"}, "input"), ({"input": "b"}, "name"),
          ]),
    ]  # fmt: skip
    yield from rows


def others() -> Iterator[Case]:
    """Other methods."""
    yield "Generate", api.GenerateRequest(), INVALID, "generation.prompt"
    yield "StreamGenerate", api.StreamGenerateRequest(), INVALID, "generation.prompt"
    streamed: list[dict[str, Any]] = [{"best_of": 2}, {"beam_search": {"width": 2}}]
    for fields in streamed:
        request = api.StreamGenerateRequest(generation={"text": "a"} | fields)
        yield "StreamGenerate", request, INVALID, f"generation.{next(iter(fields))}"
    for name in ("", "a b", "a" * 129, "a/b", "é"):
        yield "Cancel", api.CancelRequest(request_id=name), INVALID, "request_id"
        yield "Resume", api.ResumeRequest(request_id=name), INVALID, "request_id"
    twice = [api.Position(index=1), api.Position(index=0), api.Position(index=1)]
    yield "Resume", api.ResumeRequest(request_id="a", positions=twice), INVALID, "positions[2].index"
    chat = api.Chat(messages=[api.ChatMessage(role="root")])
    tokenized: list[tuple[dict[str, Any], str, str]] = [
        ({}, INVALID, "input"), ({"text": "a" * MANY}, TOO_LONG, "text"),
        ({"text": "a", "model": "other"}, UNKNOWN, "model"), ({"text": "a", "model": ""}, UNKNOWN, "model"),
        ({"chat": {}}, INVALID, "chat.messages"), ({"chat": chat}, INVALID, "chat.messages[0].role"),
    ]  # fmt: skip
    for fields, reason, field in tokenized:
        yield "Tokenize", api.TokenizeRequest(**fields), reason, field
    detokenized: list[tuple[dict[str, Any], str, str]] = [
        ({"token_ids": [10**6]}, INVALID, "token_ids[0]"), ({"token_ids": [5, 2**32 - 1]}, INVALID, "token_ids[1]"),
        ({"token_ids": [5] * MANY}, TOO_LONG, "token_ids"), ({"token_ids": [5], "model": "x"}, UNKNOWN, "model"),
    ]  # fmt: skip
    for fields, reason, field in detokenized:
        yield "Detokenize", api.DetokenizeRequest(**fields), reason, field
    embedded: list[tuple[dict[str, Any], str, str]] = [
        ({}, INVALID, "inputs"), ({"inputs": [{"text": "a"}] * 2_049}, INVALID, "inputs"),
        ({"inputs": [{}]}, INVALID, "inputs[0]"), ({"inputs": [{"text": ""}]}, INVALID, "inputs[0].text"),
        ({"inputs": [{"text": "a"}, {"text": "a" * MANY}]}, TOO_LONG, "inputs[1].text"),
        ({"inputs": [{"text": "a" * 10**6}]}, TOO_LONG, "inputs[0].text"),
        ({"inputs": [{"token_ids": {}}]}, INVALID, "inputs[0].token_ids.ids"),
        ({"inputs": [{"token_ids": {"ids": [5] * MANY}}]}, TOO_LONG, "inputs[0].token_ids.ids"),
        ({"inputs": [{"token_ids": {"ids": [5, 10**6]}}]}, INVALID, "inputs[0].token_ids.ids[1]"),
        *(({"inputs": [{"text": "a"}], name: value}, INVALID, name) for name, value in [
            ("dimensions", 0), ("dimensions", 65_537), ("dimensions", 2**32 - 1), ("pooling", 4),
            ("truncation_side", 3), ("truncate_prompt_tokens", 0), ("truncate_prompt_tokens", -2),
            ("truncate_prompt_tokens", MANY), ("retention", {}), ("retention", {"seconds": 0}),
        ]),
        ({"inputs": [{"text": "a"}], "model": ""}, UNKNOWN, "model"),
        ({"inputs": [{"text": "a"}], "model": "other"}, UNKNOWN, "model"),
    ]  # fmt: skip
    for fields, reason, field in embedded:
        yield "Embed", api.EmbedRequest(**fields), reason, field
    one: dict[str, Any] = {"queries": ["a"], "documents": ["a"]}
    # Of inputs: test_gateway_classify.py, since this model has no labels.
    yield "Classify", api.ClassifyRequest(inputs=[{"text": "a"}]), UNSUPPORTED, "model"
    yield "Classify", api.ClassifyRequest(inputs=[{"text": "a"}], model="other"), UNKNOWN, "model"
    scored: list[tuple[dict[str, Any], str, str]] = [
        ({}, INVALID, "queries"), ({"queries": ["a"]}, INVALID, "documents"),
        ({"documents": ["a"]}, INVALID, "queries"),
        ({"queries": ["a"] * 2, "documents": ["a"] * 3}, INVALID, "queries"),
        ({"queries": ["a"], "documents": ["a"] * 1_025}, INVALID, "documents"),
        ({"queries": ["a"], "documents": ["a", ""]}, INVALID, "documents[1]"),
        ({"queries": ["a", "a" * MANY], "documents": ["a"] * 2}, TOO_LONG, "queries[1]"),
        ({"queries": ["a"], "documents": ["a" * 10**6]}, TOO_LONG, "documents[0]"),
        *((one | {name: value}, INVALID, name) for name, value in [
            ("max_tokens_per_query", 0), ("max_tokens_per_document", MANY), ("truncation_side", 3),
            ("truncate_prompt_tokens", 0), ("truncate_prompt_tokens", -2), ("truncate_prompt_tokens", MANY),
            ("retention", {}), ("retention", {"seconds": 0}),
        ]),
        (one | {"model": "other"}, UNKNOWN, "model"),
    ]  # fmt: skip
    for fields, reason, field in scored:
        yield "Score", api.ScoreRequest(**fields), reason, field
    # Bytes that are no message of the method.
    for data in (
        b"\xff", b"\x0a", b"\x0a\x05ab", b"\x0a\xff\xff\xff\xff\xff\xff\xff\xff\xff\xff\x01", b"\x07", b"\x0b",
        b"\x0a\x04\x12\x02" + HALF[:2], b"\x0a\x05\x12\x03" + HALF, b"\x0a\x03\x12\x01\xff", b"\x0a" + b"\x80" * 20,
        b"{}", b"\0" * 10,
    ):  # fmt: skip
        for method in ("Generate", "StreamGenerate"):
            yield method, data, MALFORMED, ""


CASES: list[Case] = [
    *(
        ("Generate", api.GenerateRequest(generation={"text": "a"} | fields if not PROMPTS & fields.keys() else fields),
         reason, f"generation.{field}")
        for PROMPTS in [{"text", "token_ids", "chat"}]
        for fields, reason, field in generations()
    ),
    *others(),
]  # fmt: skip


def name_of(case: Case) -> str:
    method, request, _, field = case
    text = request.hex() if isinstance(request, bytes) else json.dumps(str(request))
    return f"{method} {field} {text[:60]}"


@pytest.mark.parametrize("case", CASES, ids=name_of)
async def test_a_bad_field_is_named(case: Case, gateway: Harness) -> None:
    method, request, reason, field = case
    data = request if isinstance(request, bytes) else request.SerializeToString()
    error = await refused(raw_call(gateway, method)(data, timeout=60))  # an accepted request would wait for a scheduler
    code = grpc.StatusCode.NOT_FOUND if reason == UNKNOWN else grpc.StatusCode.INVALID_ARGUMENT
    assert (error.code(), *reason_of(error)) == (code, reason, field)
    assert len(error.details() or "") < 1_000
