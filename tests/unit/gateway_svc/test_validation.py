"""The validator, through both protocols: rejected fields and their names, and the values that valid requests get."""

import json
import math
import shutil
from collections.abc import Callable
from dataclasses import replace
from datetime import datetime
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest

from gateway_requests import MODEL, VOCAB_SIZE, digest_of, over_grpc, over_http, refused, sampling, stopping
from gateway_svc import chat_template
from gateway_svc.chat_template import ChatTemplate
from gateway_svc.http_api.openai.bodies import read_chat_completion
from gateway_svc.http_api.openai.chat_models import ChatBody
from gateway_svc.message_formats.formats import AUTO, choose_format
from gateway_svc.tokenizer import ModelTokenizer
from gateway_svc.validated_request import OnDisconnect, SpecialTokens, StopText, ValidatedRequest
from gateway_svc.validation import Validator
from gateway_values import id_of
from quire.inference.v1 import inference_pb2 as api
from quire.scheduler.v1.scheduler_pb2 import RenderOptions
from svc_common.errors import Reason
from tiny_model import CONTEXT_LENGTH, EOS, tiny_tokenizer

INVALID, TOO_LONG = Reason.INVALID_FIELD, Reason.CONTEXT_LENGTH_EXCEEDED


# (message of the group, its field, the field over HTTP, values in range, values out of it)
RANGES: list[tuple[Callable[..., dict[str, Any]], str, str, list[Any], list[Any]]] = [
    (sampling, "temperature", "temperature", [0, 0.5, 2], [-0.001, 2.001, -1, math.nan, math.inf]),
    (sampling, "top_p", "top_p", [0.001, 1], [0, -0.5, 1.001, math.nan, math.inf]),
    (sampling, "top_k", "top_k", [-1, 0, 1, 2**31 - 1], [-2, -(2**31)]),
    (sampling, "min_p", "min_p", [0, 1], [-0.001, 1.001, math.nan]),
    (sampling, "presence_penalty", "presence_penalty", [-2, 2], [-2.001, 2.001, math.nan]),
    (sampling, "frequency_penalty", "frequency_penalty", [-2, 2], [-2.001, 2.001, math.nan]),
    (sampling, "repetition_penalty", "repetition_penalty", [0.001, 10], [0, -1, 10.001, math.nan, math.inf]),
    (sampling, "seed", "seed", [-(2**63), 0, 2**63 - 1], []),
    (stopping, "max_tokens", "max_tokens", [1, CONTEXT_LENGTH - 1], [0]),
    (stopping, "min_tokens", "min_tokens", [0, 16], [CONTEXT_LENGTH]),
    (dict, "n", "n", [1, 128], [0, 129]),
    (dict, "best_of", "best_of", [1, 128], [0, 129]),
    (dict, "logprobs", "logprobs", [0, 20], [21]),
    (dict, "priority", "priority", [-(2**31), 2**31 - 1], []),
]
GROUPS = {sampling: "sampling.", stopping: "stopping.", dict: ""}
IN_RANGE = [(group, name, http, value) for group, name, http, good, _ in RANGES for value in good]
OUT_OF_RANGE = [(group, name, http, value) for group, name, http, _, bad in RANGES for value in bad]


@pytest.mark.parametrize(("group", "name", "http_name", "value"), IN_RANGE)
async def test_values_in_range_are_taken_over_both_protocols(
    group: Callable[..., dict[str, Any]], name: str, http_name: str, value: Any, tokenizer: ModelTokenizer
) -> None:
    assert await over_grpc(tokenizer, text="a", **group(**{name: value}))
    assert await over_http(tokenizer, prompt="a", **{http_name: value})


@pytest.mark.parametrize(("group", "name", "http_name", "value"), OUT_OF_RANGE)
async def test_values_out_of_range_are_refused_by_the_clients_own_name(
    group: Callable[..., dict[str, Any]], name: str, http_name: str, value: Any, tokenizer: ModelTokenizer
) -> None:
    grpc_field = f"generation.{GROUPS[group]}{name}"
    assert await refused(over_grpc(tokenizer, text="a", **group(**{name: value}))) == (INVALID, grpc_field)
    assert await refused(over_http(tokenizer, prompt="a", **{http_name: value})) == (INVALID, http_name)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("seed", 2**63),
        ("seed", -(2**63) - 1),
        ("priority", 2**31),
        ("top_k", 2**63),
        ("max_tokens", -1),
        ("min_tokens", -1),
        ("n", -1),
        ("logprobs", -1),
        ("temperature", 10**400),
    ],
)
async def test_json_can_spell_what_no_field_of_a_message_holds(
    name: str, value: int, tokenizer: ModelTokenizer
) -> None:
    fields: dict[str, Any] = {"prompt": "a", name: value}
    assert await refused(over_http(tokenizer, **fields)) == (INVALID, name)


STOPS: list[tuple[Any, Reason | None, str]] = [
    (["a"] * 64, None, ""),
    (["x" * 1_024], None, ""),
    (["a"] * 65, INVALID, ""),
    (["a", ""], INVALID, "[1]"),
    (["x" * 1_025], INVALID, "[0]"),
]


@pytest.mark.parametrize(("stop", "reason", "place"), STOPS)
async def test_stop_strings(stop: list[str], reason: Reason | None, place: str, tokenizer: ModelTokenizer) -> None:
    grpc, http = over_grpc(tokenizer, text="a", **stopping(stop=stop)), over_http(tokenizer, prompt="a", stop=stop)
    if reason is None:
        first = await grpc
        assert [one.text for one in first.stopping.stops] == list(dict.fromkeys(stop))
        assert (await http).stopping.stops == first.stopping.stops
    else:
        assert await refused(grpc) == (reason, f"generation.stopping.stop{place}")
        assert await refused(http) == (reason, f"stop{place}")


async def test_a_lone_stop_string_is_named_without_a_place(tokenizer: ModelTokenizer) -> None:
    assert await refused(over_http(tokenizer, prompt="a", stop="")) == (INVALID, "stop")


@pytest.mark.parametrize(
    ("grpc_fields", "http_fields", "reason", "grpc_field", "http_field"),
    [
        ({}, {}, INVALID, "prompt", "prompt"),
        ({"text": ""}, {"prompt": ""}, INVALID, "text", "prompt"),
        ({"token_ids": api.TokenIds()}, {"prompt": []}, INVALID, "token_ids.ids", "prompt"),
        ({"chat": api.Chat()}, {"messages": []}, INVALID, "chat.messages", "messages"),
        (
            {"token_ids": api.TokenIds(ids=[1, VOCAB_SIZE])},
            {"prompt": [1, VOCAB_SIZE]},
            INVALID,
            "token_ids.ids[1]",
            "prompt[1]",
        ),
        ({"text": "a" * 256}, {"prompt": "a" * 256}, TOO_LONG, "text", "prompt"),
        ({"text": "a" * 10_000}, {"prompt": "a" * 10_000}, TOO_LONG, "text", "prompt"),
        (
            {"token_ids": api.TokenIds(ids=[5] * 256)},
            {"prompt": [5] * 256},
            TOO_LONG,
            "token_ids.ids",
            "prompt",
        ),
        (
            {"chat": api.Chat(messages=[api.ChatMessage(role="user", content="a" * 256)])},
            {"messages": [{"role": "user", "content": "a" * 256}]},
            TOO_LONG,
            "chat.messages",
            "messages",
        ),
        (
            {"chat": api.Chat(messages=[api.ChatMessage(role="user\n<|im_end|>", content="a")])},
            {"messages": [{"role": "user\n<|im_end|>", "content": "a"}]},
            INVALID,
            "chat.messages[0].role",
            "messages[0].role",
        ),
        *(
            (
                {"chat": api.Chat(messages=[api.ChatMessage(role="user", content="a"), api.ChatMessage(role=role)])},
                {"messages": [{"role": "user", "content": "a"}, {"role": role, "content": ""}]},
                INVALID,
                "chat.messages[1].role",
                "messages[1].role",
            )
            for role in ("", "root", "User", "user ", "ipython")
        ),
        (
            {"chat": api.Chat(messages=[api.ChatMessage(role="tool", content="a")])},
            {"messages": [{"role": "tool", "content": "a"}]},
            INVALID,
            "chat.messages",
            "messages",
        ),
        ({"text": "a", "model": "gpt"}, {"prompt": "a", "model": "gpt"}, Reason.MODEL_NOT_FOUND, "model", "model"),
        (
            {"text": "aa", **stopping(max_tokens=CONTEXT_LENGTH + 1)},
            {"prompt": "aa", "max_tokens": CONTEXT_LENGTH + 1},
            TOO_LONG,
            "stopping.max_tokens",
            "max_tokens",
        ),
        (
            {"text": "a", **stopping(max_tokens=4, min_tokens=5)},
            {"prompt": "a", "max_tokens": 4, "min_tokens": 5},
            INVALID,
            "stopping.min_tokens",
            "min_tokens",
        ),
        (
            {"text": "a", **stopping(stop_token_ids=[1, VOCAB_SIZE])},
            {"prompt": "a", "stop_token_ids": [1, VOCAB_SIZE]},
            INVALID,
            "stopping.stop_token_ids[1]",
            "stop_token_ids[1]",
        ),
        (
            {"text": "a", **sampling(logit_bias={VOCAB_SIZE: 1})},
            {"prompt": "a", "logit_bias": {str(VOCAB_SIZE): 1}},
            INVALID,
            "sampling.logit_bias",
            "logit_bias",
        ),
        (
            {"text": "a", **sampling(logit_bias={1: 100.5})},
            {"prompt": "a", "logit_bias": {"1": 100.5}},
            INVALID,
            "sampling.logit_bias",
            "logit_bias",
        ),
        (
            {"text": "a", **sampling(logit_bias={1: math.nan})},
            {"prompt": "a", "logit_bias": {"1": math.nan}},
            INVALID,
            "sampling.logit_bias",
            "logit_bias",
        ),
        (
            {"text": "a", **sampling(logit_bias=dict.fromkeys(range(1_025), 0.0))},
            {"prompt": "a", "logit_bias": {str(token_id): 0 for token_id in range(1_025)}},
            INVALID,
            "sampling.logit_bias",
            "logit_bias",
        ),
    ],
)
async def test_bad_input_is_refused_alike(
    grpc_fields: dict[str, Any],
    http_fields: dict[str, Any],
    reason: Reason,
    grpc_field: str,
    http_field: str,
    tokenizer: ModelTokenizer,
) -> None:
    assert await refused(over_grpc(tokenizer, **grpc_fields)) == (reason, f"generation.{grpc_field}")
    assert await refused(over_http(tokenizer, **http_fields)) == (reason, http_field)


@pytest.mark.parametrize("request_id", ["", "a" * 129, "a b", "ä", "a/b", "a\n"])
async def test_names_of_requests(request_id: str, tokenizer: ModelTokenizer) -> None:
    grpc = over_grpc(tokenizer, text="a", request_id=request_id)
    assert await refused(grpc) == (INVALID, "generation.request_id")
    assert await refused(over_http(tokenizer, request_id, prompt="a")) == (INVALID, "Idempotency-Key")


async def test_a_named_request_is_detached_and_another_cancelled(tokenizer: ModelTokenizer) -> None:
    named = await over_grpc(tokenizer, text="a", request_id="My.id_1:2-3")
    assert (named.request_id, named.on_disconnect) == ("My.id_1:2-3", OnDisconnect.DETACH)
    own = await over_grpc(tokenizer, text="a")
    assert (own.request_id, own.on_disconnect) == ("own-id", OnDisconnect.CANCEL)


@pytest.mark.parametrize("half", ["\ud800", "a\udfff"])
async def test_half_a_surrogate_pair_is_refused(half: str, tokenizer: ModelTokenizer) -> None:
    assert await refused(over_http(tokenizer, prompt=half)) == (INVALID, "prompt")
    assert await refused(over_http(tokenizer, prompt="a", stop=["b", half])) == (INVALID, "stop[1]")
    messages = [{"role": "user", "content": half}]
    assert await refused(over_http(tokenizer, messages=messages)) == (INVALID, "messages[0].content")


async def test_both_protocols_have_the_same_defaults(tokenizer: ModelTokenizer) -> None:
    grpc, http = await over_grpc(tokenizer, text="aa"), await over_http(tokenizer, prompt="aa")
    assert grpc.stopping.max_tokens == CONTEXT_LENGTH - 2
    assert http.stopping.max_tokens == 16
    for one in (grpc, http):
        neutral = {"min_p": 0.0, "typical_p": 0, "repetition_penalty": 1.0}
        neutral |= {"presence_penalty": 0.0, "frequency_penalty": 0.0}
        assert one.sampling.params == {"temperature": 1.0, "top_p": 1.0, "top_k": 0, **neutral}
        assert one.sampling.logit_bias == {}
        assert (one.n, one.logprobs, one.priority, one.model) == (1, None, 0, "tiny")
        assert (one.stopping.min_tokens, one.stopping.ending_token_ids) == (0, (EOS,))
        assert (one.stopping.stop_text, one.special_tokens) == (StopText.EXCLUDED, SpecialTokens.HIDDEN)


async def test_a_default_max_tokens_is_limited_by_the_context(tokenizer: ModelTokenizer) -> None:
    assert (await over_http(tokenizer, prompt=[5] * 250)).stopping.max_tokens == 6


@pytest.mark.parametrize("max_tokens", [6, 7, CONTEXT_LENGTH])
async def test_a_max_tokens_is_limited_by_what_the_prompt_leaves_of_the_context(
    max_tokens: int, tokenizer: ModelTokenizer
) -> None:
    prompt = [5] * 250
    http = await over_http(tokenizer, prompt=prompt, max_tokens=max_tokens)
    grpc = await over_grpc(tokenizer, token_ids=api.TokenIds(ids=prompt), **stopping(max_tokens=max_tokens))
    assert (http.stopping.max_tokens, grpc.stopping.max_tokens) == (6, 6)


async def test_a_chat_may_take_the_rest_of_the_context(tokenizer: ModelTokenizer) -> None:
    one = await over_http(tokenizer, messages=[{"role": "user", "content": "hello"}])
    assert one.stopping.max_tokens == CONTEXT_LENGTH - len(one.prompt_token_ids)


async def test_an_absent_seed_is_random_for_each_request(tokenizer: ModelTokenizer) -> None:
    drawn = {(await over_grpc(tokenizer, text="a")).sampling.seed for _ in range(8)}
    assert len(drawn) == 8
    assert all(0 <= seed < 2**53 for seed in drawn)


async def test_an_absent_seed_of_greedy_sampling_is_0(tokenizer: ModelTokenizer) -> None:
    for _ in range(2):
        assert (await over_http(tokenizer, prompt="a", temperature=0)).sampling.seed == 0
    assert (await over_http(tokenizer, prompt="a", temperature=0, seed=7)).sampling.seed == 7


async def test_end_of_text_can_be_gone_through(tokenizer: ModelTokenizer) -> None:
    for one in (
        await over_grpc(tokenizer, text="a", **stopping(ignore_eos=True, stop_token_ids=[7])),
        await over_http(tokenizer, prompt="a", ignore_eos=True, stop_token_ids=[7]),
    ):
        assert one.stopping.ending_token_ids == (7,)


async def test_a_typical_p_of_1_keeps_all_and_is_not_sent(tokenizer: ModelTokenizer) -> None:
    for typical_p, resolved in ((1.0, 0.0), (0.25, 0.25)):
        one = await over_http(tokenizer, prompt="a", typical_p=typical_p)
        assert one.to_proto(RenderOptions()).sampling.typical_p == resolved


async def test_a_top_k_of_the_whole_vocabulary_keeps_all(tokenizer: ModelTokenizer) -> None:
    assert (await over_grpc(tokenizer, text="a", **sampling(top_k=VOCAB_SIZE))).sampling.params["top_k"] == 0
    assert (await over_grpc(tokenizer, text="a", **sampling(top_k=VOCAB_SIZE - 1))).sampling.params[
        "top_k"
    ] == VOCAB_SIZE - 1


async def test_ending_tokens_are_suppressed_until_min_tokens(tokenizer: ModelTokenizer) -> None:
    one = await over_grpc(tokenizer, text="a", **stopping(min_tokens=3, stop_token_ids=[9]))
    submit = one.to_proto(RenderOptions())
    assert list(submit.sampling.suppressed_token_ids) == [EOS, 9]
    assert submit.sampling.min_tokens == 3
    without = (await over_grpc(tokenizer, text="a", **stopping(stop_token_ids=[9]))).to_proto(RenderOptions())
    assert not without.sampling.suppressed_token_ids
    assert list(without.stop_token_ids) == [EOS, 9]


async def test_an_ending_token_that_the_model_lacks_is_left_out(model_directory: Path, tmp_path: Path) -> None:
    shutil.copytree(model_directory, tmp_path, dirs_exist_ok=True)
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [EOS, VOCAB_SIZE]}))
    tokenizer = ModelTokenizer.load(tmp_path)
    one = await over_grpc(tokenizer, text="a", **stopping(min_tokens=3))
    assert (one.stopping.ending_token_ids, one.stopping.suppressed_token_ids) == ((EOS,), (EOS,))
    ignored = await over_grpc(tokenizer, text="a", **stopping(min_tokens=3, ignore_eos=True))
    assert ignored.stopping.suppressed_token_ids == (EOS,)
    tokenizer.close()


async def test_texts_with_a_token_that_the_model_lacks_are_refused(
    tokenizer: ModelTokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Some tokenizers have added tokens, such as one for padding, behind the vocabulary of the model."""
    monkeypatch.setattr("gateway_requests.MODEL", replace(MODEL, vocab_size=id_of(tiny_tokenizer(), "h")))
    assert await refused(over_grpc(tokenizer, text="h")) == (INVALID, "generation.text")
    assert await refused(over_http(tokenizer, prompt="h")) == (INVALID, "prompt")
    assert await refused(over_http(tokenizer, messages=[{"role": "user", "content": "h"}])) == (INVALID, "messages")


async def test_a_model_without_a_template_takes_no_chats(tokenizer: ModelTokenizer) -> None:
    bare = ModelTokenizer(tiny_tokenizer(), {"type": "ByteLevel"}, None, [EOS])
    messages = [{"role": "user", "content": "a"}]
    assert await refused(over_http(bare, messages=messages)) == (Reason.FEATURE_UNSUPPORTED, "messages")
    bare.close()


async def test_a_random_seed_does_not_change_the_digest(tokenizer: ModelTokenizer) -> None:
    async def digest(**fields: Any) -> bytes:
        return (await over_grpc(tokenizer, text="a", **fields)).to_proto(RenderOptions()).body_digest

    assert await digest() == await digest()
    assert await digest(**sampling(seed=1)) == await digest(**sampling(seed=1))
    assert len({await digest(), await digest(**sampling(seed=1)), await digest(**sampling(seed=2))}) == 3


async def test_a_request_is_the_same_at_gateways_of_protocol_1(tokenizer: ModelTokenizer) -> None:
    # The digest of earlier releases: their records and retries must still match after an upgrade.
    by_grpc = await over_grpc(tokenizer, text="hello world")
    by_http = await over_http(tokenizer, prompt="hello world", temperature=0.5, seed=3, stop=["x"], min_tokens=1)
    assert [digest_of(one, tokenizer).hex() for one in (by_grpc, by_http)] == [
        "c20e4fb2886184e5db89b78098f953c5243f371c1c5c98c5a84d79872e53be6e",
        "22dd9c8a5f3eb69713f89689ca25ccf7ed59074e8f52215a15fbd612d5586e74",
    ]


async def test_a_chat_is_the_same_at_another_time(monkeypatch: pytest.MonkeyPatch) -> None:
    source = "{{ strftime_now('%A') }}{% for message in messages %}{{ message.content }}{{ end }}{% endfor %}"
    dated = ModelTokenizer(tiny_tokenizer(), {"type": "ByteLevel"}, ChatTemplate(source, {}), [EOS])

    async def request_on(day: datetime, content: str = "a", **fields: Any) -> ValidatedRequest:
        monkeypatch.setattr(chat_template, "datetime", Mock(now=lambda: day))
        return await over_http(dated, messages=[{"role": "user", "content": content}], **fields)

    async def digest_on(day: datetime, content: str = "a", **fields: Any) -> bytes:
        return digest_of(await request_on(day, content, **fields), dated)

    friday, wednesday = datetime(2026, 1, 2), datetime(2026, 1, 7)
    first, second = await request_on(friday), await request_on(wednesday)
    assert len(first.prompt_token_ids) < len(second.prompt_token_ids)
    assert digest_of(first, dated) == digest_of(second, dated)
    bodies: list[dict[str, Any]] = [
        {},
        {"content": "b"},
        {"max_tokens": 5},
        {"max_tokens": 6},
        {"truncate_prompt_tokens": 3},
        {"truncate_prompt_tokens": 4},
        {"truncate_prompt_tokens": 4, **RIGHT},
        {"chat_template_kwargs": {"end": "x"}},
        {"temperature": 0.5},
    ]
    digests = [(await digest_on(friday, **body), await digest_on(wednesday, **body)) for body in bodies]
    assert all(one == other for one, other in digests)
    assert len(set(digests)) == len(bodies)
    dated.close()


REASONING = (
    "{% for message in messages %}<|im_start|>{{ message.content }}<|im_end|>{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|><think>\n{% endif %}{#- </think> -#}{{ '' if true else '</think>' }}"
)
RIGHT, LEFT = {"truncation_side": "right"}, {"truncation_side": "left"}
CONTINUED = {
    "messages": [
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": f"<think>hm</think>{'a' * 20}<think>"},
    ],
    "continue_final_message": True,
    "add_generation_prompt": False,
}


@pytest.mark.parametrize(
    ("fields", "is_open"),
    [
        ({}, True),
        ({"truncate_prompt_tokens": 12, **LEFT}, True),
        ({"truncate_prompt_tokens": 12, **RIGHT}, False),
        ({"truncate_prompt_tokens": 100, **RIGHT}, True),
        (CONTINUED, True),
        (CONTINUED | {"truncate_prompt_tokens": 30, **RIGHT}, False),
    ],
)
async def test_the_answer_to_a_truncated_chat_begins_where_the_kept_tokens_end(
    fields: dict[str, Any], is_open: bool, model_directory: Path
) -> None:
    tokenizer = ModelTokenizer.load(model_directory, chat_template=REASONING)
    assert tokenizer.chat_template is not None
    validator = Validator(tokenizer, message_format=choose_format("none", AUTO, tokenizer.chat_template.constants))
    body = ChatBody.of({"messages": [{"role": "user", "content": "a" * 20}], **fields})
    (asked,) = read_chat_completion(body, None).prompts
    found = await validator.generation(asked.unvalidated, MODEL, asked.field_path, "own-id")
    tokenizer.close()
    assert found.turn is not None
    assert found.turn.is_reasoning_open is is_open
