"""Allowed tokens, bad words, named log-probabilities and truncated prompts: what is accepted and sent to workers."""

from typing import Any

import pytest

from gateway_requests import VOCAB_SIZE, digest_of, over_grpc, refused, sampling, stopping
from gateway_svc.field_checker import FieldChecker
from gateway_svc.field_paths import contract_field_path
from gateway_svc.sampling_checks import MAX_OUTPUT_LOGPROBS, check_num_logprobs, check_num_prompt_logprobs
from gateway_svc.sampling_fields import HIGHEST_MAX_LOGPROBS
from gateway_svc.tokenizer import ModelTokenizer
from gateway_svc.validated_request import SpecialTokens
from quire.inference.v1 import inference_pb2 as api
from quire.scheduler.v1.scheduler_pb2 import RenderOptions
from quire.worker.v1 import worker_pb2 as worker_v1
from svc_common.errors import QuireError, Reason
from svc_common.server import INTERNAL_MESSAGE_BYTES
from tiny_model import CONTEXT_LENGTH, EOS, tiny_tokenizer

INVALID, UNSUPPORTED, TOO_LONG = Reason.INVALID_FIELD, Reason.FEATURE_UNSUPPORTED, Reason.CONTEXT_LENGTH_EXCEEDED
BEAMS = {"beam_search": api.BeamSearch(width=2)}
REGEX = {"constraint": api.Constraint(regex="a+")}


async def params_of(tokenizer: ModelTokenizer, **fields: Any) -> worker_v1.SamplingParams:
    return (await over_grpc(tokenizer, text="a", **fields)).to_proto(RenderOptions()).sampling


async def test_workers_get_the_tokens(tokenizer: ModelTokenizer) -> None:
    fields = sampling(allowed_token_ids=[9, 7, 9], bad_words=["hello", "  ab"])
    params = await params_of(tokenizer, **fields, logprob_token_ids=[5, 3])
    assert list(params.allowed_token_ids) == [9, 7]
    assert list(params.logprob_token_ids) == [5, 3]
    assert params.logprobs == 0
    assert (await params_of(tokenizer, logprobs=3, logprob_token_ids=[5])).logprobs == 3
    # As vLLM: the text without leading spaces, and with one if that makes another first token and as many of them.
    expected = []
    for word in ("hello", "ab"):
        alone = tiny_tokenizer().encode(word, add_special_tokens=False).ids
        spaced = tiny_tokenizer().encode(f" {word}", add_special_tokens=False).ids
        expected += [alone, spaced] if len(spaced) == len(alone) and spaced[0] != alone[0] else [alone]
    assert [list(word.token_ids) for word in params.bad_words] == expected


REFUSED: list[tuple[dict[str, Any], Reason, str]] = [
    (sampling(allowed_token_ids=[1, VOCAB_SIZE]), INVALID, "sampling.allowed_token_ids[1]"),
    (sampling(allowed_token_ids=[1] * 16_385), INVALID, "sampling.allowed_token_ids"),
    (sampling(bad_words=["a"] * 1_025), INVALID, "sampling.bad_words"),
    (sampling(bad_words=["a", ""]), INVALID, "sampling.bad_words[1]"),
    (sampling(bad_words=[" \n"]), INVALID, "sampling.bad_words[0]"),
    (sampling(bad_words=["a" * 1_025]), INVALID, "sampling.bad_words[0]"),
    (sampling(bad_words=["a" * 1_024] * 33), INVALID, "sampling.bad_words"),
    # Of each of these characters the tiny model has several tokens.
    (sampling(bad_words=["\U0001f9ff" * 65]), INVALID, "sampling.bad_words"),
    (sampling(bad_words=["\U0001f9ff" * 16] * 1_024), INVALID, "sampling.bad_words"),
    ({"logprob_token_ids": [VOCAB_SIZE]}, INVALID, "logprob_token_ids[0]"),
    ({"logprob_token_ids": [1] * 129}, INVALID, "logprob_token_ids"),
    ({"truncate_prompt_tokens": 0}, INVALID, "truncate_prompt_tokens"),
    ({"truncate_prompt_tokens": -2}, INVALID, "truncate_prompt_tokens"),
    ({"truncation_side": 3}, INVALID, "truncation_side"),
    ({"truncate_prompt_tokens": CONTEXT_LENGTH}, INVALID, "truncate_prompt_tokens"),
    ({"truncate_prompt_tokens": -1, **stopping(max_tokens=CONTEXT_LENGTH)}, TOO_LONG, "stopping.max_tokens"),
    ({**sampling(allowed_token_ids=[1]), **BEAMS}, UNSUPPORTED, "sampling.allowed_token_ids"),
    ({**sampling(bad_words=["a"]), **BEAMS}, UNSUPPORTED, "sampling.bad_words"),
    ({"logprob_token_ids": [1], **BEAMS}, UNSUPPORTED, "logprob_token_ids"),
    ({**sampling(allowed_token_ids=[1]), **REGEX}, UNSUPPORTED, "sampling.allowed_token_ids"),
    ({**sampling(bad_words=["a"]), **REGEX}, UNSUPPORTED, "sampling.bad_words"),
    ({"prompt_logprobs": 21}, INVALID, "prompt_logprobs"),
    ({"prompt_logprobs": 0, **BEAMS}, UNSUPPORTED, "prompt_logprobs"),
    (stopping(max_tokens=0), INVALID, "stopping.max_tokens"),
    ({"echo": True, **stopping(max_tokens=0), **BEAMS}, UNSUPPORTED, "beam_search"),
    ({"echo": True, **stopping(max_tokens=0), "best_of": 2}, UNSUPPORTED, "best_of"),
    ({"echo": True, **stopping(max_tokens=0, min_tokens=1)}, UNSUPPORTED, "stopping.min_tokens"),
    # All allowed tokens might be suppressed at once.
    ({**sampling(allowed_token_ids=[EOS]), **stopping(min_tokens=1)}, INVALID, "sampling.allowed_token_ids"),
    ({**sampling(allowed_token_ids=[EOS]), **stopping(min_tokens=1, ignore_eos=True)}, INVALID,
     "sampling.allowed_token_ids"),
]  # fmt: skip


@pytest.mark.parametrize(("fields", "reason", "field"), REFUSED)
async def test_what_is_not_served_is_refused_by_name(
    fields: dict[str, Any], reason: Reason, field: str, tokenizer: ModelTokenizer
) -> None:
    assert await refused(over_grpc(tokenizer, text="a", **fields)) == (reason, f"generation.{field}")


async def test_bad_words_must_leave_an_allowed_token(tokenizer: ModelTokenizer) -> None:
    a, b = (tiny_tokenizer().encode(text, add_special_tokens=False).ids[0] for text in "ab")
    assert tiny_tokenizer().encode("ab", add_special_tokens=False).ids == [a, b]
    for allowed, words in (([b], ["b"]), ([a], ["aa"]), ([a, b], ["b", "aaa"]), ([a, b], ["aa", "bab", "ab"])):
        fields = sampling(allowed_token_ids=allowed, bad_words=words)
        refusal = await refused(over_grpc(tokenizer, text="a", **fields))
        assert refusal == (INVALID, "generation.sampling.allowed_token_ids"), words
    # Here no output is followed by a suppressed token alone.
    for allowed, words in (([b], ["ab"]), ([a, b], ["b"]), ([a, b], ["ab", "ba"]), ([a, b], ["aa", "bb"])):
        assert await over_grpc(tokenizer, text="a", **sampling(allowed_token_ids=allowed, bad_words=words)), words


async def test_an_end_of_text_that_is_ignored_is_suppressed_until_min_tokens_too(tokenizer: ModelTokenizer) -> None:
    both = await over_grpc(tokenizer, text="a", **stopping(min_tokens=3, ignore_eos=True, stop_token_ids=[9]))
    submit = both.to_proto(RenderOptions())
    assert list(submit.sampling.suppressed_token_ids) == [EOS, 9]
    assert list(submit.stop_token_ids) == [9]
    ignored = await params_of(tokenizer, **stopping(ignore_eos=True))
    assert not ignored.suppressed_token_ids


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"truncate_prompt_tokens": 5}, 5),
        ({"truncate_prompt_tokens": -1}, CONTEXT_LENGTH - 1),
        ({"truncate_prompt_tokens": -1, **stopping(max_tokens=20)}, CONTEXT_LENGTH - 20),
        ({"truncate_prompt_tokens": CONTEXT_LENGTH - 1}, CONTEXT_LENGTH - 1),
    ],
)
@pytest.mark.parametrize("is_right", [False, True])
async def test_one_end_of_a_long_prompt_is_kept(
    fields: dict[str, Any], expected: int, is_right: bool, tokenizer: ModelTokenizer
) -> None:
    text = "abcdefg" * CONTEXT_LENGTH
    whole = tiny_tokenizer().encode(text).ids
    assert whole[:expected] != whole[-expected:]
    kept = slice(expected) if is_right else slice(-expected, None)
    fields = fields | ({"truncation_side": api.TRUNCATION_SIDE_RIGHT} if is_right else {})
    for prompt in ({"text": text}, {"token_ids": api.TokenIds(ids=whole)}):
        assert (await over_grpc(tokenizer, **prompt, **fields)).prompt_token_ids == whole[kept]
    short = whole[:3]
    found = await over_grpc(tokenizer, token_ids=api.TokenIds(ids=short), **fields)
    assert found.prompt_token_ids == short


async def test_a_prompt_of_many_contexts_is_not_truncated(tokenizer: ModelTokenizer) -> None:
    ids = api.TokenIds(ids=[5] * (16 * CONTEXT_LENGTH + 1))
    refusal = await refused(over_grpc(tokenizer, token_ids=ids, truncate_prompt_tokens=5))
    assert refusal == (TOO_LONG, "generation.token_ids.ids")


async def test_spaces_between_special_tokens_matter_where_these_are_kept(tokenizer: ModelTokenizer) -> None:
    kinds = {
        (keep, spaces): (
            await over_grpc(tokenizer, text="a", keep_special_tokens=keep, spaces_between_special_tokens=spaces)
        ).special_tokens
        for keep in (False, True)
        for spaces in (False, True)
    }
    assert kinds == {
        (False, False): SpecialTokens.HIDDEN,
        (False, True): SpecialTokens.HIDDEN,
        (True, False): SpecialTokens.JOINED,
        (True, True): SpecialTokens.KEPT,
    }


@pytest.mark.parametrize("fields", [{"echo": True}, {"prompt_logprobs": 0}])
async def test_of_a_prompt_alone_one_token_is_generated(fields: dict[str, Any], tokenizer: ModelTokenizer) -> None:
    alone = await over_grpc(tokenizer, text="a", **fields, **stopping(max_tokens=0))
    assert alone.omits_output
    assert alone.stopping.max_tokens == 1
    one = await over_grpc(tokenizer, text="a", **fields, **stopping(max_tokens=1))
    assert not one.omits_output
    assert digest_of(alone, tokenizer) != digest_of(one, tokenizer)


@pytest.mark.parametrize(
    ("n", "max_tokens", "logprobs", "num_requested", "is_served"),
    [
        (1, 131_072, 20, 11, True),
        (1, 131_072, 20, 12, False),
        (128, 1_024, 20, 11, True),
        (128, 1_024, 20, 128, False),
        (128, 131_072, None, 0, True),
        (4, 2**20, 0, 0, True),
        (5, 2**20, 0, 0, False),
    ],
)
def test_the_log_probabilities_of_an_output_fit_a_message(
    n: int, max_tokens: int, logprobs: int | None, num_requested: int, is_served: bool
) -> None:
    check = FieldChecker(contract_field_path)
    if is_served:
        check_num_logprobs(logprobs, num_requested, n * max_tokens, check)
        return
    with pytest.raises(QuireError, match="must be at most 4194304") as refusal:
        check_num_logprobs(logprobs, num_requested, n * max_tokens, check)
    assert refusal.value.field == "logprobs"


def test_the_most_log_probabilities_of_an_output_fit_an_inner_message() -> None:
    top = [worker_v1.Logprob(token_id=2**18, logprob=-1.0)] * 20
    of_token = worker_v1.TokenLogprobs(logprob=-1.0, top=top)
    assert of_token.ByteSize() + 8 < INTERNAL_MESSAGE_BYTES / (MAX_OUTPUT_LOGPROBS / (1 + len(top)))


def test_the_most_log_probabilities_of_a_large_step_fit_an_inner_message() -> None:
    top = [worker_v1.Logprob(token_id=2**18, logprob=-1.0)] * HIGHEST_MAX_LOGPROBS
    of_token = worker_v1.TokenLogprobs(logprob=-1.0, top=top)
    assert (of_token.ByteSize() + 8) * 40_000 < INTERNAL_MESSAGE_BYTES


@pytest.mark.parametrize(
    ("prompt_logprobs", "prompt_length", "message"),
    [
        (20, 12_483, None),
        (20, 12_484, "of 12484 tokens may have at most 19 top tokens for each token"),
        (0, 2**18, None),
        (0, 2**18 + 1, "of 262145 tokens may have none"),
    ],
)
@pytest.mark.parametrize("field", ["prompt_logprobs", "echo"])
def test_the_log_probabilities_of_a_prompt_fit_a_message(
    field: str, prompt_logprobs: int, prompt_length: int, message: str | None
) -> None:
    check = FieldChecker(lambda which, item_index=None: field)
    if message is None:
        check_num_prompt_logprobs(prompt_logprobs, prompt_length, check)
        return
    with pytest.raises(QuireError, match=f"asks for too many log-probabilities: a prompt {message}$") as refusal:
        check_num_prompt_logprobs(prompt_logprobs, prompt_length, check)
    assert refusal.value.field == field


@pytest.mark.parametrize(
    "fields",
    [
        sampling(allowed_token_ids=[5]),
        sampling(bad_words=["a"]),
        {"logprob_token_ids": [5]},
        {"prompt_logprobs": 0},
    ],
)
async def test_schedulers_of_the_release_before_would_ignore_it(
    fields: dict[str, Any], tokenizer: ModelTokenizer
) -> None:
    assert (await over_grpc(tokenizer, text="a", **fields)).session_protocol == 3
    assert (await over_grpc(tokenizer, text="a", **sampling(temperature=0.5), logprobs=1)).session_protocol == 1
