"""The fields that the prompts of a call have in common, validated once."""

import re
from dataclasses import dataclass, field
from random import Random

from gateway_svc.constraint_checks import check_constraint
from gateway_svc.constraints import UnvalidatedConstraint
from gateway_svc.field_checker import FieldChecker
from gateway_svc.field_paths import Field
from gateway_svc.infilling import check_infilling
from gateway_svc.sampling_checks import (
    check_banned,
    check_logprobs,
    check_max_tokens,
    check_prompt_logprobs,
    check_sampling,
)
from gateway_svc.sampling_fields import SAMPLING_FIELDS
from gateway_svc.stop_strings import StopString
from gateway_svc.turn_constraints import TurnConstraint
from gateway_svc.unvalidated_request import GenerationDefaults, ResponseMode, UnvalidatedRequest
from gateway_svc.validated_request import (
    BeamSearchParams,
    EarlyStopping,
    ModelInfo,
    OnDisconnect,
    Sampling,
)
from svc_common.errors import QuireError, Reason

MAX_SEQUENCES = 128
MAX_BEAMS = 64
MAX_LENGTH_PENALTY = 10
MAX_STOPS = 64
MAX_STOP_LENGTH = 1_024
MAX_CACHE_SALT_LENGTH = 1_024

_REQUEST_ID = re.compile(r"[A-Za-z0-9._:-]{1,128}")


@dataclass(slots=True)
class CommonFields:
    """The fields that the prompts of a call share. They are checked once, and what is made of them for the first prompt
    is kept for the others: there may be a thousand."""

    as_sent: UnvalidatedRequest
    filled: UnvalidatedRequest
    """With the operator's defaults."""
    request_id: str
    on_disconnect: OnDisconnect
    sampling: Sampling
    n: int
    best_of: int
    beam_search: BeamSearchParams | None
    logprobs: int | None
    priority: int
    prompt_logprobs: int | None
    num_kept: int | None
    bad_words: tuple[tuple[int, ...], ...] | None = None
    suppressed: set[tuple[int, ...]] = field(default_factory=set)
    """Tokens that are not sampled at first, of prompts for which tokens are left beside them and the bad words."""
    grammars: list[tuple[UnvalidatedConstraint | TurnConstraint, str]] = field(default_factory=list)
    form_digest: str | None = None
    """As `digest_of_form`; of valid prompts."""
    _stops: tuple[StopString, ...] | None = None

    @classmethod
    def of(
        cls,
        as_sent: UnvalidatedRequest,
        defaults: GenerationDefaults,
        model: ModelInfo,
        check: FieldChecker,
        generated_id: str,
        max_logprobs: int,
        source: Random,
    ) -> "CommonFields":
        """The fields of a call, with the operator's defaults, and seeds of `source`. Raises QuireError. The cheapest
        checks come first.
        """
        unvalidated = defaults.fill(as_sent)
        request_id, on_disconnect = _identity(unvalidated, check, generated_id)
        sampling = check_sampling(unvalidated, model, check, source)
        n = check.integer(Field.N, unvalidated.n, 1, 1, MAX_SEQUENCES)
        beam_search = _beam_search(unvalidated, n, check)
        check_constraint(unvalidated, check)
        best_of = _best_of(unvalidated, n, check)
        logprobs = check_logprobs(unvalidated, model, check, max_logprobs)
        priority = check.integer(Field.PRIORITY, unvalidated.priority, 0, -(2**31), 2**31 - 1)
        _check_stops(unvalidated, model, check)
        check_banned(unvalidated, model, check)
        prompt_logprobs = check_prompt_logprobs(unvalidated, check, max_logprobs)
        check_max_tokens(unvalidated, check)
        check_infilling(unvalidated, check)
        _check_cache_salt(unvalidated.cache_salt, check)
        return cls(
            as_sent=as_sent,
            filled=unvalidated,
            request_id=request_id,
            on_disconnect=on_disconnect,
            sampling=sampling,
            n=n,
            best_of=best_of,
            beam_search=beam_search,
            logprobs=logprobs,
            priority=priority,
            prompt_logprobs=prompt_logprobs,
            num_kept=_num_kept(unvalidated, model, check),
        )

    @property
    def stops(self) -> tuple[StopString, ...]:
        """The stop strings, prepared."""
        if self._stops is None:
            self._stops = tuple(StopString.compile(stop) for stop in dict.fromkeys(self.filled.stop))
        return self._stops


def is_request_id(text: str) -> bool:
    """Whether this is a valid name of a request."""
    return _REQUEST_ID.fullmatch(text) is not None


def _identity(unvalidated: UnvalidatedRequest, check: FieldChecker, generated_id: str) -> tuple[str, OnDisconnect]:
    if unvalidated.request_id is None:
        return generated_id, OnDisconnect.CANCEL
    if not is_request_id(unvalidated.request_id):
        raise check.invalid(Field.REQUEST_ID, "must be 1 to 128 letters, digits, '.', '_', ':' or '-'")
    return unvalidated.request_id, OnDisconnect.DETACH


def _num_kept(unvalidated: UnvalidatedRequest, model: ModelInfo, check: FieldChecker) -> int | None:
    """How many of the prompt's tokens are kept; None: a longer prompt is refused."""
    num_kept = unvalidated.truncate_prompt_tokens
    if num_kept == -1:
        reserved = unvalidated.max_tokens or unvalidated.default_max_tokens or 1
        if unvalidated.max_tokens is not None and reserved >= model.context_length:
            tokens = f"{reserved} tokens leave nothing of the context for the prompt"
            raise check.beyond_context(Field.MAX_TOKENS, tokens, model)
        return max(1, model.context_length - reserved)
    if num_kept is not None and not 1 <= num_kept < model.context_length:
        message = f"must be -1, or between 1 and {model.context_length - 1}"
        raise check.invalid(Field.TRUNCATE_PROMPT_TOKENS, message)
    return num_kept


def _best_of(unvalidated: UnvalidatedRequest, n: int, check: FieldChecker) -> int:
    """How many sequences are generated, for the n that are sent."""
    best_of = check.integer(Field.BEST_OF, unvalidated.best_of, n, 1, MAX_SEQUENCES)
    if best_of < n:
        raise check.invalid(Field.BEST_OF, f"must be at least n, which is {n}")
    if best_of > n and unvalidated.response_mode is ResponseMode.STREAMED:
        # The best ones are known only when all have ended.
        raise check.invalid(Field.BEST_OF, f"must be n, which is {n}, where the answer is streamed")
    return best_of


def _beam_search(unvalidated: UnvalidatedRequest, n: int, check: FieldChecker) -> BeamSearchParams | None:
    search = unvalidated.beam_search
    if search is None:
        return None
    if unvalidated.response_mode is ResponseMode.STREAMED:
        raise check.invalid(Field.BEAM_SEARCH, "has nothing to stream before its end")
    sampling = unvalidated.sampling
    meaningless: dict[str, bool] = {
        **{
            one.path: sampling.get(one.name, one.in_beam_search[0]) not in one.in_beam_search for one in SAMPLING_FIELDS
        },
        Field.LOGIT_BIAS: any(unvalidated.logit_bias.values()),
        Field.ALLOWED_TOKEN_IDS: len(unvalidated.allowed_token_ids) > 0,
        Field.BAD_WORDS: len(unvalidated.bad_words) > 0,
        Field.LOGPROB_TOKEN_IDS: len(unvalidated.logprob_token_ids) > 0,
        Field.PROMPT_LOGPROBS: unvalidated.prompt_logprobs is not None,
        Field.STOP: len(unvalidated.stop) > 0,
        Field.BEST_OF: unvalidated.best_of is not None,
    }
    for which, is_given in meaningless.items():
        if is_given:
            raise check.unsupported(which, "is not served in a beam search")
    width = check.integer(Field.BEAM_WIDTH, search.width, 0, 2, MAX_BEAMS)
    if n > width:
        raise check.invalid(Field.N, f"must be at most the width of the beam search, which is {width}")
    most = MAX_LENGTH_PENALTY
    return BeamSearchParams(
        width=width,
        length_penalty=check.number(Field.LENGTH_PENALTY, search.length_penalty, 1.0, -most, most),
        early_stopping=search.early_stopping or EarlyStopping.HEURISTIC,
    )


def _check_cache_salt(cache_salt: str | None, check: FieldChecker) -> None:
    if cache_salt is None:
        return
    if not 1 <= len(cache_salt) <= MAX_CACHE_SALT_LENGTH:
        raise check.invalid(Field.CACHE_SALT, f"must have between 1 and {MAX_CACHE_SALT_LENGTH} characters")
    check.unicode(check.field_path(Field.CACHE_SALT), cache_salt)


def _check_stops(unvalidated: UnvalidatedRequest, model: ModelInfo, check: FieldChecker) -> None:
    if len(unvalidated.stop) > MAX_STOPS:
        raise check.invalid(Field.STOP, f"must hold at most {MAX_STOPS} strings")
    for item_index, stop in enumerate(unvalidated.stop):
        where = check.field_path(Field.STOP, item_index)
        if not 1 <= len(stop) <= MAX_STOP_LENGTH:
            message = f"must have between 1 and {MAX_STOP_LENGTH} characters"
            raise QuireError(Reason.INVALID_FIELD, message, field=where)
        check.unicode(where, stop)
    if len(unvalidated.stop_token_ids) > MAX_STOPS:
        raise check.invalid(Field.STOP_TOKEN_IDS, f"must hold at most {MAX_STOPS} ids")
    check.token_ids(Field.STOP_TOKEN_IDS, unvalidated.stop_token_ids, model)
