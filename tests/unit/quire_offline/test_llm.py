"""Outputs of lists of prompts: the tokens of transformers, in any crowd, and every kind of parameter."""

import itertools
import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from gateway_svc.chats import ChatPrompt
from llama_models import generate
from offline_model import NUM_TOKENS
from quire_offline import LLM, PoolingParams, QuireError, RequestOutput, SamplingParams, StructuredOutputsParams
from quire_offline.calls import read_chats, read_embeddings, read_prompts
from quire_offline.offline_request import OfflineRequest
from tiny_model import EOS, tiny_tokenizer

LENGTHS = (1, 2, 15, 16, 17, 31, 32, 33, 47, 48, 49, 63, 64, 65, 95, 96, 97, 111, 127, 128)
"""Of prompts: around blocks of 16 tokens, and around steps of 32."""
GREEDY = SamplingParams(temperature=0, max_tokens=8)


def prompts(*lengths: int) -> list[list[int]]:
    rng = random.Random(7)
    return [[rng.randrange(3, NUM_TOKENS) for _ in range(length)] for length in lengths]


def tokens(outputs: list[RequestOutput]) -> list[list[int]]:
    return [output.outputs[0].token_ids for output in outputs]


@pytest.fixture(scope="module")
def crowd(llm: LLM) -> tuple[list[list[int]], list[RequestOutput]]:
    """40 prompts, computed together."""
    given = prompts(*LENGTHS, *LENGTHS)
    return given, llm.generate(given, GREEDY)


# Tokens.


def test_greedy_tokens_are_those_of_transformers(
    crowd: tuple[list[list[int]], list[RequestOutput]], model: Path
) -> None:
    given, outputs = crowd
    assert [output.prompt_token_ids for output in outputs] == given
    assert tokens(outputs) == generate(model, given, 8)
    assert all(output.finished and output.outputs[0].finish_reason in ("length", "stop") for output in outputs)


def test_preemption_changes_no_token(
    crowd: tuple[list[list[int]], list[RequestOutput]], load: Callable[..., LLM]
) -> None:
    given, expected = crowd
    small = load(num_blocks=10)
    assert tokens(small.generate(given, GREEDY)) == tokens(expected)
    long = SamplingParams(temperature=0, max_tokens=60, ignore_eos=True)
    few = prompts(14, 14, 14, 14, 14, 14)
    alone = [small.generate([one], long)[0] for one in few]
    num_preempted = _num_preempted(small)
    assert tokens(small.generate(few, long)) == tokens(alone)
    assert _num_preempted(small) > num_preempted


def _num_preempted(llm: LLM) -> int:
    return sum(model.core.totals.preemptions for model in llm._thread.engine._scheduler.models)


def test_a_seed_repeats_the_sample_in_any_company(llm: LLM) -> None:
    given = prompts(5, 20, 40)
    params = [SamplingParams(temperature=1.5, seed=seed, max_tokens=12) for seed in (1, 2, 3)]
    together = llm.generate(given, params)
    alone = [llm.generate([one], one_params)[0] for one, one_params in zip(given, params, strict=True)]
    assert tokens(together) == tokens(alone)
    assert [output.seed for output in together] == [1, 2, 3]


def test_the_seed_of_a_model_repeats_the_samples_of_a_program(load: Callable[..., LLM]) -> None:
    """As in vLLM, prompts without a seed have other ones each, and the same ones when the program runs again."""
    params = [SamplingParams(temperature=1.5, max_tokens=12) for _ in range(2)]
    first, again, other = (load(seed=seed).generate(prompts(5, 5), params) for seed in (3, 3, 4))
    assert tokens(first) == tokens(again)
    assert len({output.seed for output in [*first, *other]}) == 4


def test_n_sequences_are_in_order_and_differ(llm: LLM) -> None:
    (output,) = llm.generate("hello", SamplingParams(n=4, temperature=2, seed=5, max_tokens=8))
    assert [one.index for one in output.outputs] == [0, 1, 2, 3]
    assert len({tuple(one.token_ids) for one in output.outputs}) == 4


def test_the_best_of_several_sequences_are_ranked(llm: LLM) -> None:
    (output,) = llm.generate("hello", SamplingParams(n=2, best_of=4, temperature=2, seed=5, max_tokens=8))
    scores = [one.score for one in output.outputs]
    assert None not in scores
    assert scores == sorted(scores, reverse=True)  # type: ignore[type-var]


def test_a_beam_search_returns_its_best_sequences(llm: LLM) -> None:
    (output,) = llm.generate("hello", SamplingParams(use_beam_search=True, n=3, max_tokens=5))
    assert len({tuple(one.token_ids) for one in output.outputs}) == 3


# Text.


def test_the_text_is_that_of_the_tokens(llm: LLM) -> None:
    (output,) = llm.generate("hello world", SamplingParams(temperature=0, max_tokens=5, allowed_token_ids=[262, 267]))
    assert output.prompt == "hello world"
    assert output.prompt_token_ids == tiny_tokenizer().encode("hello world").ids
    assert output.outputs[0].text == tiny_tokenizer().decode(output.outputs[0].token_ids)


def test_a_stop_string_ends_the_text(llm: LLM) -> None:
    letters = [tiny_tokenizer().token_to_id(letter) for letter in "abcdefgh"]
    free = SamplingParams(temperature=1, seed=3, max_tokens=40, allowed_token_ids=letters)
    (whole,) = llm.generate("hello", free)
    stop = whole.outputs[0].text[20:22]
    for included in (False, True):
        params = SamplingParams(**free.values, stop=[stop], include_stop_str_in_output=included)
        (output,) = llm.generate("hello", params)
        expected = whole.outputs[0].text.partition(stop)[0] + (stop if included else "")
        assert output.outputs[0].text == expected
        assert (output.outputs[0].finish_reason, output.outputs[0].stop_reason) == ("stop", stop)


@pytest.mark.parametrize(("stop_token_ids", "reason"), [([], None), ([EOS], EOS)])
def test_the_reason_to_stop_is_one_of_the_requests_own(stop_token_ids: list[int], reason: int | None, llm: LLM) -> None:
    params = SamplingParams(temperature=0, logit_bias={EOS: 100}, stop_token_ids=stop_token_ids)
    (output,) = llm.generate("hello", params)
    assert (output.outputs[0].finish_reason, output.outputs[0].stop_reason) == ("stop", reason)


def test_a_chat_is_its_rendered_template(llm: LLM) -> None:
    messages: list[dict[str, Any]] = [
        {"role": "user", "content": "hello"},
        {"role": "assistant", "content": "world"},
        {"role": "user", "content": [{"type": "text", "text": "!"}]},
    ]
    params = SamplingParams(temperature=0, max_tokens=6)
    (answer,) = llm.chat(messages, params)
    rendered = "".join(
        f"<|im_start|>{role}\n{text}<|im_end|>\n"
        for role, text in (("user", "hello"), ("assistant", "world"), ("user", "!"))
    )
    (output,) = llm.generate(f"{rendered}<|im_start|>assistant\n", params)
    assert answer.prompt_token_ids == output.prompt_token_ids
    assert answer.prompt == output.prompt
    assert tokens([answer]) == tokens([output])


def test_several_chats_are_answered_in_order(llm: LLM) -> None:
    chats = [[{"role": "user", "content": text}] for text in ("a", "b")]
    answers = llm.chat(chats, SamplingParams(max_tokens=1))
    assert ["a" in (answer.prompt or "").partition("user\n")[2][:1] for answer in answers] == [True, False]


# Log-probabilities.


def test_log_probabilities_are_those_of_transformers(llm: LLM, model: Path) -> None:
    (given,) = prompts(20)
    (output,) = llm.generate([given], SamplingParams(temperature=0, max_tokens=3, logprobs=2, prompt_logprobs=1))
    completion = output.outputs[0]
    reference: Any = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    with torch.no_grad():
        logits = reference(torch.tensor([[*given, *completion.token_ids]])).logits[0]
    expected = logits.log_softmax(-1)
    assert completion.logprobs is not None
    assert output.prompt_logprobs is not None
    sampled = [logprobs[token] for logprobs, token in zip(completion.logprobs, completion.token_ids, strict=True)]
    for place, (token, one) in enumerate(zip(completion.token_ids, sampled, strict=True), len(given) - 1):
        assert one.logprob == pytest.approx(float(expected[place, token]), abs=1e-4)
        assert one.rank == 1
    assert all(len(logprobs) == 2 for logprobs in completion.logprobs)
    assert completion.cumulative_logprob == pytest.approx(sum(one.logprob for one in sampled))
    assert output.prompt_logprobs[0] is None
    for place, logprobs in enumerate(output.prompt_logprobs[1:], 1):
        assert logprobs is not None
        assert logprobs[given[place]].logprob == pytest.approx(float(expected[place - 1, given[place]]), abs=1e-4)


def test_without_a_request_there_are_no_log_probabilities(llm: LLM) -> None:
    (output,) = llm.generate("hello", GREEDY)
    assert (output.outputs[0].logprobs, output.outputs[0].cumulative_logprob, output.prompt_logprobs) == (None,) * 3


# Constraints.


def test_the_output_matches_its_constraint(llm: LLM) -> None:
    schema = {"type": "object", "properties": {"a": {"enum": [True, False]}}, "required": ["a"]}
    structured = StructuredOutputsParams(json={**schema, "additionalProperties": False}, disable_any_whitespace=True)
    outputs = llm.generate(
        ["hello"] * 2,
        [
            SamplingParams(structured_outputs={"choice": ["red", "green"]}, max_tokens=20, seed=1),
            SamplingParams(structured_outputs=structured, max_tokens=40, seed=1),
        ],
    )
    assert outputs[0].outputs[0].text in ("red", "green")
    assert json.loads(outputs[1].outputs[0].text)["a"] in (True, False)


# Calls.


def test_a_thousand_prompts_are_answered_in_order(llm: LLM) -> None:
    given = prompts(*(1 + number % 7 for number in range(1_000)))
    outputs = llm.generate(given, SamplingParams(max_tokens=1))
    assert [output.prompt_token_ids for output in outputs] == given


def test_the_longest_outputs_begin_first(load: Callable[..., LLM]) -> None:
    llm = load(max_num_seqs=2)
    params = [SamplingParams(max_tokens=limit, ignore_eos=True) for limit in (3, 3, 3, 12)]
    chat = [{"role": "user", "content": "hello"}]
    ids = map(str, itertools.count())
    requests = [*read_prompts(ids, prompts(5, 5, 5, 5), params), *read_chats(ids, chat, SamplingParams(stop=["."]), {})]
    begun: list[OfflineRequest] = []
    llm._thread.run(
        llm._thread.engine.run_all(requests, lambda request: begun.append(request) if request not in begun else None)
    )
    *short, long, unlimited = requests
    assert begun == [unlimited, long, *short]


def test_no_prompts_have_no_outputs(llm: LLM) -> None:
    assert llm.generate([]) == []


@pytest.mark.parametrize(
    "prompt", ["hello world", [262, 267], {"prompt": "hello world"}, {"prompt_token_ids": (262, 267)}]
)
def test_a_prompt_has_several_forms(prompt: Any, llm: LLM) -> None:
    for given in (prompt, [prompt]):
        (output,) = llm.generate(given, GREEDY)
        assert output.prompt_token_ids == [262, 267]


def test_defaults_are_those_of_the_server(llm: LLM, load: Callable[..., LLM]) -> None:
    (output,) = llm.generate("hello", SamplingParams(ignore_eos=True))
    assert len(output.outputs[0].token_ids) == 16
    configured = load(num_blocks=16, override_generation_config='{"temperature": 0, "max_new_tokens": 3}')
    first, second = configured.generate(["hello", "hello"], SamplingParams(ignore_eos=True))
    assert tokens([first]) == tokens([second])
    assert len(first.outputs[0].token_ids) == 3


def test_the_defaults_of_the_model_are_parameters(load: Callable[..., LLM]) -> None:
    configured = load(num_blocks=16, override_generation_config={"temperature": 0.5, "max_new_tokens": 3})
    assert configured.get_default_sampling_params() == SamplingParams(temperature=0.5, max_tokens=3)


def test_the_tokenizer_is_that_of_the_files(llm: LLM) -> None:
    tokenizer = llm.get_tokenizer()
    assert tokenizer.encode("hello world") == [262, 267]
    messages = [{"role": "user", "content": "hello"}]
    text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    assert llm.chat(messages, GREEDY)[0].prompt == text


def test_an_adapter_may_only_be_none(llm: LLM) -> None:
    messages = [{"role": "user", "content": "hello"}]
    assert llm.generate("hello", GREEDY, lora_request=None)[0].finished
    assert llm.chat(messages, GREEDY, lora_request=None)[0].finished
    adapter: Any = "adapter"
    for call in (
        lambda: llm.generate("hello", GREEDY, lora_request=adapter),
        lambda: llm.embed("hello", lora_request=adapter),
        lambda: llm.score("hello", "world", lora_request=adapter),
    ):
        with pytest.raises(ValueError, match="lora_request: adapters are not served"):
            call()


# Errors.


@pytest.mark.parametrize(
    ("values", "field"),
    [
        ({"top_p": 3}, "top_p"),
        ({"temperature": "hot"}, "temperature"),
        ({"n": 0}, "n"),
        ({"max_tokens": -1}, "max_tokens"),
        ({"logit_bias": {99_999: 1.0}}, "logit_bias"),
        ({"stop": [""]}, "stop[0]"),
        ({"structured_outputs": {"regex": "("}}, "structured_outputs.regex"),
    ],
)
def test_an_invalid_parameter_is_named(values: dict[str, Any], field: str, llm: LLM) -> None:
    with pytest.raises(QuireError) as raised:
        llm.generate(["hello", "hello"], [GREEDY, SamplingParams(**values)])
    assert raised.value.field == field
    assert raised.value.is_answer
    assert llm.generate("hello", GREEDY)[0].finished, "later calls are not affected"


def test_a_prompt_of_another_type_is_named_with_its_index(llm: LLM) -> None:
    given: Any = ["hello", {"text": "x"}]
    with pytest.raises(TypeError) as raised:
        llm.generate(given, GREEDY)
    assert raised.value.__notes__ == ["prompt 1 of 2"]


def test_an_invalid_prompt_is_named_with_its_index(llm: LLM) -> None:
    with pytest.raises(QuireError) as raised:
        llm.generate([[5], [99_999]], GREEDY)
    assert raised.value.field == "prompt[0]"
    assert raised.value.__notes__ == ["prompt 1 of 2"]
    with pytest.raises(QuireError) as raised:
        llm.generate([prompts(256)[0]], GREEDY)
    assert raised.value.reason == "CONTEXT_LENGTH_EXCEEDED"


def test_a_length_that_does_not_fit_the_context_is_cut(llm: LLM) -> None:
    params = SamplingParams(temperature=0, max_tokens=1000, ignore_eos=True)
    (output,) = llm.generate([prompts(250)[0]], params)
    assert (len(output.outputs[0].token_ids), output.outputs[0].finish_reason) == (6, "length")
    (answer,) = llm.chat([{"role": "user", "content": "a" * 200}], params)
    assert len(answer.prompt_token_ids) + len(answer.outputs[0].token_ids) == 256


def test_an_invalid_message_is_named(llm: LLM) -> None:
    with pytest.raises(QuireError) as raised:
        llm.chat([{"role": "nobody", "content": "hello"}])
    assert raised.value.field == "messages[0].role"
    with pytest.raises(QuireError) as raised:
        llm.chat([{"role": "user", "content": "hello"}], tool_choise="none")
    assert raised.value.message == "is not a known field: did you mean tool_choice?"


def test_the_numbers_of_prompts_and_parameters_must_be_equal(llm: LLM) -> None:
    with pytest.raises(ValueError, match="1 sampling_params for 2 prompts"):
        llm.generate(["a", "b"], [GREEDY])
    with pytest.raises(ValueError, match="priority has 1 numbers for 2 prompts"):
        llm.generate(["a", "b"], GREEDY, priority=[1])


def test_the_budget_of_the_reasoning_is_a_parameter_of_chats() -> None:
    params = SamplingParams(thinking_token_budget=7)
    ids = map(str, itertools.count())
    (request,) = read_chats(ids, [{"role": "user", "content": "hello"}], params, {})
    prompt = request.unvalidated.prompt
    assert isinstance(prompt, ChatPrompt)
    assert prompt.max_reasoning_tokens == 7
    with pytest.raises(QuireError, match="thinking_token_budget: is not served"):
        read_prompts(ids, "hello", params)


@pytest.mark.parametrize(("given", "expected"), [(None, [None, None]), (3, [3, 3]), ([3, -1], [3, -1])])
def test_a_priority_is_that_of_all_prompts_or_of_each(given: Any, expected: list[int | None]) -> None:
    ids = map(str, itertools.count())
    chats = [[{"role": "user", "content": text}] for text in ("a", "b")]
    for requests in (read_prompts(ids, ["a", "b"], GREEDY, given), read_chats(ids, chats, GREEDY, {}, given)):
        assert [request.unvalidated.priority for request in requests] == expected
    assert [request.unvalidated.priority for request in read_embeddings(ids, ["a", "b"], None, given)] == expected


@pytest.mark.parametrize(
    ("prompts", "message"),
    [
        (3, "prompts: must be a text, token ids, an object, or a list of these, not int"),
        (None, "prompts: .*, not NoneType"),
        ({"a"}, "prompts: .*, not set"),
        ([["a", "b"]], "a prompt: token ids must be integers, not str"),
        (["a", None], "a prompt: must be a text, token ids or an object, not NoneType"),
        (b"hello", "prompts: .*, not bytes"),
        ([b"hello"], "a prompt: .*, not bytes"),
        ({"prompt": bytearray(b"a")}, "a prompt: .*, not bytearray"),
        ([True, 5], "a prompt: token ids must be integers, not bool"),
        ([[5, False]], "a prompt: token ids must be integers, not bool"),
        ({"text": "a"}, "a prompt has the key prompt or prompt_token_ids, not text"),
    ],
)
def test_what_is_no_prompt_is_refused(prompts: Any, message: str, llm: LLM) -> None:
    with pytest.raises(TypeError, match=message):
        llm.generate(prompts, GREEDY)


@pytest.mark.parametrize(
    ("chat", "message"),
    [
        (3, "messages: must be a list of messages, or a list of such lists, not int"),
        ("hi", "messages: .*, not str"),
        ({"role": "user", "content": "hi"}, "messages: .*, not dict"),
        (["hi"], r"messages\[0\]: must be a message, or a list of messages, not str"),
        ([[[{"role": "user", "content": "hi"}]]], r"messages\[0\]: must be an object with a role .*, not list"),
        ([("user", "hi")], r"messages\[0\]: must be an object with a role and a content, not str"),
    ],
)
def test_what_is_no_chat_is_refused(chat: Any, message: str, llm: LLM) -> None:
    with pytest.raises(TypeError, match=f"^{message}$"):
        llm.chat(chat)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda llm: llm.generate("x", {"max_tokens": 4}), "sampling_params: must be SamplingParams or a list .* dict"),
        (lambda llm: llm.generate("x", PoolingParams()), "sampling_params: .*, not PoolingParams"),
        (lambda llm: llm.generate(["x"], [None]), r"sampling_params\[0\]: must be SamplingParams, not NoneType"),
        (lambda llm: llm.generate("x", priority="a"), "priority: must be a number, or a list with .* prompt, not str"),
        (lambda llm: llm.chat([{}], tools={"name": "f"}), "tools: must be a list of tools, not dict"),
        (lambda llm: llm.chat([{}], stream=True), "stream: is not an argument, but a field of a server's body"),
        (lambda llm: llm.chat([{}], model="other"), "model: is not an argument.*"),
        (lambda llm: llm.chat([{}], chat_template_kwargs=5), "chat_template_kwargs: must be an object, not int"),
        (lambda llm: llm.embed("x", pooling_params=GREEDY), "pooling_params: must be PoolingParams or .*, not Sampl.*"),
        (lambda llm: llm.score("x", "y", pooling_params=3), "pooling_params: must be PoolingParams or .*, not int"),
    ],
)
def test_an_argument_of_a_wrong_type_is_named(call: Callable[[LLM], object], message: str, llm: LLM) -> None:
    with pytest.raises(TypeError, match=f"^{message}$"):
        call(llm)


def test_numbers_may_be_those_of_numpy(llm: LLM) -> None:
    params = SamplingParams(
        temperature=np.float32(0), max_tokens=np.int64(8), stop_token_ids=[np.int32(3)], logit_bias={262: 0.5}
    )
    prompt: Any = np.array([262, 267])
    priority: Any = np.array([1])
    (output,) = llm.generate([prompt], params, priority=priority)
    assert output.prompt_token_ids == [262, 267]


def test_a_note_is_about_the_prompt_of_a_list(llm: LLM) -> None:
    with pytest.raises(QuireError) as raised:
        llm.generate(["hello"] * 3, [GREEDY, GREEDY, SamplingParams(temperature="hot")])
    assert raised.value.__notes__ == ["prompt 2 of 3"]
