"""The validator of calls for scores of both protocols: pairs of texts become requests for the scheduler, or an error
names the field as the client spelled it."""

from collections.abc import Sequence
from contextlib import aclosing
from dataclasses import dataclass

from gateway_svc.chat_template import ChatTemplateError
from gateway_svc.embedding_validation import validate_embeddings
from gateway_svc.field_checker import FieldChecker
from gateway_svc.field_paths import Field, NamedFields
from gateway_svc.retention import Retention
from gateway_svc.scores import ScoreParams, UnvalidatedScores, ValidatedScores
from gateway_svc.tenant_shares import Share
from gateway_svc.text_pairs import EncodedPair, PairForm, PairText
from gateway_svc.text_truncation import Truncation, beyond_context, check_text, check_text_limit
from gateway_svc.tokenizer import ModelTokenizer, TextToEncode
from gateway_svc.unvalidated_request import TextPrompt
from gateway_svc.validated_request import ModelInfo
from gateway_svc.validated_value import ValidatedValue
from gateway_svc.value_inputs import ValueInput, Vector
from svc_common.errors import QuireError, Reason

_TOKEN_BYTES = 8  # in a list
_NO_INSTRUCTION = "is for models whose chat template writes an instruction beside a pair of texts"


async def validate_scores(
    unvalidated: UnvalidatedScores,
    tokenizer: ModelTokenizer,
    model: ModelInfo,
    pairs: PairForm | None,
    labels: Sequence[str],
    *,
    request_id: str,
    retention: Retention | None,
    tenant: str,
    body: Share | None = None,
) -> ValidatedScores:
    """The valid requests of a call: for a cross-encoder, which takes pairs in this form, one for each pair; for another
    model, None, one for each text. Equal ones are one request. A model with several labels is refused. The tokenizer's
    threads are shared by `tenant`. The prompts of pairs count among the bytes of the call's `body`.

    Raises QuireError. The cheapest checks come first.
    """
    if len(labels) > 1:
        message = f"has {len(labels)} labels, so it classifies texts and scores no pairs of them"
        raise FieldChecker(unvalidated.field_path).unsupported(Field.MODEL, message)
    if pairs is None:
        if unvalidated.instruction is not None:
            raise FieldChecker(unvalidated.field_path).unsupported(Field.INSTRUCTION, _NO_INSTRUCTION)
        # Of a model that computes no embeddings either, the scheduler refuses them.
        requests = await validate_embeddings(
            unvalidated.embeddings, tokenizer, model, request_id=request_id, retention=retention, tenant=tenant
        )
        return ValidatedScores(requests, unvalidated.pairs.pairs, unvalidated.pairs.cosines)
    check = FieldChecker(unvalidated.field_path)
    priority = check.integer(Field.PRIORITY, unvalidated.priority, 0, -(2**31), 2**31 - 1)
    for one in unvalidated.pairs.inputs:
        check_text(_text(one), tokenizer, model, FieldChecker(one.field_path))
    if unvalidated.instruction is not None:
        pairs = await _with_instruction(unvalidated.instruction, pairs, tokenizer, model, check, tenant)
    num_special = pairs.num_special
    # Beside the special tokens at least one of each text is kept.
    truncation = Truncation.of(
        unvalidated.truncate_prompt_tokens, unvalidated.truncation_side, 2 + num_special, model, check
    )
    for one in unvalidated.pairs.inputs:
        check_text_limit(one.max_text_tokens, num_special, model, FieldChecker(one.field_path))
    inputs = unvalidated.pairs.inputs
    encoder = _PairEncoder(pairs, inputs, truncation, tokenizer, model, tenant)
    texts = await encoder.texts()
    places: dict[tuple[int, int], int] = {}
    requests = []
    for first, second in unvalidated.pairs.pairs:
        if places.setdefault((first, second), len(requests)) < len(requests):
            continue
        encoded = await encoder.join(texts, first, second)
        if body is not None:  # a text is in the prompts of up to a thousand pairs
            body.add(_TOKEN_BYTES * len(encoded.token_ids))
        requests.append(
            ValidatedValue(
                request_id,
                model.name,
                encoded.token_ids,
                ScoreParams(encoded.num_first_tokens, unvalidated.is_raw),
                priority,
                retention,
                inputs[second].field_path,
            )
        )
    of_pairs = [places[pair] for pair in unvalidated.pairs.pairs]

    def read(values: Sequence[Vector]) -> list[float]:
        return [values[place][0] for place in of_pairs]

    return ValidatedScores(requests, [(place,) for place in of_pairs], read)


async def _with_instruction(
    instruction: str, pairs: PairForm, tokenizer: ModelTokenizer, model: ModelInfo, check: FieldChecker, tenant: str
) -> PairForm:
    """The form of pairs with the instruction of the call. Raises QuireError."""
    where = check.field_path(Field.INSTRUCTION)
    check_text(instruction, tokenizer, model, FieldChecker(NamedFields({Field.TEXT: where})))
    try:
        changed = await pairs.with_instruction(instruction, tenant)
    except ChatTemplateError as error:
        raise check.invalid(Field.INSTRUCTION, "the chat template of the model rejects it") from error
    if changed is None:
        raise check.unsupported(Field.INSTRUCTION, _NO_INSTRUCTION)
    least, most = 2 + changed.num_special, model.context_length
    if least > most:
        message = f"leaves no room for texts: a pair has at least {least} tokens, and the context {most}"
        raise QuireError(Reason.CONTEXT_LENGTH_EXCEEDED, message, field=where)
    return changed


@dataclass(frozen=True, slots=True)
class _PairEncoder:
    """Makes the prompts of a call's pairs. Raises QuireError."""

    form: PairForm
    inputs: Sequence[ValueInput]
    truncation: Truncation
    tokenizer: ModelTokenizer
    model: ModelInfo
    tenant: str

    async def texts(self) -> list[PairText]:
        """The tokens of the inputs, each of which alone has at most as many as the context."""
        side, texts = self.truncation.side, []
        encoded = self.tokenizer.encode_texts(
            [TextToEncode(_text(one), add_special_tokens=False, of_chat=self.form.of_chat) for one in self.inputs],
            self.tenant,
        )
        async with aclosing(encoded):
            for one in self.inputs:
                token_ids, limit = await anext(encoded), one.max_text_tokens
                text = PairText.of(_text(one), token_ids, limit, self.truncation.num_kept, side)
                FieldChecker(one.field_path).tokens_of_text(Field.TEXT, text.token_ids, self.model)
                if len(text.token_ids) > self.model.context_length:
                    raise self._beyond_context(one, f"{len(text.token_ids)} tokens")
                texts.append(await self.form.shorten(text, side, self.tenant))
        return texts

    async def join(self, texts: Sequence[PairText], first: int, second: int) -> EncodedPair:
        """The prompt of two of the texts, by their indices."""
        truncation, of_second = self.truncation, FieldChecker(self.inputs[second].field_path)
        try:
            encoded = await self.form.join(
                texts[first], texts[second], truncation.num_kept, truncation.side, self.tenant
            )
        except ChatTemplateError as error:
            raise of_second.invalid(Field.TEXT, "the chat template of the model rejects this pair") from error
        of_second.tokens_of_text(Field.TEXT, encoded.token_ids, self.model)
        if (num_tokens := len(encoded.token_ids)) > self.model.context_length:
            longer = first if texts[first].num_tokens > texts[second].num_tokens else second
            raise self._beyond_context(self.inputs[longer], f"with the other text of its pair {num_tokens} tokens")
        return encoded

    def _beyond_context(self, one: ValueInput, tokens: str) -> QuireError:
        return beyond_context(Field.TEXT, tokens, self.model, FieldChecker(one.field_path))


def _text(one: ValueInput) -> str:
    assert isinstance(one.prompt, TextPrompt), "pairs are made of texts"
    return one.prompt.text
