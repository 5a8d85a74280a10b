"""The validator of calls for embeddings of both protocols: their inputs become requests for the scheduler, or an error
names the field as the client spelled it."""

import asyncio
from dataclasses import dataclass, replace
from functools import partial

from gateway_svc.embeddings import (
    MAX_DIMENSIONS,
    MAX_INPUTS,
    MAX_TEXT_TOKENS,
    EmbeddingInput,
    UnvalidatedEmbeddings,
    ValidatedEmbedding,
)
from gateway_svc.field_checker import FieldChecker
from gateway_svc.field_paths import Field, FieldPath
from gateway_svc.retention import Retention
from gateway_svc.tokenizer import ModelTokenizer, PromptTooLong
from gateway_svc.unvalidated_request import TextPrompt
from gateway_svc.validated_request import ModelInfo, TruncationSide
from svc_common.errors import QuireError, Reason

_DIMENSIONS = "dimensions"
_MAX_CONTEXTS = 16  # of a text that is tokenized


@dataclass(frozen=True, slots=True)
class _Truncation:
    """How many tokens of an input are kept at most; None: a longer one is refused."""

    num_kept: int | None
    side: TruncationSide


async def validate_embeddings(
    unvalidated: UnvalidatedEmbeddings,
    tokenizer: ModelTokenizer,
    model: ModelInfo,
    *,
    request_id: str,
    retention: Retention | None,
    tenant: str,
) -> list[ValidatedEmbedding]:
    """The valid requests of a call, one for each input. The tokenizer's threads are shared by `tenant`.

    Raises QuireError. The cheapest checks come first.
    """
    check = FieldChecker(unvalidated.field_path)
    if not 1 <= len(unvalidated.inputs) <= MAX_INPUTS:
        raise check.invalid(Field.PROMPT, f"must hold 1 to {MAX_INPUTS} inputs")
    dimensions = unvalidated.dimensions
    if dimensions is not None and not 1 <= dimensions <= MAX_DIMENSIONS:
        raise check.invalid(_DIMENSIONS, f"must be between 1 and {MAX_DIMENSIONS}")
    priority = check.integer(Field.PRIORITY, unvalidated.priority, 0, -(2**31), 2**31 - 1)
    truncation = _truncation(unvalidated, tokenizer, model, check)
    request = partial(
        ValidatedEmbedding,
        request_id=request_id,
        model=model.name,
        dimensions=dimensions,
        pooling=unvalidated.pooling,
        normalization=unvalidated.normalization,
        priority=priority,
        retention=retention,
    )
    return [
        request(prompt_token_ids=await _encode(one, truncation, tokenizer, model, tenant), field_path=one.field_path)
        for one in unvalidated.inputs
    ]


def too_many_dimensions(num_numbers: int, field_path: FieldPath) -> QuireError:
    """The error to raise about `dimensions` if the vectors of the model have only so many numbers."""
    message = f"must be at most {num_numbers}, which the vectors of this model have"
    return QuireError(Reason.INVALID_FIELD, message, field=field_path(_DIMENSIONS))


def _truncation(
    unvalidated: UnvalidatedEmbeddings, tokenizer: ModelTokenizer, model: ModelInfo, check: FieldChecker
) -> _Truncation:
    num_kept, most = unvalidated.truncate_prompt_tokens, model.context_length
    if num_kept == -1:
        num_kept = most
    has_special = any(
        isinstance(one.prompt, TextPrompt) and one.prompt.add_special_tokens for one in unvalidated.inputs
    )
    # Beside the special tokens at least one of the text is kept.
    least = 1 + (tokenizer.num_special_tokens if has_special else 0)
    if num_kept is not None and not least <= num_kept <= most:
        raise check.invalid(Field.TRUNCATE_PROMPT_TOKENS, f"must be -1, or between {least} and {most}")
    return _Truncation(num_kept, unvalidated.truncation_side)


async def _encode(
    given: EmbeddingInput, truncation: _Truncation, tokenizer: ModelTokenizer, model: ModelInfo, tenant: str
) -> list[int]:
    """The tokens of an input, at most as many as the context has."""
    check, prompt = FieldChecker(given.field_path), given.prompt
    most = _MAX_CONTEXTS * model.context_length
    if prompt is None:
        raise check.invalid(Field.PROMPT, "must be given")
    if isinstance(prompt, TextPrompt):
        where = Field.TEXT
        if not prompt.text:
            raise check.invalid(where, "must not be empty")
        check.unicode(check.field_path(where), prompt.text)
        truncation = _truncation_of_text(prompt, given.max_text_tokens, truncation, tokenizer, model, check)
        try:
            token_ids = await _encode_text(prompt, truncation, tokenizer, most, tenant)
        except PromptTooLong:
            raise QuireError(
                Reason.CONTEXT_LENGTH_EXCEEDED,
                f"is longer than {_MAX_CONTEXTS} contexts of {model.context_length} tokens",
                field=check.field_path(where),
            ) from None
    else:
        where = Field.TOKEN_IDS
        # Length first: the ids of an input that is too long are not checked.
        if len(prompt.token_ids) > (most if truncation.num_kept is not None else model.context_length):
            raise _too_long(check, where, len(prompt.token_ids), model)
        check.token_ids(where, prompt.token_ids, model)
        await asyncio.sleep(0)  # to check the ids of all inputs may take a second
        token_ids = list(prompt.token_ids)
        if truncation.num_kept is not None:
            is_left = truncation.side is TruncationSide.LEFT
            token_ids = token_ids[slice(-truncation.num_kept, None) if is_left else slice(truncation.num_kept)]
    if not token_ids:
        raise check.invalid(where, "must have at least one token")
    if len(token_ids) > model.context_length:
        raise _too_long(check, where, len(token_ids), model)
    return token_ids


def _truncation_of_text(
    prompt: TextPrompt,
    max_text_tokens: int | None,
    truncation: _Truncation,
    tokenizer: ModelTokenizer,
    model: ModelInfo,
    check: FieldChecker,
) -> _Truncation:
    """The truncation of a call, with the limit of one text."""
    if max_text_tokens is None:
        return truncation
    num_special = tokenizer.num_special_tokens if prompt.add_special_tokens else 0
    if not 1 <= max_text_tokens <= model.context_length - num_special:
        raise check.invalid(MAX_TEXT_TOKENS, f"must be between 1 and {model.context_length - num_special}")
    num_kept = max_text_tokens + num_special
    return replace(truncation, num_kept=min(num_kept, truncation.num_kept or num_kept))


async def _encode_text(
    prompt: TextPrompt, truncation: _Truncation, tokenizer: ModelTokenizer, most: int, tenant: str
) -> list[int]:
    """Raises PromptTooLong for a text that cannot have as few as `most` tokens."""
    # `most` is above the context also where nothing is cut: some tokenizers drop white space, or make one token of a
    # long word, so that a long text may have few tokens.
    if truncation.num_kept is None:
        return await tokenizer.encode_text(prompt.text, most, tenant, add_special_tokens=prompt.add_special_tokens)
    return await tokenizer.encode_truncated(
        prompt.text, truncation.num_kept, truncation.side, most, tenant, add_special_tokens=prompt.add_special_tokens
    )


def _too_long(check: FieldChecker, where: Field, num_tokens: int, model: ModelInfo) -> QuireError:
    return QuireError(
        Reason.CONTEXT_LENGTH_EXCEEDED,
        f"has {num_tokens} tokens, and the context {model.context_length}: "
        f"{check.field_path(Field.TRUNCATE_PROMPT_TOKENS)} keeps a part",
        field=check.field_path(where),
    )
