"""Checks of how tokens are sampled and reported: parameters, bias, allowed tokens, bad words, log-probabilities."""

import math
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from random import Random, SystemRandom

from gateway_svc.field_checker import FieldChecker
from gateway_svc.field_paths import Field
from gateway_svc.sampling_fields import SAMPLING_FIELDS, Value
from gateway_svc.unvalidated_request import UnvalidatedRequest
from gateway_svc.validated_request import Echo, ModelInfo, Sampling, SeedOrigin, Stopping
from svc_common.errors import QuireError, Reason

MAX_LOGPROB_TOKEN_IDS = 128
# Of a token and its top tokens, over the prompt: an answer has to fit a message of 16 MiB.
MAX_PROMPT_LOGPROBS = 2**18
# Of all tokens of the output: what a gateway that resumes a request needs has to fit an inner message of 64 MiB.
MAX_OUTPUT_LOGPROBS = 2**22
MAX_LOGIT_BIAS = 1_024
MAX_ALLOWED = 16_384
MAX_BAD_WORDS = 1_024
MAX_WORD_LENGTH = 1_024
# Of all bad words together, so that they are few to tokenize: a rare character may have several tokens.
MAX_BAD_WORDS_LENGTH = 32_768
# A step's message has the tokens of bad words once for each new sequence, and workers compare them with each output.
MAX_BAD_WORD_TOKENS = 64
MAX_ALL_BAD_WORDS_TOKENS = 8_192

_RANDOM_SEED_BITS = 53  # an integer that JSON clients in any language can hold


def source_of_seeds(seed: int | None) -> Random:
    """What the seeds of requests without one are drawn from: the same ones in the same order for a seed, else others
    each time.
    """
    return SystemRandom() if seed is None else Random(seed)


def check_sampling(unvalidated: UnvalidatedRequest, model: ModelInfo, check: FieldChecker, source: Random) -> Sampling:
    """The parameters, without the tokens of bad words; a seed that is absent is of `source`. Raises QuireError."""
    params = {one.name: check.sampling(one, unvalidated.sampling) for one in SAMPLING_FIELDS}
    if unvalidated.beam_search is not None:
        params |= {one.name: one.in_beam_search[0] for one in SAMPLING_FIELDS if one.name not in unvalidated.sampling}
    is_drawn = unvalidated.seed is None
    return Sampling(
        params={one.name: one.resolve(params[one.name], model.vocab_size) for one in SAMPLING_FIELDS},
        seed=_drawn_seed(params, source)
        if is_drawn
        else check.integer(Field.SEED, unvalidated.seed, 0, -(2**63), 2**63 - 1),
        logit_bias=_logit_bias(unvalidated.logit_bias, model, check),
        allowed_token_ids=tuple(dict.fromkeys(unvalidated.allowed_token_ids)),
        seed_origin=SeedOrigin.DRAWN if is_drawn else SeedOrigin.GIVEN,
    )


def with_own_seed(sampling: Sampling, source: Random) -> Sampling:
    """The same sampling for another prompt of a call: with a seed of its own, unless the client gave one."""
    if sampling.seed_origin is SeedOrigin.GIVEN:
        return sampling
    return replace(sampling, seed=_drawn_seed(sampling.params, source))


def _drawn_seed(params: Mapping[str, Value], source: Random) -> int:
    # Greedy sampling draws nothing: equal requests then have equal answers, with the seed that these report.
    return 0 if params["temperature"] == 0 else source.getrandbits(_RANDOM_SEED_BITS)


def without_defaults(sampling: Sampling, unvalidated: UnvalidatedRequest, model: ModelInfo) -> Sampling:
    """Validated sampling with Quire's own defaults instead of the operator's, in a request that has neither."""
    if unvalidated.beam_search is not None:
        return sampling  # the operator's defaults do not apply
    params = {
        one.name: sampling.params[one.name]
        if unvalidated.sampling.get(one.name) is not None
        else one.resolve(one.default, model.vocab_size)
        for one in SAMPLING_FIELDS
    }
    return replace(sampling, params=params)


def check_logprobs(unvalidated: UnvalidatedRequest, model: ModelInfo, check: FieldChecker, most: int) -> int | None:
    """How many top tokens each token has, at most `most`; None: there are no log-probabilities."""
    if len(unvalidated.logprob_token_ids) > MAX_LOGPROB_TOKEN_IDS:
        raise check.invalid(Field.LOGPROB_TOKEN_IDS, f"must hold at most {MAX_LOGPROB_TOKEN_IDS} ids")
    check.token_ids(Field.LOGPROB_TOKEN_IDS, unvalidated.logprob_token_ids, model)
    if unvalidated.logprobs is None:
        return 0 if unvalidated.logprob_token_ids else None
    return check.integer(Field.LOGPROBS, unvalidated.logprobs, 0, 0, most)


def check_num_logprobs(logprobs: int | None, num_requested: int, num_tokens: int, check: FieldChecker) -> None:
    """Refuses more log-probabilities of an output of at most `num_tokens`, over all sequences, than a message may have.
    Raises QuireError."""
    if logprobs is not None and num_tokens * (1 + logprobs + num_requested) > MAX_OUTPUT_LOGPROBS:
        of_token = f"1 + top tokens + tokens of {check.field_path(Field.LOGPROB_TOKEN_IDS)}"
        tokens = f"the {num_tokens} tokens that all sequences may have, by max_tokens or its default"
        message = f"asks for too many: {tokens}, times ({of_token}), must be at most {MAX_OUTPUT_LOGPROBS}"
        raise check.invalid(Field.LOGPROBS, message)


def check_prompt_logprobs(unvalidated: UnvalidatedRequest, check: FieldChecker, most: int) -> int | None:
    """How many top tokens each token of the prompt has, at most `most`; None: there are no log-probabilities of the
    prompt."""
    if unvalidated.prompt_logprobs is None:
        return None
    return check.integer(Field.PROMPT_LOGPROBS, unvalidated.prompt_logprobs, 0, 0, most)


def check_num_prompt_logprobs(prompt_logprobs: int | None, prompt_length: int, check: FieldChecker) -> None:
    """Refuses more log-probabilities of a prompt than a message may have. Raises QuireError."""
    if prompt_logprobs is not None and (1 + prompt_logprobs) * prompt_length > MAX_PROMPT_LOGPROBS:
        # The field may be `echo`, beside `logprobs` with the number of top tokens.
        most = MAX_PROMPT_LOGPROBS // prompt_length - 1
        limit = f"at most {most} top tokens for each token" if most >= 0 else "none"
        message = f"asks for too many log-probabilities: a prompt of {prompt_length} tokens may have {limit}"
        raise check.invalid(Field.PROMPT_LOGPROBS, message)


def check_max_tokens(unvalidated: UnvalidatedRequest, check: FieldChecker) -> None:
    """Rejects a length below 1, or below 0 where the prompt is returned. Raises QuireError."""
    max_tokens = unvalidated.max_tokens
    if max_tokens is None or max_tokens > 0:
        return
    returns_prompt = unvalidated.echo is Echo.PRESENT or unvalidated.prompt_logprobs is not None
    if max_tokens < 0 or not returns_prompt:
        check.max_tokens(max_tokens)
    not_served = {
        Field.BEAM_SEARCH: unvalidated.beam_search is not None,
        Field.BEST_OF: (unvalidated.best_of or 1) > (unvalidated.n or 1),
        Field.MIN_TOKENS: bool(unvalidated.min_tokens),
    }
    for which, is_given in not_served.items():
        if is_given:
            raise check.unsupported(which, "is not served with max_tokens 0")


def check_banned(unvalidated: UnvalidatedRequest, model: ModelInfo, check: FieldChecker) -> None:
    """Checks numbers and lengths, and the ids of tokens. Raises QuireError."""
    if len(unvalidated.allowed_token_ids) > MAX_ALLOWED:
        raise check.invalid(Field.ALLOWED_TOKEN_IDS, f"must hold at most {MAX_ALLOWED} ids")
    check.token_ids(Field.ALLOWED_TOKEN_IDS, unvalidated.allowed_token_ids, model)
    if len(unvalidated.bad_words) > MAX_BAD_WORDS:
        raise check.invalid(Field.BAD_WORDS, f"must hold at most {MAX_BAD_WORDS} texts")
    for item_index, word in enumerate(unvalidated.bad_words):
        where = check.field_path(Field.BAD_WORDS, item_index)
        if len(word) > MAX_WORD_LENGTH or not word.strip():
            message = f"must have between 1 and {MAX_WORD_LENGTH} characters, not all of them white space"
            raise QuireError(Reason.INVALID_FIELD, message, field=where)
        check.unicode(where, word)
    if sum(map(len, unvalidated.bad_words)) > MAX_BAD_WORDS_LENGTH:
        raise check.invalid(Field.BAD_WORDS, f"must have at most {MAX_BAD_WORDS_LENGTH} characters in all")


def check_tokens_left(sampling: Sampling, stopping: Stopping, model: ModelInfo, check: FieldChecker) -> None:
    """Refuses a request whose allowed tokens might all be suppressed at once, and bad words that are no tokens of the
    model, or too many. Raises QuireError.
    """
    for word in sampling.bad_words:
        if not word or max(word) >= model.vocab_size:
            raise check.invalid(Field.BAD_WORDS, "holds a text that the model has no tokens for")
        if len(word) > MAX_BAD_WORD_TOKENS:
            raise check.invalid(Field.BAD_WORDS, f"holds a text of more than {MAX_BAD_WORD_TOKENS} tokens")
    if sum(map(len, sampling.bad_words)) > MAX_ALL_BAD_WORDS_TOKENS:
        raise check.invalid(Field.BAD_WORDS, f"must have at most {MAX_ALL_BAD_WORDS_TOKENS} tokens in all")
    until_min_tokens = frozenset(stopping.suppressed_token_ids)
    allowed = frozenset(sampling.allowed_token_ids)
    for completing in _suppressed_at_once(sampling.bad_words, allowed):
        suppressed = completing | until_min_tokens
        if allowed and suppressed >= allowed:
            message = "might all be suppressed at once, by bad words or until min_tokens"
            raise check.invalid(Field.ALLOWED_TOKEN_IDS, message)
        if len(suppressed) >= model.vocab_size:
            raise check.invalid(Field.BAD_WORDS, "leaves no token of the vocabulary")


def _suppressed_at_once(words: Sequence[Sequence[int]], allowed: frozenset[int]) -> Iterator[set[int]]:
    """The last tokens that bad words suppress together, after each output of allowed tokens that a word continues.

    No output suppresses more than one of these sets: the beginnings of words that an output ends with are all ends of
    the longest one.
    """
    completing: defaultdict[tuple[int, ...], set[int]] = defaultdict(set)
    for *beginning, last in words:
        completing[tuple(beginning)].add(last)
    for output in {(), *completing}:
        if not allowed or allowed.issuperset(output):
            yield set().union(*(completing.get(output[start:], ()) for start in range(len(output) + 1)))


def _logit_bias(logit_bias: Mapping[int, float], model: ModelInfo, check: FieldChecker) -> Mapping[int, float]:
    if len(logit_bias) > MAX_LOGIT_BIAS:
        raise check.invalid(Field.LOGIT_BIAS, f"must have at most {MAX_LOGIT_BIAS} entries")
    for token_id, bias in logit_bias.items():
        if not 0 <= token_id < model.vocab_size:
            message = f"names token {token_id}, which is not below {model.vocab_size}, the size of the vocabulary"
            raise check.invalid(Field.LOGIT_BIAS, message)
        if not (math.isfinite(bias) and -100 <= bias <= 100):
            raise check.invalid(Field.LOGIT_BIAS, "must hold values between -100 and 100")
    return dict(logit_bias)
