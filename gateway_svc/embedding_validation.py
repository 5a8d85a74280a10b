"""The validator of calls for embeddings of both protocols: their inputs become requests for the scheduler, or an error
names the field as the client spelled it."""

import asyncio
from dataclasses import replace
from functools import partial

from gateway_svc.embeddings import (
    DIMENSIONS,
    MAX_DIMENSIONS,
    MAX_INPUTS,
    EmbeddingInput,
    EmbeddingParams,
    UnvalidatedEmbeddings,
)
from gateway_svc.field_checker import FieldChecker
from gateway_svc.field_paths import Field
from gateway_svc.retention import Retention
from gateway_svc.text_truncation import (
    MAX_CONTEXTS,
    Truncation,
    beyond_all_contexts,
    beyond_context,
    check_text,
    check_text_limit,
)
from gateway_svc.tokenizer import ModelTokenizer, PromptTooLong
from gateway_svc.unvalidated_request import TextPrompt
from gateway_svc.validated_request import ModelInfo, TruncationSide
from gateway_svc.validated_value import ValidatedValue


async def validate_embeddings(
    unvalidated: UnvalidatedEmbeddings,
    tokenizer: ModelTokenizer,
    model: ModelInfo,
    *,
    request_id: str,
    retention: Retention | None,
    tenant: str,
) -> list[ValidatedValue]:
    """The valid requests of a call, one for each input. The tokenizer's threads are shared by `tenant`.

    Raises QuireError. The cheapest checks come first.
    """
    check = FieldChecker(unvalidated.field_path)
    if not 1 <= len(unvalidated.inputs) <= MAX_INPUTS:
        raise check.invalid(Field.PROMPT, f"must hold 1 to {MAX_INPUTS} inputs")
    dimensions = unvalidated.dimensions
    if dimensions is not None and not 1 <= dimensions <= MAX_DIMENSIONS:
        raise check.invalid(DIMENSIONS, f"must be between 1 and {MAX_DIMENSIONS}")
    priority = check.integer(Field.PRIORITY, unvalidated.priority, 0, -(2**31), 2**31 - 1)
    truncation = _truncation(unvalidated, tokenizer, model, check)
    request = partial(
        ValidatedValue,
        request_id=request_id,
        model=model.name,
        params=EmbeddingParams(dimensions, unvalidated.pooling, unvalidated.normalization),
        priority=priority,
        retention=retention,
    )
    return [
        request(prompt_token_ids=await _encode(one, truncation, tokenizer, model, tenant), field_path=one.field_path)
        for one in unvalidated.inputs
    ]


def _truncation(
    unvalidated: UnvalidatedEmbeddings, tokenizer: ModelTokenizer, model: ModelInfo, check: FieldChecker
) -> Truncation:
    has_special = any(
        isinstance(one.prompt, TextPrompt) and one.prompt.add_special_tokens for one in unvalidated.inputs
    )
    # Beside the special tokens at least one of the text is kept.
    least = 1 + (tokenizer.num_special_tokens if has_special else 0)
    return Truncation.of(unvalidated.truncate_prompt_tokens, unvalidated.truncation_side, least, model, check)


async def _encode(
    given: EmbeddingInput, truncation: Truncation, tokenizer: ModelTokenizer, model: ModelInfo, tenant: str
) -> list[int]:
    """The tokens of an input, at most as many as the context has."""
    check, prompt = FieldChecker(given.field_path), given.prompt
    most = MAX_CONTEXTS * model.context_length
    if prompt is None:
        raise check.invalid(Field.PROMPT, "must be given")
    if isinstance(prompt, TextPrompt):
        where = Field.TEXT
        check_text(prompt.text, check)
        truncation = _truncation_of_text(prompt, given.max_text_tokens, truncation, tokenizer, model, check)
        try:
            token_ids = await _encode_text(prompt, truncation, tokenizer, most, tenant)
        except PromptTooLong:
            raise beyond_all_contexts(model, check) from None
    else:
        where = Field.TOKEN_IDS
        # Length first: the ids of an input that is too long are not checked.
        if len(prompt.token_ids) > (most if truncation.num_kept is not None else model.context_length):
            raise beyond_context(where, f"{len(prompt.token_ids)} tokens", model, check)
        check.token_ids(where, prompt.token_ids, model)
        await asyncio.sleep(0)  # to check the ids of all inputs may take a second
        token_ids = list(prompt.token_ids)
        if truncation.num_kept is not None:
            is_left = truncation.side is TruncationSide.LEFT
            token_ids = token_ids[slice(-truncation.num_kept, None) if is_left else slice(truncation.num_kept)]
    if not token_ids:
        raise check.invalid(where, "must have at least one token")
    if len(token_ids) > model.context_length:
        raise beyond_context(where, f"{len(token_ids)} tokens", model, check)
    return token_ids


def _truncation_of_text(
    prompt: TextPrompt,
    max_text_tokens: int | None,
    truncation: Truncation,
    tokenizer: ModelTokenizer,
    model: ModelInfo,
    check: FieldChecker,
) -> Truncation:
    """The truncation of a call, with the limit of one text."""
    if max_text_tokens is None:
        return truncation
    num_special = tokenizer.num_special_tokens if prompt.add_special_tokens else 0
    check_text_limit(max_text_tokens, num_special, model, check)
    num_kept = max_text_tokens + num_special
    return replace(truncation, num_kept=min(num_kept, truncation.num_kept or num_kept))


async def _encode_text(
    prompt: TextPrompt, truncation: Truncation, tokenizer: ModelTokenizer, most: int, tenant: str
) -> list[int]:
    """Raises PromptTooLong for a text that cannot have as few as `most` tokens."""
    # `most` is above the context also where nothing is cut: some tokenizers drop white space, or make one token of a
    # long word, so that a long text may have few tokens.
    if truncation.num_kept is None:
        return await tokenizer.encode_text(prompt.text, most, tenant, add_special_tokens=prompt.add_special_tokens)
    return await tokenizer.encode_truncated(
        prompt.text, truncation.num_kept, truncation.side, most, tenant, add_special_tokens=prompt.add_special_tokens
    )
