"""The validator of calls for embeddings and classifications of both protocols: their inputs become requests for the
scheduler, or an error names the field as the client spelled it."""

import asyncio
from collections.abc import Sequence
from contextlib import aclosing
from dataclasses import replace
from functools import partial

from gateway_svc.classifications import ClassificationParams, UnvalidatedClassifications
from gateway_svc.embeddings import DIMENSIONS, MAX_DIMENSIONS, EmbeddingParams, UnvalidatedEmbeddings
from gateway_svc.field_checker import FieldChecker
from gateway_svc.field_paths import Field
from gateway_svc.retention import Retention
from gateway_svc.text_truncation import (
    MAX_CONTEXTS,
    Truncation,
    beyond_context,
    check_num_tokens,
    check_text,
    check_text_limit,
)
from gateway_svc.tokenizer import ModelTokenizer, TextToEncode
from gateway_svc.unvalidated_request import TextPrompt, TokenPrompt
from gateway_svc.validated_request import ModelInfo, TruncationSide
from gateway_svc.validated_value import ValidatedValue, ValueParams
from gateway_svc.value_inputs import MAX_INPUTS, UnvalidatedInputs, ValueInput


async def validate_embeddings(
    unvalidated: UnvalidatedEmbeddings,
    tokenizer: ModelTokenizer,
    model: ModelInfo,
    *,
    request_id: str,
    retention: Retention | None,
    tenant: str,
) -> list[ValidatedValue]:
    """The valid requests of a call, one for each input, as `validate_inputs`."""
    dimensions = unvalidated.dimensions
    if dimensions is not None and not 1 <= dimensions <= MAX_DIMENSIONS:
        raise FieldChecker(unvalidated.field_path).invalid(DIMENSIONS, f"must be between 1 and {MAX_DIMENSIONS}")
    params = EmbeddingParams(dimensions, unvalidated.pooling, unvalidated.normalization)
    return await validate_inputs(
        unvalidated, params, tokenizer, model, request_id=request_id, retention=retention, tenant=tenant
    )


async def validate_classifications(
    unvalidated: UnvalidatedClassifications,
    tokenizer: ModelTokenizer,
    model: ModelInfo,
    labels: Sequence[str],
    *,
    request_id: str,
    retention: Retention | None,
    tenant: str,
) -> list[ValidatedValue]:
    """The valid requests of a call to a model with these labels, one for each input, as `validate_inputs`."""
    if not labels:
        raise FieldChecker(unvalidated.field_path).unsupported(Field.MODEL, "has no labels, so it does not classify")
    params = ClassificationParams(len(labels), unvalidated.is_raw)
    return await validate_inputs(
        unvalidated, params, tokenizer, model, request_id=request_id, retention=retention, tenant=tenant
    )


async def validate_inputs(
    unvalidated: UnvalidatedInputs,
    params: ValueParams,
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
    priority = check.integer(Field.PRIORITY, unvalidated.priority, 0, -(2**31), 2**31 - 1)
    truncation = _truncation(unvalidated, tokenizer, model, check)
    request = partial(
        ValidatedValue,
        request_id=request_id,
        model=model.name,
        params=params,
        priority=priority,
        retention=retention,
    )
    prompts = [_prompt(one, truncation, tokenizer, model) for one in unvalidated.inputs]
    encoded = tokenizer.encode_texts([one for one in prompts if isinstance(one, TextToEncode)], tenant)
    requests = []
    async with aclosing(encoded):
        for one, prompt in zip(unvalidated.inputs, prompts, strict=True):
            if isinstance(prompt, TextToEncode):
                token_ids, where = await anext(encoded), Field.TEXT
                FieldChecker(one.field_path).tokens_of_text(where, token_ids, model)
            else:
                token_ids, where = await _token_ids(one, prompt, truncation, model), Field.TOKEN_IDS
            check_num_tokens(token_ids, where, model, FieldChecker(one.field_path))
            requests.append(request(prompt_token_ids=token_ids, field_path=one.field_path))
    return requests


def _truncation(
    unvalidated: UnvalidatedInputs, tokenizer: ModelTokenizer, model: ModelInfo, check: FieldChecker
) -> Truncation:
    has_special = any(
        isinstance(one.prompt, TextPrompt) and one.prompt.add_special_tokens for one in unvalidated.inputs
    )
    # Beside the special tokens at least one of the text is kept.
    least = 1 + (tokenizer.num_special_tokens if has_special else 0)
    return Truncation.of(unvalidated.truncate_prompt_tokens, unvalidated.truncation_side, least, model, check)


def _prompt(
    given: ValueInput, truncation: Truncation, tokenizer: ModelTokenizer, model: ModelInfo
) -> TextToEncode | TokenPrompt:
    """What becomes the prompt of an input. Only the length of token ids is checked."""
    check, prompt = FieldChecker(given.field_path), given.prompt
    if prompt is None:
        raise check.invalid(Field.PROMPT, "must be given")
    if isinstance(prompt, TokenPrompt):
        # Length first: the ids of an input that is too long are not checked.
        most = model.context_length if truncation.num_kept is None else MAX_CONTEXTS * model.context_length
        if len(prompt.token_ids) > most:
            raise beyond_context(Field.TOKEN_IDS, f"{len(prompt.token_ids)} tokens", model, check)
        return prompt
    check_text(prompt.text, tokenizer, model, check)
    truncation = _truncation_of_text(prompt, given.max_text_tokens, truncation, tokenizer, model, check)
    return TextToEncode(prompt.text, prompt.add_special_tokens, truncation.num_kept, truncation.side)


async def _token_ids(given: ValueInput, prompt: TokenPrompt, truncation: Truncation, model: ModelInfo) -> list[int]:
    """The tokens of an input that has token ids."""
    FieldChecker(given.field_path).token_ids(Field.TOKEN_IDS, prompt.token_ids, model)
    await asyncio.sleep(0)  # to check the ids of all inputs may take a second
    token_ids = list(prompt.token_ids)
    if truncation.num_kept is None:
        return token_ids
    is_left = truncation.side is TruncationSide.LEFT
    return token_ids[slice(-truncation.num_kept, None) if is_left else slice(truncation.num_kept)]


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
